"""What an attempt came to, by the reports of its nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from orchestrator.cluster.contract import Finished
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import (
    LinesRead,
    MeasurementPlan,
    Phase,
    ProgramSeen,
    RankFailure,
    RankResult,
)
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.verdict import AttemptVerdict, judge_attempt, relative_excess
from tests.core.trial.test_plausibility import noisy, run
from tests.db.builders import cell

GIB = 1 << 30
REFUSED = MemoryShortage(is_reported=True, asked_bytes=6 * GIB, device_bytes=80 * GIB)
HELD = replace(REFUSED, live_bytes=78 * GIB)
UNKNOWN = MemoryShortage(is_reported=True)


@pytest.mark.parametrize(
    ("peak_bytes", "device_bytes", "memory", "excess"),
    [
        (79 * GIB, 80 * GIB, HELD, 0.05),  # 78 held and 6 tried
        (
            79 * GIB,
            80 * GIB,
            REFUSED,
            0.0625,
            # 79 and 6: its peak is all that is known of what it held.
        ),
        (None, None, HELD, 0.05),  # a program that left no note
        (90 * GIB, 80 * GIB, UNKNOWN, 0.125),
        (
            60 * GIB,
            80 * GIB,
            REFUSED,
            None,
            # 66 of 80: the rest was the allocator's, or another process's.
        ),
        (79 * GIB, 80 * GIB, None, None),
        (79 * GIB, None, UNKNOWN, None),
        (None, None, None, None),
    ],
)
def test_the_excess_is_what_was_held_and_tried_beyond_the_device(
    peak_bytes: int | None,
    device_bytes: int | None,
    memory: MemoryShortage | None,
    excess: float | None,
) -> None:
    found = relative_excess(peak_bytes, device_bytes, memory)
    assert found == (None if excess is None else pytest.approx(excess))


def slowing_down(load: MachineLoad) -> Finished:
    """The end of a user's program whose first ten steps took 3.5 times as long as the others."""
    steps = [(3.5 if number < 12 else 1.0) * (1 + 0.001 * (number % 5)) for number in range(32)]
    ends = list(accumulate(steps))
    reads = [
        LinesRead(after=end - 0.05, at=end, num_steps=number)
        for number, end in enumerate(ends, start=1)
    ]
    result = RankResult(
        warmup_seconds=steps[:2],
        step_seconds=steps[2:],
        stack=Stack(torch="2.13.0"),
        seen=ProgramSeen(seconds=ends[-1] + 1, reads=reads),
    )
    outcome = RankOutcome(rank=0, exit_code=0, result=result)
    report = NodeReport(node="a", ranks=[outcome], load=load)
    return Finished(trial_id=1, reports=[report], failure=None, gpu_seconds=ends[-1])


def judged(
    end: Finished, *, was_edited: bool = False, not_passed: str | None = None
) -> AttemptVerdict:
    return judge_attempt(
        end,
        cell=cell(num_gpus=1, global_batch_size=1),
        layout=Layout(),
        plan=MeasurementPlan(warmup_steps=2, min_steps=8, max_steps=30, relative_confidence=0.02),
        peaks=MeasuredPeaks([], device_name=None),
        code=Fingerprint(orchestrator_version="test"),
        device_name=None,
        was_edited=was_edited,
        not_passed=not_passed,
    )


@pytest.mark.parametrize(("others", "is_implausible"), [(0.0, True), (1.8, False)])
def test_a_program_that_others_slowed_down_is_not_blamed(
    others: float, is_implausible: bool
) -> None:
    load = MachineLoad(cpu_cores=2, own_cpu_cores=0.2, sweep_cpu_cores=0.0, others_cpu_cores=others)
    verdict = judged(slowing_down(load))
    assert isinstance(verdict.outcome, Measurement)
    assert (verdict.outcome.implausible is not None) is is_implausible


@pytest.mark.parametrize(("buffered", "is_checked"), [(1, True), (1000, False)])
def test_a_measurement_says_if_only_the_time_of_its_program_bounds_its_steps(
    buffered: int, is_checked: bool
) -> None:
    told = run(noisy(0.2, 12), buffered=buffered).result()
    outcome = RankOutcome(rank=0, exit_code=0, result=told)
    report = NodeReport(node="a", ranks=[outcome])
    end = Finished(trial_id=1, reports=[report], failure=None, gpu_seconds=9.0)
    verdict = judged(end)
    assert isinstance(verdict.outcome, Measurement) and verdict.outcome.implausible is None
    assert (verdict.outcome.unchecked is None) is is_checked
    # Whatever varies and may not reach the program is said besides.
    also = judged(end, not_passed="mbs").outcome
    assert isinstance(also, Measurement)
    assert also.unchecked == ("mbs" if is_checked else f"{verdict.outcome.unchecked}; and mbs")


def test_a_measurement_that_cannot_be_true_gives_one_reason() -> None:
    """All its steps are equal to the last digit, and came at once."""
    told = run([0.123456] * 12, buffered=1000).result()
    outcome = RankOutcome(rank=0, exit_code=0, result=told)
    report = NodeReport(node="a", ranks=[outcome])
    end = Finished(trial_id=1, reports=[report], failure=None, gpu_seconds=9.0)
    verdict = judged(end, not_passed="mbs")
    assert isinstance(verdict.outcome, Measurement)
    assert verdict.outcome.implausible is not None and verdict.outcome.unchecked is None


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (None, FailureKind.EDITED),
        (FailureKind.USER_ERROR, FailureKind.EDITED),
        (FailureKind.OOM_GPU, FailureKind.EDITED),
        (FailureKind.NODE_LOST, FailureKind.NODE_LOST),
        (FailureKind.PREEMPTED, FailureKind.PREEMPTED),
        (FailureKind.CANCELLED, FailureKind.CANCELLED),
    ],
)
def test_an_edit_explains_no_failure_of_the_machine(
    kind: FailureKind | None, kept: FailureKind
) -> None:
    failure = None if kind is None else Failure(kind=kind, message="m")
    end = replace(slowing_down(MachineLoad()), failure=failure)
    verdict = judged(end, was_edited=True)
    assert isinstance(verdict.outcome, Failure) and verdict.outcome.kind is kept
    # Nothing was measured, and with no code that is known.
    assert verdict.facts.get("timed_seconds") is None
    assert kept is not FailureKind.EDITED or verdict.facts["fingerprint"] is None
    assert verdict.facts["gpu_seconds"] == end.gpu_seconds


def test_the_phases_of_a_failed_attempt_are_the_ranks_own_else_their_launchers() -> None:
    own = RankFailure(
        exception="E",
        message="m",
        phase=Phase.STEADY,
        at_unix_seconds=1.0,
        phase_seconds={Phase.START: 4.0, Phase.STEADY: 1.0},
    )
    ranks = [
        RankOutcome(rank=0, exit_code=1, failure=own, phase_seconds={Phase.START: 9.0}),
        RankOutcome(rank=1, phase_seconds={Phase.START: 2.0, Phase.FIRST_STEP: 3.0}),
    ]
    end = Finished(
        trial_id=1,
        reports=[NodeReport(node="a", ranks=ranks)],
        failure=Failure(kind=FailureKind.USER_ERROR, message="m"),
        gpu_seconds=9.0,
    )
    assert judged(end).facts["phases"] == {
        Phase.START: 4.0,
        Phase.FIRST_STEP: 3.0,
        Phase.STEADY: 1.0,
    }
