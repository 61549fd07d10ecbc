"""Which waiting cell starts a gang on free nodes, and what keeps the others waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cluster.contract import Slots
from orchestrator.core.machines.packing import Shape
from orchestrator.core.sweepfile.search_section import Search
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.placement import Placement, most_at_once

TWO_NODES = {"a": 4, "b": 4}


def placement(*, exclusive: bool = False, shares_budget: bool = False) -> Placement:
    return Placement(TWO_NODES, exclusive=exclusive, shares_budget=shares_budget)


def cell(
    id_: int,
    *,
    num_nodes: int = 1,
    slots: int = 4,
    launched: int = 100,
    needs_own_nodes: bool = False,
    has_only_suspects: bool = False,
) -> Any:
    return SimpleNamespace(
        id=id_,
        shape=Shape(num_nodes=num_nodes, slots_per_node=slots),
        cost=SimpleNamespace(expected_seconds=10.0),
        launched=launched,
        has_only_suspects=has_only_suspects,
        retries=SimpleNamespace(needs_own_nodes=needs_own_nodes),
    )


def attempt(id_: int, *nodes: str) -> Any:
    return SimpleNamespace(id=id_, nodes=nodes, since=0.0)


def started(found: tuple[Any, tuple[str, ...]] | None) -> tuple[int, tuple[str, ...]] | None:
    return None if found is None else (found[0].id, found[1])


@pytest.mark.parametrize(
    ("asked", "usual", "expected"), [(3, 7, 3), ("auto", 7, 7), ("auto", None, 8)]
)
def test_the_file_says_how_many_run_at_once_then_the_scheduler_then_the_slots(
    asked: int | str, usual: int | None, expected: int
) -> None:
    slots = Slots(device=Device.CPU, device_name=None, nodes=TWO_NODES, usual_at_once=usual)
    settings = Search.model_validate({"max_parallel_trials": asked})
    assert most_at_once(settings, slots) == expected


def test_a_wide_gang_waits_for_its_nodes_and_a_narrow_one_fills_them_only_for_so_long() -> None:
    place = placement()
    wide, narrow = cell(1, num_nodes=2), cell(2, slots=2)
    place.take(attempt(1, "a"), cell(3), alone=False)  # until 10 s
    assert started(place.next([wide, narrow], 0.0, {})) == (2, ("b",))
    # It would still run when the wide gang could start.
    assert place.next([wide, narrow], 5.0, {}) is None
    place.give_back(attempt(1, "a"))
    assert started(place.next([wide, narrow], 5.0, {})) == (1, ("a", "b"))


def test_the_first_trials_of_a_cell_go_before_the_later_ones_of_another() -> None:
    early, late = cell(1, launched=0), cell(2, launched=100)
    assert started(placement().next([late, early], 0.0, {})) == (1, ("a",))


def test_a_suspected_cell_lets_the_others_go_first() -> None:
    cells = [cell(1), cell(2)]
    assert started(placement().next(cells, 0.0, {}, suspected={1})) == (2, ("a",))
    assert started(placement().next(cells[:1], 0.0, {}, suspected={1})) == (1, ("a",))


@pytest.mark.parametrize(
    ("exclusive", "of_cell", "is_shared"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"needs_own_nodes": True}, False),
        (False, {"has_only_suspects": True}, False),
    ],
)
def test_a_gang_shares_a_node_unless_its_cell_or_the_file_asks_for_whole_nodes(
    exclusive: bool, of_cell: dict[str, bool], is_shared: bool
) -> None:
    place = Placement({"a": 4}, exclusive=exclusive, shares_budget=False)
    place.take(attempt(1, "a"), cell(1, slots=2), alone=False)
    found = place.next([cell(2, slots=2, **of_cell)], 0.0, {})
    assert (found is not None) is is_shared


def test_nobody_joins_an_attempt_that_is_to_be_alone() -> None:
    place = placement()
    place.take(attempt(1, "a"), cell(1, slots=2), alone=True)
    assert started(place.next([cell(2, slots=2)], 0.0, {})) == (2, ("b",))
    assert not place.are_unused(["a"])
    assert place.are_unused(["b"])


def test_a_retry_gets_other_nodes_or_none() -> None:
    place, search = placement(), cell(1)
    assert place.elsewhere(search, {"a"}, {}) == ("b",)
    assert place.elsewhere(search, {"a", "b"}, {}) is None
    place.take(attempt(1, "b"), cell(2, slots=1), alone=False)
    assert place.elsewhere(search, {"a"}, {}) is None
    # Once they are free, they would do.
    assert place.is_possible_without(search.shape, {"a"})
    assert not place.is_possible_without(search.shape, {"a", "b"})


def test_what_may_start_follows_from_the_free_slots_and_what_is_possible_from_all() -> None:
    place = placement()
    whole = cell(1, num_nodes=2)
    assert place.may_start([whole])
    place.take(attempt(1, "a"), cell(2, slots=1), alone=False)
    assert not place.may_start([whole])
    assert place.may_start([whole, cell(3, slots=1)])
    assert place.is_possible(whole.shape)
    place.see({"a": 4})
    assert not place.is_possible(whole.shape)


def test_a_gang_of_a_lost_node_can_still_give_its_slots_back() -> None:
    place = placement()
    place.take(attempt(1, "b"), cell(1), alone=False)
    place.see({"a": 4})
    place.give_back(attempt(1, "b"))
    place.see(TWO_NODES)
    assert place.may_start([cell(2, num_nodes=2)])
