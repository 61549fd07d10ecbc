"""What a call says of itself while it works: the state as of each end, in order, what runs, and how
long it may still take.
"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cli.run.progress import Progress
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Phase
from orchestrator.core.trial.purpose import Purpose
from orchestrator.sweep.progress import (
    Running,
    SearchEnded,
    Snapshot,
    StopReason,
    TimeLeft,
    TrialEnded,
    time_left,
)

CELL = Cell(model=PRESETS["llama-tiny"], num_gpus=2, sequence_length=64, global_batch_size=8)
LAYOUT = Layout(data_parallel_size=2, micro_batch_size=4)


# Ten seconds a trial, one after the other; one runs.
PACE: dict[str, Any] = {
    "seconds": 20.0,
    "attempt_seconds": 20.0,
    "num_ended": 2,
    "num_running": 1,
    "most_new": 4,
    "most_repeats": [],
    "may_end_early": False,
}


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"seconds": 9.0, "num_ended": 1}, None),
        ({}, (50.0, 50.0)),
        ({"may_end_early": True}, (10.0, 50.0)),
        ({"num_running": 0, "most_new": 0, "may_end_early": True}, (0.0, 0.0)),
        # 40 s a trial, four at a time, so that ten seconds pass from end to end.
        ({"attempt_seconds": 80.0, "most_new": 7}, (80.0, 80.0)),
        # The last one takes as long as any.
        ({"attempt_seconds": 80.0, "most_new": 0}, (40.0, 40.0)),
        # Repeats of a cell wait for each other, those of another cell do not.
        ({"attempt_seconds": 80.0, "most_repeats": [3, 2]}, (170.0, 170.0)),
        ({"most_repeats": [3, 2]}, (100.0, 100.0)),
    ],
    ids=[
        *("one says little", "all", "at most all", "nothing"),
        *("side by side", "the last", "repeats", "repeats one by one"),
    ],
)
def test_the_time_left_is_that_of_what_may_come_at_the_pace_so_far(
    changes: dict[str, Any], left: tuple[float, float] | None
) -> None:
    found = time_left(**(PACE | changes))
    assert (None if found is None else (found.least, found.most)) == left


def test_no_budget_is_outlasted() -> None:
    assert time_left(**PACE, wall_seconds_left=15.0) == TimeLeft(least=15.0, most=15.0)
    # 40 GPU-seconds in 20 s: 60 more are held within 30 s.
    assert time_left(**PACE, gpu_seconds_left=60.0, gpu_seconds=40.0) == TimeLeft(
        least=30.0, most=30.0
    )
    assert time_left(**(PACE | {"num_ended": 0}), wall_seconds_left=15.0) == TimeLeft(
        least=0.0, most=15.0
    )


@pytest.mark.parametrize("num_ended", [0, 2])
@pytest.mark.parametrize(
    "budget",
    [{"wall_seconds_left": 0.0}, {"wall_seconds_left": 9.0, "gpu_seconds_left": 0.0}],
    ids=["time", "GPU time"],
)
def test_a_spent_budget_leaves_no_time_to_start_anything(
    budget: dict[str, float], num_ended: int
) -> None:
    found = time_left(**(PACE | {"num_ended": num_ended}), **budget, gpu_seconds=40.0)
    assert found == TimeLeft(least=0.0, most=0.0, is_spent=True)


def snapshot(**changes: object) -> Snapshot:
    values: dict[str, object] = {
        "sweep": "t",
        "counts": {TrialState.MEASURED: 2},
        "untried": 30,
        "num_launched": 3,
        "at_most": 10,
        "num_repeats": 0,
        "most_repeats": 7,
        "running": [],
        "best": {},
        "gpu_seconds": 0.0,
        "seconds": 75.0,
        "left": None,
        "ended": [],
        "searched": [],
    }
    return Snapshot(**(values | changes))  # type: ignore[arg-type]


def said(capsys: pytest.CaptureFixture[str], **changes: object) -> list[str]:
    with Progress(objective=Objective.TOKENS_PER_SECOND_PER_GPU) as progress:
        progress.show(snapshot(**changes))
    return capsys.readouterr().err.splitlines()


def test_what_runs_is_named_with_its_phase_and_how_long_all_may_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = Running(
        trial_id=4, cell=CELL, layout=LAYOUT, phase=Phase.FIRST_STEP, step=0, since=0.0
    )
    later = Running(trial_id=5, cell=CELL, layout=LAYOUT, phase=None, step=0, since=0.0)
    assert said(capsys, running=[running, later], left=TimeLeft(least=60.0, most=240.0)) == [
        "[1:15] 3 of at most 10 launched: 2 measured, likely 1 min to 4 min left"
        " | trial 4, 2 GPUs, dp2 mbs4 ga1 none bf16: first step; and 1 more"
    ]


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (TimeLeft(least=47.0, most=47.0), ", about 50 s left"),
        (TimeLeft(least=0.0, most=7400.0), ", likely done within 2 h 00 min"),
        (TimeLeft(least=300.0, most=1800.0), ", likely 5 min to 30 min left"),
        (TimeLeft(least=3.0, most=3.0), ", less than 10 s left"),
        (TimeLeft(least=0.0, most=0.0), ""),
        (
            TimeLeft(least=0.0, most=0.0, is_spent=True),
            ", a budget is spent and nothing more is started",
        ),
        (None, ""),
    ],
)
def test_an_estimate_has_no_more_digits_than_it_is_worth(
    capsys: pytest.CaptureFixture[str], left: TimeLeft | None, words: str
) -> None:
    assert said(capsys, left=left) == [
        f"[1:15] 3 of at most 10 launched: 2 measured{words} | nothing runs now"
    ]


def test_each_end_is_told_with_the_state_as_of_then_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = TrialEnded(
        text="trial 1 a: 100",
        seconds=10.0,
        counts={TrialState.MEASURED: 1},
        num_launched=2,
        num_running=1,
    )
    second = TrialEnded(
        text="trial 2 b: 200",
        seconds=70.0,
        counts={TrialState.MEASURED: 2},
        num_launched=3,
        num_running=0,
    )
    searched = SearchEnded(cell=CELL, reason=StopReason.TRIALS, untried=7, seconds=60.0)
    assert said(capsys, ended=[first, second], searched=[searched]) == [
        "[0:10] 2 of at most 10 launched: 1 measured, 1 running | trial 1 a: 100",
        "[1:00] llama-tiny_2gpu_s64_gb8: no new layout is started: max_trials reached;"
        " 7 layouts never tried",
        "[1:10] 3 of at most 10 launched: 2 measured | trial 2 b: 200",
    ]


def test_repeats_are_counted_by_themselves_once_there_are_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All layouts may have been launched long before the last repeat has ended."""
    again = Running(
        trial_id=4,
        cell=CELL,
        layout=LAYOUT,
        phase=Phase.STEADY,
        step=3,
        since=0.0,
        purpose=Purpose.CONFIRMATION,
    )
    now: dict[str, Any] = {"num_launched": 10, "num_repeats": 2}
    assert said(capsys, running=[again], **now) == [
        "[1:15] 10 of at most 10 launched: 2 measured; 2 repeats so far, up to 5 more expected"
        " | trial 4 again (to confirm the winner), 2 GPUs, dp2 mbs4 ga1 none bf16: steady, step 3"
    ]
    ended = TrialEnded(
        text="trial 4 again (to confirm the winner): 100",
        seconds=70.0,
        counts={TrialState.MEASURED: 2},
        num_launched=10,
        num_running=0,
        num_repeats=1,
    )
    assert said(capsys, ended=[ended], **now) == [
        "[1:10] 10 of at most 10 launched: 2 measured; 1 repeat so far, up to 6 more expected"
        " | trial 4 again (to confirm the winner): 100"
    ]
    (line,) = said(capsys, running=[again], **now, most_repeats=2)
    assert "; 2 repeats so far | " in line


def test_a_line_that_quotes_a_rank_or_an_address_at_length_is_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = TrialEnded(
        text=f"trial 1: failed, {'x' * 28_000} (log: there)",
        seconds=10.0,
        counts={TrialState.FAILED: 1},
        num_launched=1,
        num_running=0,
    )
    (line,) = said(capsys, ended=[long])
    assert len(line) < 1_200 and line.endswith("(log: there)")
    with Progress(objective=Objective.TOKENS_PER_SECOND_PER_GPU) as progress:
        progress.say(f"Joining the Ray cluster at {'z' * 28_000}:1 ...")
    assert len(capsys.readouterr().err) < 1_200
