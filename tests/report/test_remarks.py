"""Remarks in one line about a cell."""

from __future__ import annotations

import pytest

from db.read.rows import CellRow, CellStatus
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.remarks import implausible_text, waiting_text, why_no_best
from orchestrator.sweep.progress import StopReason
from tests.db.builders import cell


def row(stop_reason: StopReason | None = None) -> CellRow:
    return CellRow(
        id=1,
        sweep_id=1,
        cell=cell(),
        fingerprint_digest=None,
        stop_reason=stop_reason,
        num_untried=0,
    )


def test_numbers_that_cannot_be_true_and_those_of_other_conditions_are_both_counted() -> None:
    nums = dict.fromkeys(TrialState, 0) | {TrialState.MEASURED: 3, TrialState.FAILED: 1}
    status = CellStatus(cell=row(), num_trials=nums, best=None, num_launched=4, num_implausible=2)
    assert why_no_best(status) == (
        "no layout can be ranked: 2 measured and left out, since the numbers cannot be true,"
        " 1 measured under other conditions, 1 failed"
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (StopReason.EXHAUSTED, "the same `sweep run` measures what its file still names of them"),
        (StopReason.WALL_TIME, "the same `sweep run` measures what its file still names of them"),
        (StopReason.COST, "search.max_cost is spent, so raise it"),
        (StopReason.GPU_HOURS, "search.max_gpu_hours is spent, so raise it"),
    ],
)
def test_layouts_that_wait_are_said_to_need_what_they_need(reason: StopReason, said: str) -> None:
    assert f"1 layout waits to be measured: {said}" in waiting_text(row(reason), 1)
    assert "2 layouts wait to be" in waiting_text(row(reason), 2)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ({1: "too short", 2: "too short"}, "trials 1 and 2; too short"),
        (
            {4: "too short", 2: "too long"},
            "trials 4 and 2. Trial 4: too short (1 other reason: sweep trials)",
        ),
        ({1: "a", 2: "b", 3: "c"}, "a (2 other reasons: sweep trials)"),
    ],
)
def test_the_reasons_that_are_not_shown_are_counted(why: dict[int, str], said: str) -> None:
    assert implausible_text(why).endswith(said)
