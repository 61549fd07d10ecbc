"""`sweep doctor --workload` judges the pace of lines as every trial is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.program_contract import (
    ContractRun,
    StepTimes,
    judge_contract,
    layout_check,
    steps_for_pace,
)
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial import plausibility
from orchestrator.core.trial.failure_kinds import POLICIES, Failure, FailureKind
from orchestrator.core.trial.measurement import Measurement, StepTime
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import (
    STACKS_BEGIN,
    Device,
    DriverMemoryKind,
    LinesRead,
    MeasurementPlan,
    ProgramSeen,
    RankResult,
)

LAYOUT = Layout(grad_accum_steps=4)
PLAN = MeasurementPlan(warmup_steps=2, min_steps=2, max_steps=8, relative_confidence=0.02)
# Ten steps of half a second, of which the rank looks for lines 20 times a second.
NUM_STEPS, STEP_SECONDS, POLL_SECONDS = 10, 0.5, 0.05


def result(told: Sequence[float], *, pause_before: int | None = None) -> RankResult:
    """A program whose steps take half a second, with a pause of 20 s before one of them."""
    reads, at = [], 1.0
    for step in range(1, len(told) + 1):
        at += STEP_SECONDS + (20.0 if step == pause_before else 0.0)
        reads.append(LinesRead(after=at - POLL_SECONDS, at=at, num_steps=step))
    return RankResult(
        warmup_seconds=list(told[:2]),
        step_seconds=list(told[2:]),
        seen=ProgramSeen(seconds=at + 0.5, reads=reads),
    )


def pace_of(found: RankResult | None) -> Check:
    return check_of("pace", found)


def check_of(
    name: str,
    found: RankResult | None,
    *,
    num_lines: int = NUM_STEPS,
    report: NodeReport | None = None,
    world_size: int = 1,
    ranks: Sequence[int] = (0,),
    connected: Sequence[int] = (),
    seconds: float = 7.0,
) -> Check:
    times = StepTimes(num_steps=[1, num_lines], at_seconds=[1.5, 6.0])
    run = ContractRun(
        world_size=world_size,
        layout=LAYOUT,
        device=Device.CPU,
        report=report
        or NodeReport(
            node="a", ranks=[RankOutcome(rank=0, result=found)] if found is not None else []
        ),
        # What the attempt came to is another point.
        outcome=Failure(kind=FailureKind.BAD_RESULT, message="not judged here"),
        seconds=seconds,
        steps=times,
        num_steps_asked=NUM_STEPS,
        ranks=ranks,
        connected_ranks=connected,
    )
    return next(check for check in judge_contract(run) if check.name == name)


def test_a_program_that_keeps_its_pace_shows_both_times() -> None:
    check = pace_of(result([STEP_SECONDS + step / 500 for step in range(NUM_STEPS)]))
    assert check.status is Status.OK
    assert check.found == "9 steps report 4.59 s, and came within 4.50 s"


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.0, 1.4, 2.0, 1000.0])
@pytest.mark.parametrize("pause_before", [None, 6])
def test_the_doctor_says_of_the_pace_what_a_trial_says(
    factor: float, pause_before: int | None
) -> None:
    """A pause for a checkpoint in one of ten steps changes no median, so no trial is marked."""
    told = [factor * (STEP_SECONDS + step / 500) for step in range(NUM_STEPS)]
    one = result(told, pause_before=pause_before)
    check = pace_of(one)
    try:
        reason = plausibility.judge_run(one, layout=LAYOUT, sequence_length=64, plan=PLAN)
    except plausibility.ImplausibleMeasurement as refused:
        reason = str(refused)
    assert (check.status is Status.FAIL) is (reason is not None)
    if reason is not None:
        assert check.found == plausibility.without_gpus(reason)


def test_too_few_lines_are_not_compared() -> None:
    check = pace_of(result([STEP_SECONDS] * 4))
    assert check.status is Status.OK and check.found.startswith("not comparable")
    nothing = pace_of(None)
    assert nothing.status is Status.OK and nothing.found.startswith("not comparable")


@pytest.mark.parametrize("seen", [{}, {"reads": [LinesRead(after=9.0, at=9.1, num_steps=10)]}])
def test_steps_that_come_at_once_have_no_pace_and_the_doctor_says_what_that_means(
    seen: dict[str, Any],
) -> None:
    told = [STEP_SECONDS + step / 1000 for step in range(NUM_STEPS)]
    found = RankResult(step_seconds=told, seen=ProgramSeen(seconds=60.0, **seen))
    check = pace_of(found)
    assert check.status is Status.WARN and "flush it" in check.advice
    # They may be so short, or a clock that does not wait says so.
    short = [step / 100 for step in told]
    assert pace_of(found.model_copy(update={"step_seconds": short})).status is Status.WARN


def test_the_doctor_warns_of_lines_that_come_in_groups() -> None:
    """Ten steps of 0.5 s that are written five at a time: too few groups to compare."""
    reads = [
        LinesRead(after=9.95, at=10.0, num_steps=5),
        LinesRead(after=12.45, at=12.5, num_steps=10),
    ]
    told = [STEP_SECONDS + step / 1000 for step in range(NUM_STEPS)]
    seen = ProgramSeen(seconds=13.0, reads=reads)
    check = pace_of(RankResult(step_seconds=told, seen=seen))
    assert check.status is Status.WARN and "5 steps arrived at a time" in check.found
    assert "flush it" in check.advice
    short = RankResult(step_seconds=[step / 100 for step in told], seen=seen)
    # They may have ended between two reads, or a clock that does not wait says so.
    assert pace_of(short).status is Status.WARN


@pytest.mark.parametrize(
    ("steps", "reads", "seconds", "num"),
    [
        # Ten lines of 5 ms at once: 300 steps take 1.5 s.
        (0.005, [(9.0, 9.1, 10)], 2.0, 300),
        (0.005, [(9.0, 9.1, 10)], 1.0, 300),
        (0.005, [(9.0, 9.1, 10)], 0.5, 300),
        (0.005, [(1.0, 1.05, 5), (2.0, 2.05, 10)], 2.0, 300),
        (0.005, [], 2.0, 300),
        # The program may run for a minute.
        (0.005, [(59.0, 59.1, 10)], 60.0, None),
        (0.005, [(19.0, 19.1, 10)], 20.0, 30),
        # These are compared, or said to come at once.
        (0.5, [(9.0, 9.1, 10)], 20.0, None),
        # One by one.
        (0.06, [(n / 10, n / 10 + 0.05, n) for n in range(1, 11)], 2.0, None),
    ],
)
def test_more_steps_show_the_pace_of_short_ones(
    steps: float, reads: Sequence[tuple[float, float, int]], seconds: float, num: int | None
) -> None:
    found = RankResult(
        warmup_seconds=[steps] * 2,
        step_seconds=[steps] * 8,
        seen=ProgramSeen(
            seconds=seconds,
            reads=[LinesRead(after=after, at=at, num_steps=n) for after, at, n in reads],
        ),
    )
    assert steps_for_pace(contract_run(found, seconds=seconds)) == num


def test_the_pace_of_the_longer_attempt_counts() -> None:
    short = RankResult(step_seconds=[0.005] * 10, seen=ProgramSeen(seconds=2.0))
    told = [STEP_SECONDS + step / 1000 for step in range(NUM_STEPS)]
    run = replace(contract_run(short, seconds=2.0), longer=result([one / 10 for one in told]))
    (pace,) = [check for check in judge_contract(run) if check.name == "pace"]
    assert pace.status is Status.FAIL and "to the end of the next" in pace.found


@pytest.mark.parametrize("device", Device)
def test_only_a_program_on_gpus_is_told_what_to_do_there(device: Device) -> None:
    told = result([one / 10 for one in [STEP_SECONDS + step / 1000 for step in range(NUM_STEPS)]])
    reason = plausibility.judge_run(told, layout=LAYOUT, sequence_length=64, plan=PLAN)
    run = replace(contract_run(told, seconds=7.0), device=device)
    assert isinstance(run.outcome, Measurement)
    run = replace(run, outcome=replace(run.outcome, implausible=reason))
    checks = {check.name: check for check in judge_contract(run)}
    assert ("torch.cuda." in checks["pace"].found) == (device is Device.CUDA)
    assert checks["numbers"].found == "they cannot be true: see pace"
    assert ("torch.cuda." in checks["memory"].advice) == (device is Device.CUDA)


def contract_run(found: RankResult, *, seconds: float) -> ContractRun:
    numbers: dict[str, Any] = dict.fromkeys(field.name for field in fields(Measurement))
    numbers["tokens_per_second_per_gpu"] = 1.0
    numbers["step_time"] = StepTime(median=0.5, iqr=0.0, num_steps=8, relative_confidence=0.01)
    return ContractRun(
        world_size=1,
        layout=LAYOUT,
        device=Device.CPU,
        report=NodeReport(node="a", ranks=[RankOutcome(rank=0, result=found)]),
        outcome=Measurement(**numbers),
        seconds=seconds,
        steps=StepTimes(num_steps=[1, 10], at_seconds=[1.5, 6.0]),
        num_steps_asked=NUM_STEPS,
        ranks=[0],
        connected_ranks=[],
    )


def test_the_doctor_compares_the_time_between_groups() -> None:
    reads = [LinesRead(after=10 * n - 0.05, at=10 * n, num_steps=2 * n) for n in range(1, 6)]
    told = [STEP_SECONDS + step / 1000 for step in range(NUM_STEPS)]
    check = pace_of(RankResult(step_seconds=told, seen=ProgramSeen(seconds=60.0, reads=reads)))
    assert check.status is Status.FAIL and "2 at a time, every 10 s" in check.found


@pytest.mark.parametrize(
    ("num_lines", "known", "is_said"),
    [
        (5, {}, True),
        (5, {"steps_per_line": 1.0}, False),
        (5, {"ended_itself": False}, False),
        (5, {"knows_num_steps": False}, False),
        (10, {}, False),
    ],
)
def test_a_program_with_fewer_lines_than_steps_may_write_one_for_several(
    num_lines: int, known: dict[str, Any], is_said: bool
) -> None:
    """A sweep may end it before this shows; the doctor lets it run all steps that it asks for."""
    found = result([STEP_SECONDS] * num_lines)
    assert found.seen is not None
    found = found.model_copy(update={"seen": found.seen.model_copy(update=known)})
    check = check_of("steps", found, num_lines=num_lines)
    assert (check.status is Status.WARN) is is_said
    assert ("If a line covers several steps" in check.advice) is is_said


def test_what_varies_reaches_a_program_by_its_name_or_by_what_it_follows_from() -> None:
    varying = {"micro_batch_size": ["1", "2"], "grad_accum_steps": ["8", "4"]}
    both = {"micro_batch_size", "global_batch_size"}
    assert layout_check(varying, both).status is Status.OK
    assert layout_check(varying, {"grad_accum_steps", "global_batch_size"}).status is Status.OK
    one = layout_check(varying, {"micro_batch_size"})
    assert one.status is Status.WARN
    assert "nowhere: grad_accum_steps (8, 4)" in one.found
    assert (
        "add {grad_accum_steps}, or {micro_batch_size} and {global_batch_size}, from which"
        " grad_accum_steps follows; or read SWEEP_GRAD_ACCUM_STEPS" in one.advice
    )
    # The number of ranks tells these; nothing tells a ZeRO stage.
    assert layout_check({"data_parallel_size": ["1", "2"]}, set()).status is Status.OK
    sizes = {"data_parallel_size": ["1", "2"], "tensor_parallel_size": ["2", "1"]}
    assert layout_check(sizes, {"data_parallel_size"}).status is Status.OK
    assert layout_check(sizes, {"tensor_parallel_size"}).status is Status.OK
    assert "nowhere: tensor_parallel_size (2, 1)" in layout_check(sizes, set()).found
    missing = layout_check({"zero_stage": ["0", "1"]}, both)
    assert "nowhere: zero_stage (0, 1)" in missing.found
    assert layout_check({}, set()).found == "one layout, and nothing of it is passed"


@pytest.mark.parametrize(
    ("ended", "status", "found"),
    [
        ({"exit_code": 1}, Status.WARN, "2 processes, ended after the ranks"),
        ({}, Status.OK, "not judged: ranks were ended by us, and 2 processes with them"),
    ],
    ids=["it ended by itself", "it hung"],
)
def test_processes_of_ranks_that_had_to_be_ended_are_not_left_over(
    ended: dict[str, Any], status: Status, found: str
) -> None:
    failure = Failure(kind=FailureKind.HUNG, message="no step for 10 s")
    report = NodeReport(
        node="a", ranks=[RankOutcome(rank=0, **ended)], failure=failure, processes_killed=2
    )
    check = check_of("left over", None, report=report)
    assert (check.status, check.found) == (status, found)


@pytest.mark.parametrize(
    ("world_size", "ranks", "status", "found"),
    [
        (1, [0], Status.OK, "1 rank; it has no other to connect to"),
        (2, [], Status.OK, "2 ranks were started; which of them met is not known"),
        (2, [1], Status.FAIL, "1 of 2 ranks were seen"),
    ],
)
def test_ranks_have_to_be_seen_if_any_is(
    world_size: int, ranks: list[int], status: Status, found: str
) -> None:
    told = result([STEP_SECONDS] * NUM_STEPS)
    check = check_of("ranks", told, world_size=world_size, ranks=ranks)
    assert (check.status, check.found) == (status, found)


def test_steps_are_shown_with_the_times_of_the_first_and_the_last() -> None:
    check = check_of("steps", result([STEP_SECONDS] * NUM_STEPS))
    assert check.found == "10 of 10 steps, the first after 1.5 s, the last after 6.0 s"


@pytest.mark.parametrize(
    ("known", "status", "found"),
    [
        ({"peak_memory_allocated_bytes": 3 << 20}, Status.OK, "3 MiB at the peak, by the program"),
        (
            {"peak_memory_driver_bytes": 5 << 20, "peak_memory_driver_kind": DriverMemoryKind.NVML},
            Status.OK,
            "5 MiB at the peak, as the driver saw it",
        ),
        (
            {"peak_memory_driver_bytes": 5 << 20, "peak_memory_driver_kind": DriverMemoryKind.RSS},
            Status.OK,
            "5 MiB at the peak, as the kernel saw it",
        ),
        ({}, Status.WARN, "neither reported nor seen"),
    ],
)
def test_memory_is_what_the_program_tells_or_what_was_seen(
    known: dict[str, Any], status: Status, found: str
) -> None:
    check = judged("memory", Device.CUDA, **known)
    assert (check.status, check.found) == (status, found)


@pytest.mark.parametrize(
    ("device", "known", "status", "found"),
    [
        (
            Device.CUDA,
            {"mfu": 0.421, "peak_flops_source": "table: h200 bf16 dense"},
            Status.OK,
            "42.1% of table: h200 bf16 dense",
        ),
        (Device.CUDA, {"mfu": 0.5}, Status.OK, "50.0% of the reported peak"),
        (Device.CPU, {}, Status.OK, "none: a core has no data sheet"),
        (Device.CUDA, {}, Status.WARN, "none: the device's peak is unknown"),
    ],
)
def test_an_mfu_is_shown_with_the_source_of_its_peak(
    device: Device, known: dict[str, Any], status: Status, found: str
) -> None:
    check = judged("MFU", device, **known)
    assert (check.status, check.found) == (status, found)


def judged(name: str, device: Device, **known: Any) -> Check:
    """A point of a run that was measured."""
    numbers: dict[str, Any] = dict.fromkeys(field.name for field in fields(Measurement))
    numbers["tokens_per_second_per_gpu"] = 12_345.6
    numbers["step_time"] = StepTime(
        median=known.pop("step_seconds", 0.5), iqr=0.0, num_steps=8, relative_confidence=0.01
    )
    report = NodeReport(
        node="a", ranks=[RankOutcome(rank=0, result=result([STEP_SECONDS] * NUM_STEPS))]
    )
    run = ContractRun(
        world_size=1,
        layout=LAYOUT,
        device=device,
        report=report,
        outcome=Measurement(**numbers | known),
        seconds=7.0,
        steps=StepTimes(num_steps=[1, NUM_STEPS], at_seconds=[1.5, 6.0]),
        num_steps_asked=NUM_STEPS,
        ranks=[0],
        connected_ranks=[],
    )
    return next(check for check in judge_contract(run) if check.name == name)


@pytest.mark.parametrize(
    ("step_seconds", "shown"),
    [
        (0.5, "500 ms"),
        (0.0123456, "12.35 ms"),
        (0.6789, "678.9 ms"),
        (1.0, "1,000 ms"),
        (1.2345, "1,234 ms"),
    ],
)
def test_numbers_are_the_speed_and_the_step(step_seconds: float, shown: str) -> None:
    check = judged("numbers", Device.CUDA, step_seconds=step_seconds)
    assert check.found == f"12,346 tokens/s/GPU, a step of {shown}"


@pytest.mark.parametrize(
    ("connected", "seconds", "status", "found"),
    [
        ([0, 1, 2], 7.0, Status.OK, "3 ranks met"),
        ([0, 2], 7.0, Status.WARN, "3 ranks, rank 1 not connected to another"),
        ([], 7.0, Status.WARN, "3 ranks, no rank connected to another"),
        ([], 0.1, Status.OK, "3 ranks, too short to see whether they met"),
    ],
)
def test_ranks_have_met_if_each_connected_to_another(
    connected: list[int], seconds: float, status: Status, found: str
) -> None:
    check = check_of(
        "ranks",
        result([STEP_SECONDS] * NUM_STEPS),
        world_size=3,
        ranks=[0, 1, 2],
        connected=connected,
        seconds=seconds,
    )
    assert (check.status, check.found) == (status, found)


def _without_steps(failure: Failure) -> ContractRun:
    return ContractRun(
        world_size=1,
        layout=LAYOUT,
        device=Device.CPU,
        report=NodeReport(node="a", ranks=[], failure=failure),
        outcome=failure,
        seconds=7.0,
        steps=StepTimes(num_steps=[], at_seconds=[]),
        num_steps_asked=NUM_STEPS,
        ranks=[0],
        connected_ranks=[],
    )


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (FailureKind.BAD_RESULT, "no step came; `end` says what did"),
        (FailureKind.HUNG, "no step came"),
        # It broke before it could tell a step.
        (FailureKind.USER_ERROR, None),
    ],
)
def test_a_program_that_told_no_step_is_told_how_unless_it_broke(
    kind: FailureKind, found: str | None
) -> None:
    run = _without_steps(Failure(kind=kind, message="m"))
    steps = [check for check in judge_contract(run) if check.name == "steps"]
    assert [check.found for check in steps] == ([] if found is None else [found])


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ('{"step_seconds": 0.07}\n' * 3, "metrics: {log: '\"step_seconds\": (-?\\d[\\d.eE+-]*)'"),
        ('{"loss": 9.1}\n' * 3, "it prints JSON lines, which are not read: if these"),
        # What the rank itself says of the form of a line.
        ('wrote 0 steps: by a line {"step_seconds": 0.52}\n', "have rank 0 append"),
        ('wrote 0 steps: by a line {"step_seconds": 0.52} in the file\n', "have rank 0 append"),
        ("", "have rank 0 append"),
    ],
)
@pytest.mark.parametrize("kind", [FailureKind.BAD_RESULT, FailureKind.HUNG])
def test_steps_that_are_printed_and_not_read_are_found(
    kind: FailureKind, log: str, advice: str
) -> None:
    message = 'rank 0 ended: wrote 0 steps: by a line {"step_seconds": 0.52}'
    run = _without_steps(Failure(kind=kind, message=message, log_tail=log))
    (steps,) = [check for check in judge_contract(run) if check.name == "steps"]
    assert steps.advice is not None and advice in steps.advice


@pytest.mark.parametrize(
    ("log", "tried"),
    [
        ("step 1 took 52 ms\nTraining finished\n", "lines such as 'step 1 took 52 ms'"),
        (f"step 1 {'x' * 200}\n", f"lines such as 'step 1 {'x' * 113}'"),
        ("step 1 took 52 ms\nwrote 0 steps\n", "lines such as 'step 1 took 52 ms'"),
        (f"step 1 took 52 ms\n{STACKS_BEGIN}\nProcess 7\n", "lines such as 'step 1 took 52 ms'"),
        ("Training finished\n", "lines such as 'Training finished'"),
        ("", "and the program printed no line: have rank 0 print one"),
    ],
)
def test_a_pattern_that_found_nothing_is_quoted_with_a_line_it_was_tried_on(
    log: str, tried: str
) -> None:
    failure = Failure(
        kind=FailureKind.BAD_RESULT, message="rank 0 ended: wrote 0 steps", log_tail=log
    )
    run = replace(_without_steps(failure), pattern=r"time/step ([\d.]+) ms")
    (steps,) = [check for check in judge_contract(run) if check.name == "steps"]
    assert steps.advice is not None
    assert r"metrics.log is 'time/step ([\d.]+) ms', " in steps.advice
    assert tried in steps.advice


def found_of(name: str, run: ContractRun) -> Check:
    return next(check for check in judge_contract(run) if check.name == name)


def test_a_thousand_steps_are_asked_for_at_most() -> None:
    """1,500 of a millisecond each would take 1.5 s, and twenty times 60 may run in a minute."""
    steps = RankResult(step_seconds=[0.001] * 20, seen=ProgramSeen(seconds=1.0))
    assert steps_for_pace(contract_run(steps, seconds=1.0)) == 1000


def test_no_more_steps_are_asked_for_where_they_would_show_nothing() -> None:
    short = RankResult(step_seconds=[0.005] * 10, seen=ProgramSeen(seconds=2.0))
    run = contract_run(short, seconds=2.0)
    failed = Failure(kind=FailureKind.USER_ERROR, message="m")
    assert steps_for_pace(run) == 300
    assert steps_for_pace(replace(run, steps_per_line=2)) is None
    assert steps_for_pace(replace(run, outcome=failed)) is None
    assert steps_for_pace(replace(run, report=NodeReport(node="a", ranks=[]))) is None
    # Two lines that came alone.
    alone = [LinesRead(after=float(n), at=n + 0.05, num_steps=n) for n in (1, 2)]
    two = RankResult(step_seconds=[0.005] * 2, seen=ProgramSeen(seconds=2.0, reads=alone))
    assert steps_for_pace(contract_run(two, seconds=2.0)) is None


@pytest.mark.parametrize(
    ("seconds", "status", "found"),
    [
        (0.9, Status.OK, "2 ranks, too short to see whether they met"),
        (1.0, Status.WARN, "2 ranks, no rank connected to another"),
        (1.1, Status.FAIL, "1 of 2 ranks were seen"),
    ],
)
def test_a_program_that_ends_within_a_second_need_not_be_seen(
    seconds: float, status: Status, found: str
) -> None:
    told = result([STEP_SECONDS] * NUM_STEPS)
    check = check_of("ranks", told, world_size=2, ranks=[1], seconds=seconds)
    assert (check.status, check.found) == (status, found)


@pytest.mark.parametrize(
    ("num_lines", "every", "status", "found"),
    [
        (1, 1, Status.WARN, "1 of 10 steps, the first after 1.5 s"),
        (2, 1, Status.WARN, "2 of 10 steps, the first after 1.5 s, the last after 6.0 s"),
        (
            4,
            2,
            Status.WARN,
            "4 lines of 2 steps each, 10 were asked for, the first after 1.5 s, the last after"
            " 6.0 s",
        ),
        (
            5,
            2,
            Status.OK,
            "5 lines of 2 steps each, 10 were asked for, the first after 1.5 s, the last after"
            " 6.0 s",
        ),
    ],
)
def test_lines_are_counted_against_the_steps_that_they_cover(
    num_lines: int, every: int, status: Status, found: str
) -> None:
    times = StepTimes(num_steps=list(range(1, num_lines + 1)), at_seconds=[1.5, 6.0][:num_lines])
    run = contract_run(result([STEP_SECONDS] * num_lines), seconds=7.0)
    check = found_of("steps", replace(run, steps=times, steps_per_line=every))
    assert (check.status, check.found) == (status, found)


@pytest.mark.parametrize(("num", "status"), [(1, Status.OK), (2, Status.WARN), (3, Status.WARN)])
def test_from_two_steps_on_it_is_said_that_all_came_at_once(num: int, status: Status) -> None:
    steps = RankResult(step_seconds=[2.0] * num, seen=ProgramSeen(seconds=9.0))
    check = pace_of(steps)
    assert check.status is status
    assert (check.found == "not comparable: all steps arrived at once") is (status is Status.WARN)
    # Nobody saw when they came.
    assert pace_of(RankResult(step_seconds=[2.0] * num)).status is Status.OK


def test_on_a_cpu_the_kernel_knows_the_memory_as_well_as_the_program() -> None:
    seen = judged("memory", Device.CPU, peak_memory_driver_bytes=5 << 20)
    assert (seen.found, seen.advice) == ("5 MiB at the peak, as the kernel saw it", "")
    unseen = judged("memory", Device.CPU)
    assert unseen.advice == "have each rank report peak_memory_resident_bytes"
    on_gpu = judged("memory", Device.CUDA, peak_memory_driver_bytes=5 << 20)
    assert "torch.cuda.max_memory_allocated()" in on_gpu.advice


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (FailureKind.OOM_GPU, "this layout does not fit, which a sweep finds out by itself"),
        (FailureKind.USER_ERROR, "fix what the last lines of its log show"),
        (FailureKind.CONFIG_REJECTED, "do what the message says; if only this layout is refused"),
        (FailureKind.HUNG, POLICIES[FailureKind.HUNG].fix),
    ],
)
def test_a_failure_is_told_with_what_to_do_outside_of_a_sweep(
    kind: FailureKind, advice: str
) -> None:
    check = found_of("end", _without_steps(Failure(kind=kind, message="m")))
    assert check.status is Status.FAIL
    assert check.found == f"{kind}: m"
    assert check.advice.startswith(advice)


@pytest.mark.parametrize(
    ("num", "has_enough", "status", "found"),
    [
        (0, False, Status.OK, "nothing"),
        (0, True, Status.OK, "nothing"),
        (1, False, Status.WARN, "1 process, ended after the ranks"),
        (2, False, Status.WARN, "2 processes, ended after the ranks"),
        (1, True, Status.OK, "nothing; 1 process that it had started ended with it"),
    ],
)
def test_processes_that_outlive_the_ranks_are_counted(
    num: int, *, has_enough: bool, status: Status, found: str
) -> None:
    ranks = [RankOutcome(rank=0, exit_code=0)]
    report = NodeReport(node="a", ranks=ranks, processes_killed=num, has_enough=has_enough)
    check = check_of("left over", None, report=report)
    assert (check.status, check.found) == (status, found)
    how = (
        "it was ended, since its numbers were enough"
        if has_enough
        else ("it ended by itself, with exit code 0")
    )
    assert check_of("end", None, report=report).found == f"{how}, after 7.0 s"


def test_what_is_passed_is_said_whether_or_not_it_varies() -> None:
    assert layout_check({}, {"seed", "num_steps"}).found == "passed: num_steps, seed"
    told_by_ranks = layout_check({"data_parallel_size": ["1", "2"]}, set())
    assert told_by_ranks.found == "passed: nothing"
    five = layout_check({"zero_stage": list("01234")}, set())
    assert five.found == "passed: nothing; nowhere: zero_stage (0, 1, 2, 3)"
