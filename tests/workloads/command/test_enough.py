"""When its numbers are enough, a program is asked to end and then ended, and the numbers stand."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult
from orchestrator.node.launcher import NodeLauncher
from tests.workloads.command.running import command, python, run

PLAN = MeasurementPlan(warmup_steps=1, min_steps=5, max_steps=12, relative_confidence=0.02)
# One step of warm-up and the eight that alike steps need.
ENOUGH = 9

STEPS = """
    import json, os, signal, sys, time

    def write(number, seconds=0.5):
        if os.environ["RANK"] == "0":
            with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                print(json.dumps({"step_seconds": seconds}), file=file)
        time.sleep(0.02)

    def finish(**more):
        if os.environ["RANK"] == "0":
            with open(os.environ["SWEEP_RESULT_FILE"] + ".new", "w") as file:
                json.dump({"step_seconds": [0.5] * 8, **more}, file)
            os.rename(os.environ["SWEEP_RESULT_FILE"] + ".new", os.environ["SWEEP_RESULT_FILE"])
"""


def measured(report: NodeReport) -> RankResult:
    assert report.failure is None, report.failure
    result = report.ranks[0].result
    assert result is not None
    return result


@pytest.mark.parametrize("on_term", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_an_endless_trainer_is_ended_once_its_steps_are_precise(
    launcher: NodeLauncher,
    on_term: str,
) -> None:
    began = time.monotonic()
    report = run(launcher, f"{STEPS}\n    {on_term}\n    while True: write(0)", plan=PLAN)
    result = measured(report)
    assert 8 <= len(result.step_seconds) <= 12
    assert report.has_enough
    log = Path(report.ranks[0].log_path).read_text()
    assert "\nended by sweep: the numbers of this attempt are enough\n" in log
    assert time.monotonic() - began < 15.0, "steps, a second to end, two after SIGTERM"


def test_steps_that_vary_are_taken_up_to_the_maximum_and_no_further(
    launcher: NodeLauncher,
) -> None:
    report = run(launcher, f"{STEPS}\n    for n in range(999): write(n, 0.5 + n % 2)", plan=PLAN)
    assert len(measured(report).step_seconds) == PLAN.max_steps


def test_lines_of_several_steps_are_all_in_once_they_cover_the_steps_that_were_asked_for(
    launcher: NodeLauncher,
) -> None:
    program = """
        import sys, time
        while True:
            print("5 steps took 100 ms each", flush=True)
            time.sleep(0.02)
        """
    metrics = {"log": r"steps took (\d+) ms each", "unit": "ms", "every": 5}
    report = launcher.run(command({"argv": python(program), "metrics": metrics}, plan=PLAN))
    # 12 steps in lines of 5, after one line of warm-up.
    assert measured(report).step_seconds == [0.1] * 3


def test_a_program_that_looks_for_the_file_ends_by_itself_and_its_document_counts(
    launcher: NodeLauncher,
) -> None:
    report = run(
        launcher,
        f"""{STEPS}
    while not os.path.exists(os.environ["SWEEP_STOP_FILE"]): write(0)
    print("ended by itself", flush=True)
    finish(loss_last=2.5)
    """,
        plan=PLAN,
    )
    assert measured(report).loss_last == 2.5
    assert ["ended by itself" in outcome.log_tail for outcome in report.ranks] == [True, True]


@pytest.mark.parametrize(
    "ending",
    ["time.sleep(100)", "raise OSError('no space left for the checkpoint')", "os.abort()"],
)
def test_what_comes_after_the_last_step_costs_nothing(
    launcher: NodeLauncher,
    ending: str,
) -> None:
    report = run(
        launcher,
        f"{STEPS}\n    for number in range({ENOUGH}): write(number)\n    {ending}",
        plan=PLAN,
    )
    assert len(measured(report).step_seconds) == 8


def test_a_crash_before_there_is_enough_is_a_crash(launcher: NodeLauncher) -> None:
    program = f"{STEPS}\n    for n in range({ENOUGH - 1}): write(n)\n    raise ValueError('early')"
    report = run(launcher, program, plan=PLAN)
    assert report.failure is not None and report.failure.kind is FailureKind.USER_ERROR
    assert not report.has_enough


def test_a_document_that_does_not_change_is_the_end_of_a_program_that_hangs(
    launcher: NodeLauncher,
) -> None:
    report = run(launcher, f"{STEPS}\n    finish()\n    time.sleep(100)", plan=PLAN)
    assert len(measured(report).step_seconds) == 8


def test_half_a_document_does_not_spoil_the_steps(launcher: NodeLauncher) -> None:
    report = run(
        launcher,
        f"""{STEPS}
    open(os.environ["SWEEP_RESULT_FILE"], "w").write('{{"step_sec')
    while True: write(0)
    """,
        plan=PLAN,
        world_size=1,
    )
    assert len(measured(report).step_seconds) >= 8


def test_a_document_that_shows_a_divergence_takes_the_steps_back(
    launcher: NodeLauncher,
) -> None:
    report = run(
        launcher,
        f"""{STEPS}
    while not os.path.exists(os.environ["SWEEP_STOP_FILE"]): write(0)
    finish(loss_last=float("nan"))
    """,
        plan=PLAN,
        world_size=1,
    )
    assert report.failure is not None and report.failure.kind is FailureKind.NOT_FINITE
    assert not report.has_enough


def test_other_ranks_may_fail_once_rank_0_is_asked_to_end(
    launcher: NodeLauncher,
) -> None:
    report = run(
        launcher,
        f"""{STEPS}
    if os.environ["RANK"] == "0":
        while True: write(0)
    while not os.path.exists(os.environ["SWEEP_STOP_FILE"]): time.sleep(0.01)
    sys.exit("RuntimeError: Connection closed by peer")
    """,
        plan=PLAN,
    )
    assert len(measured(report).step_seconds) >= 8


def test_numbers_that_are_in_stand_when_another_node_ends_the_gang(
    launcher: NodeLauncher,
) -> None:
    """Its ranks lose their connection first, and the scheduler then ends every node's."""
    told = launcher.root / "asked"
    program = f"""{STEPS}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        write(0)
        if os.path.exists(os.environ["SWEEP_STOP_FILE"]): open({str(told)!r}, "w")
    """
    asked = command({"argv": python(program)}, plan=PLAN)

    def kill() -> None:
        while not told.exists():
            time.sleep(0.01)
        launcher.kill(asked.request.tag)

    killer = threading.Thread(target=kill)
    killer.start()
    report = launcher.run(asked)
    killer.join()
    measured(report)
    assert report.has_enough


def test_lines_that_a_program_keeps_in_its_buffer_count_when_it_ends(
    launcher: NodeLauncher,
) -> None:
    report = run(
        launcher,
        """
        import json, os, time
        if os.environ["RANK"] == "0":
            file = open(os.environ["SWEEP_METRICS_FILE"], "a")
            for step in range(int(os.environ["SWEEP_NUM_STEPS"])):
                print(json.dumps({"step_seconds": 0.5}), file=file)  # not flushed
                time.sleep(0.02)
        """,
        plan=PLAN,
    )
    assert len(measured(report).step_seconds) == PLAN.max_steps


def test_memory_of_a_process_that_a_program_leaves_when_it_is_ended_counts(
    launcher: NodeLauncher,
) -> None:
    program = f"""{STEPS}
    if os.fork() == 0:
        held = b"x" * 200_000_000
        while True: write(0)
    time.sleep(100)
"""
    result = measured(run(launcher, program, plan=PLAN, world_size=1))
    assert (result.peak_memory_resident_bytes or 0) > 200_000_000
