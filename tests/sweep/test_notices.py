"""What is worth telling: equal failures, a spent budget, a winner, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.core.errors import StoreUnavailable
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.sweep.notices import EQUAL_FAILURES, NoticeEvent, Notices
from orchestrator.sweep.progress import (
    CellSettled,
    SearchEnded,
    Snapshot,
    StopReason,
    SweepResult,
    TrialEnded,
)

CELL = Cell(model=PRESETS["llama-tiny"], num_gpus=2, sequence_length=64, global_batch_size=8)
LAYOUT = Layout(data_parallel_size=2, micro_batch_size=4)
OTHER = Layout(data_parallel_size=2, micro_batch_size=2, grad_accum_steps=2)


def notices(*, objective: Objective = Objective.TOKENS_PER_SECOND_PER_GPU) -> Notices:
    return Notices("8b", objective, is_simulated=False)


def snapshot(**changes: Any) -> Snapshot:
    given: dict[str, Any] = {
        "sweep": "8b",
        "counts": {},
        "untried": 0,
        "num_launched": 0,
        "at_most": 0,
        "num_repeats": 0,
        "most_repeats": 0,
        "running": [],
        "best": {CELL: (LAYOUT, 1234.5)},
        "gpu_seconds": 7200.0,
        "seconds": 1.0,
        "left": None,
        "ended": [],
        "searched": [],
    }
    return Snapshot(**(given | changes))


def failed(*kinds: FailureKind | None) -> Snapshot:
    ended = [
        TrialEnded(
            text=f"trial {number}: {kind}",
            failure_kind=kind,
            seconds=1.0,
            counts={},
            num_launched=1,
            num_running=0,
        )
        for number, kind in enumerate(kinds)
    ]
    return snapshot(ended=ended)


def settled(tied: Sequence[Layout], num_runs: int) -> Snapshot:
    one = CellSettled(cell=CELL, tied=tied, num_runs=num_runs, seconds=1.0)
    return snapshot(settled=[one])


def result(**changes: Any) -> SweepResult:
    given: dict[str, Any] = {
        "sweep_id": 1,
        "counts": {TrialState.MEASURED: 12, TrialState.OUT_OF_MEMORY: 1},
        "stopped": {CELL: StopReason.PLATEAU},
        "interrupted": False,
        "nothing_feasible": [],
        "nothing_fits": {},
        "tied": {CELL: [LAYOUT]},
        "untried": {},
    }
    return SweepResult(**(given | changes))


def test_nothing_is_told_while_nothing_happens() -> None:
    told = notices()
    assert told.of_snapshot(snapshot()) == []
    assert told.of_snapshot(failed(None, FailureKind.OOM_GPU, FailureKind.NCCL)) == []


def test_equal_failures_are_told_once_and_those_of_memory_never() -> None:
    told = notices()
    kinds = [FailureKind.NCCL, FailureKind.HUNG, FailureKind.OOM_GPU, FailureKind.CANCELLED]
    for _ in range(EQUAL_FAILURES - 1):
        assert told.of_snapshot(failed(*kinds)) == []
    (notice,) = told.of_snapshot(failed(FailureKind.NCCL))
    assert notice.event is NoticeEvent.FAILURES
    assert notice.text == "Sweep 8b: 5 attempts failed with nccl, the last: trial 0: nccl"
    assert told.of_snapshot(failed(*[FailureKind.NCCL] * 20)) == []
    assert len(told.of_snapshot(failed(FailureKind.HUNG))) == 1


def test_a_budget_is_told_once_for_all_cells() -> None:
    told = notices()

    def ended(reason: StopReason) -> Snapshot:
        one = SearchEnded(cell=CELL, reason=reason, untried=3, seconds=1.0)
        return snapshot(searched=[one, one])

    assert told.of_snapshot(ended(StopReason.PLATEAU)) == []
    (notice,) = told.of_snapshot(ended(StopReason.GPU_HOURS))
    assert notice.event is NoticeEvent.BUDGET and "max_gpu_hours reached" in notice.text
    assert "2.00 GPU-hours are reserved" in notice.text
    assert told.of_snapshot(ended(StopReason.GPU_HOURS)) == []
    assert len(told.of_snapshot(ended(StopReason.COST))) == 1


@pytest.mark.parametrize(
    ("tied", "num_runs", "said"),
    [
        ([LAYOUT], 3, "1,234 tokens/s/GPU: the winner, confirmed by 3 runs"),
        ([LAYOUT, OTHER], 3, "1,234 tokens/s/GPU (tied with 1 more)"),
        ([LAYOUT], 1, "1,234 tokens/s/GPU"),
    ],
    ids=["winner", "tied", "one run"],
)
def test_a_settled_cell_is_told_as_it_is(tied: list[Layout], num_runs: int, said: str) -> None:
    (notice,) = notices().of_snapshot(settled(tied, num_runs))
    assert notice.event is NoticeEvent.WINNER
    assert notice.text.endswith(f"{LAYOUT.short}, {said}")


def test_the_end_has_the_reason_the_counts_and_the_best() -> None:
    told = notices()
    told.of_snapshot(snapshot())
    first, best = told.of_result(result()).text.split("\n")
    assert first == "Sweep 8b: ended (plateau: no more gain): 12 measured, 1 out of memory"
    assert best == f"{CELL.key}: {LAYOUT.short}, 1,234 tokens/s/GPU"
    assert "stopped on request" in told.of_result(result(interrupted=True)).text
    nothing = told.of_result(result(tied={}, nothing_feasible=[CELL])).text
    assert f"{CELL.key}: nothing was measured" in nothing


def test_an_error_and_a_simulation_are_said() -> None:
    told = Notices("8b-simulated", Objective.STEP_SECONDS, is_simulated=True)
    told.of_snapshot(snapshot(best={CELL: (LAYOUT, 0.5)}))
    assert told.of_result(result()).text.startswith("Simulated, nothing was measured. Sweep 8b-")
    assert told.of_result(result()).text.endswith(", 0.5 s per step")
    assert (
        "ended with an error: no disk\nThe same" in told.of_error(StoreUnavailable("no disk")).text
    )


def test_a_sweep_of_many_cells_makes_no_long_message() -> None:
    cells = {
        Cell(model=CELL.model, num_gpus=2, sequence_length=64, global_batch_size=8 * n): [LAYOUT]
        for n in range(1, 101)
    }
    lines = notices().of_result(result(tied=cells)).text.split("\n")
    assert len(lines) == 12 and lines[-1] == "and 90 more lines"
