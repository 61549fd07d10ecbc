"""How long a cell waits for nodes that were lost, before it gives up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.machines.packing import Shape
from orchestrator.sweep.missing_nodes import MissingNodes
from orchestrator.sweep.placement import Placement
from orchestrator.sweep.progress import StopReason

PATIENCE = 300.0
FOUR = {"a": 8, "b": 8, "c": 8, "d": 8}


class World:
    """Four nodes of which some are lost, a clock, and a pool whose checks may be under way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = SimpleNamespace(awaits_answers=False)
        self.placement = Placement(FOUR, exclusive=False, shares_budget=False)
        settings = SimpleNamespace(measurement=SimpleNamespace(wait_for_nodes=PATIENCE))
        call: Any = SimpleNamespace(spec=settings, clock=lambda: self.now)
        pool: Any = self.pool
        self.missing = MissingNodes(call, self.placement, pool)
        self.missing.see(FOUR)

    def keep(self, nodes: str) -> None:
        self.missing.see(dict.fromkeys(nodes, 8))

    def gave_up_at(self, cell: Any, now: float) -> bool:
        self.now = now
        reason = self.missing.gave_up(cell)
        assert reason in (None, StopReason.NODES)
        return reason is not None


@pytest.fixture
def world() -> World:
    return World()


def cell(num_nodes: int = 3, *, id_: int = 1) -> Any:
    return SimpleNamespace(
        id=id_,
        shape=Shape(num_nodes=num_nodes, slots_per_node=8),
        cell=SimpleNamespace(key=f"cell-{id_}"),
    )


def test_a_cell_that_the_nodes_hold_does_not_wait(world: World) -> None:
    world.keep("abc")
    assert not world.gave_up_at(cell(), 1e9)
    assert not world.missing.waits(cell())


def test_a_cell_gives_up_once_it_has_waited_longer_than_the_file_says(world: World) -> None:
    world.keep("ab")
    assert not world.gave_up_at(cell(), 10.0)
    assert world.missing.waits(cell())
    assert not world.gave_up_at(cell(), 10.0 + PATIENCE)
    assert world.gave_up_at(cell(), 10.0 + PATIENCE + 0.5)


def test_only_cells_that_need_the_lost_nodes_wait(world: World) -> None:
    world.keep("ab")
    assert not world.gave_up_at(cell(), 0.0)
    assert not world.gave_up_at(cell(2, id_=2), 0.0)
    assert world.gave_up_at(cell(), PATIENCE + 1)
    assert not world.gave_up_at(cell(2, id_=2), PATIENCE + 1)


def test_the_wait_begins_again_with_each_node_that_is_lost_for_the_first_time(
    world: World,
) -> None:
    world.keep("ab")
    assert not world.gave_up_at(cell(), 0.0)
    world.now = 200.0
    world.keep("a")
    assert not world.gave_up_at(cell(), PATIENCE + 1)
    assert world.gave_up_at(cell(), 200.0 + PATIENCE + 1)


def test_a_node_that_comes_and_goes_does_not_keep_a_cell_waiting(world: World) -> None:
    world.keep("ab")
    assert not world.gave_up_at(cell(4), 0.0)
    world.now = 200.0
    world.keep("abc")
    world.keep("ab")
    assert world.gave_up_at(cell(4), PATIENCE + 1)


def test_a_cell_whose_nodes_came_back_waits_anew_when_they_are_lost_again(world: World) -> None:
    world.keep("ab")
    assert not world.gave_up_at(cell(), 0.0)
    world.keep("abc")
    assert not world.gave_up_at(cell(), 200.0)
    world.keep("ab")
    assert not world.gave_up_at(cell(), PATIENCE + 1)
    assert world.gave_up_at(cell(), 200.0 + 2 * PATIENCE + 2)


def test_a_cell_does_not_give_up_while_nodes_are_checked(world: World) -> None:
    world.keep("ab")
    assert not world.gave_up_at(cell(), 0.0)
    world.pool.awaits_answers = True
    assert not world.gave_up_at(cell(), 1e6)
    world.pool.awaits_answers = False
    assert world.gave_up_at(cell(), 1e6)
