"""A cell of a running sweep: what it repeats, and who may change its parts."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.search_section import Strategy
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.search.searcher import Searcher
from orchestrator.sweep.attempt_cost import AttemptCost
from orchestrator.sweep.attempts import CellAttempts
from orchestrator.sweep.cell_life import CellLife
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.confirmation import Confirmation
from orchestrator.sweep.measured_runs import MeasuredRuns
from orchestrator.sweep.retries import Retries
from tests.search.planted_cell import TOKENS, drive, measured, planted, searcher


def on_16_gpus(search: Searcher) -> CellSearch:
    cell = Cell(
        model=PRESETS["llama-3.1-8b"], num_gpus=16, sequence_length=4096, global_batch_size=256
    )
    return CellSearch(
        id=1,
        cell=cell,
        shape=Shape(num_nodes=2, slots_per_node=8),
        objective=TOKENS,
        searcher=search,
        cost=AttemptCost(cell=cell, predicted_seconds=60.0),
    )


def test_a_layout_that_was_repeated_before_does_not_stand_before_the_next_that_is_doubted() -> None:
    cell = planted(zero_stages=(1,))
    table, speeds = cell.candidates.table, cell.candidates.tokens_per_second_per_gpu
    smooth = replace(
        cell, value={table.layout(row): float(speeds[row]) for row in range(len(table))}
    )
    search = searcher(smooth, Strategy.AUTO)
    asked, _ = drive(search, smooth, 25)
    run = on_16_gpus(search)
    ran = sorted(
        (layout for layout in asked if smooth.excess[layout] <= 0), key=smooth.value.__getitem__
    )
    worse, lone = ran[-1], ran[-2]
    for trial_id, layout, factor in ((1, worse, 6), (2, lone, 3)):
        search.tell(layout, measured(smooth.cell, smooth.value[layout] / factor))
        run.note_measured(trial_id, layout, Run(step_seconds=1.0))
    run.attempts.repeats[1] = Purpose.CONFIRMATION
    run.confirmation.begin(1)
    found = run.take_doubt()
    assert found is not None
    assert (found.trial_id, found.layout, found.purpose) == (2, lone, Purpose.DOUBT)
    assert run.take_doubt() is None


def test_nobody_reaches_through_a_cell_to_change_a_part_of_it() -> None:
    parts = {
        "attempts": CellAttempts,
        "life": CellLife,
        "retries": Retries,
        "cost": AttemptCost,
        "confirmation": Confirmation,
        "runs": MeasuredRuns,
        "searcher": Searcher,
    }
    package = Path(inspect.getfile(CellSearch)).parent
    found = [
        f"{path.name}:{line}: {text}"
        for path in sorted(package.glob("*.py"))
        if path.name != "cell_search.py"
        for line, text in reached_through(ast.parse(path.read_text()), parts)
    ]
    assert found == []


def reached_through(tree: ast.Module, parts: Mapping[str, type]) -> list[tuple[int, str]]:
    """The assignments and calls in a module that change a cell, or a part of a cell."""
    found = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Attribute() as place])
                | ast.AugAssign(target=ast.Attribute() as place)
            ):
                owner = ast.unparse(place.value).split(".")
                is_change = owner[0] == "search" or bool(owner[1:] and owner[-1] in parts)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=part), attr=name)):
                is_change = part in parts and name in changing(parts[part])
            case _:
                continue
        # An object may have a part of its own that is called so.
        if is_change and not ast.unparse(node).startswith("self."):
            found.append((node.lineno, ast.unparse(node)))
    return found


def changing(part: type) -> set[str]:
    """The methods that change a part of a cell: those without a value, and these with one."""
    methods = inspect.getmembers(part, inspect.isfunction)
    without_value = {name for name, one in methods if one.__annotations__.get("return") == "None"}
    return without_value | {"ask", "fail", "restore", "take_freed", "tell"}


@pytest.mark.parametrize(
    ("code", "num"),
    [
        ("search.retries.avoid(1, nodes)", 1),
        ("one.cost.note_reserved(1.0, is_measured=True)", 1),
        ("search.searcher.tell(layout, Failed())", 1),
        ("search.launched += 1", 1),
        ("search.cost.last_seconds = 1.0", 1),
        ("self._confirmation.note(1, layout, run)", 0),
        ("search.retries.avoids(trial, nodes)", 0),
        ("search.avoid(1, nodes)", 0),
    ],
)
def test_a_change_of_a_part_is_found(code: str, num: int) -> None:
    parts = {"retries": Retries, "cost": AttemptCost, "searcher": Searcher}
    assert len(reached_through(ast.parse(code), parts)) == num
