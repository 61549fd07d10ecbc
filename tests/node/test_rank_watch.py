"""The launcher's knowledge of a rank, without processes: limits, and the first bad rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.failures import Evidence
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.limits import SeenSteps, resolve_limits
from orchestrator.core.trial.protocol import (
    Heartbeat,
    LimitName,
    Phase,
    encode,
    failure_file,
    heartbeat_file,
    result_file,
)
from orchestrator.node.rank_log import RankLog
from orchestrator.node.rank_watch import RankWatch, judge
from tests.node.launching import order


@pytest.fixture
def watch(tmp_path: Path) -> RankWatch:
    return RankWatch(rank=0, log=RankLog(tmp_path / "log-0.txt"), pipe=None, run_dir=tmp_path)


def automatic() -> LaunchOrder:
    asked = order()
    limits = resolve_limits(
        dict.fromkeys(LimitName), plan=asked.request.measurement, num_ranks=2, predicted=None
    )
    return replace(asked, request=asked.request.model_copy(update={"limits": limits}))


def beat(watch: RankWatch, phase: Phase, step: int, *, now: float) -> None:
    (watch.run_dir / heartbeat_file(0)).write_bytes(
        encode(Heartbeat(phase=phase, step=step, timed=step > 2))
    )
    watch.read_heartbeat(now)


def test_the_steady_limit_holds_from_step_to_step_however_long_all_of_them_take(
    watch: RankWatch,
) -> None:
    asked = order(limits={"steady": 2.0})
    for step in range(1, 11):
        beat(watch, Phase.STEADY, step, now=1.5 * step)
        assert watch.overdue(asked, 1.5 * step + 1.4) is None
    assert watch.overdue(asked, 17.1) == (
        "steady limit of 2 s passed without a new step after step 10 "
        "(measurement.limits.steady of the sweep file; if this is no hang,"
        " raise it or write auto)"
    )


def test_other_limits_hold_for_their_whole_phase(watch: RankWatch) -> None:
    asked = order(limits={"first_step": 2.0})
    beat(watch, Phase.FIRST_STEP, 0, now=0.0)
    beat(watch, Phase.FIRST_STEP, 1, now=1.5)
    assert watch.overdue(asked, 1.9) is None
    assert (watch.overdue(asked, 2.1) or "").startswith(
        "first_step limit of 2 s passed (measurement.limits.first_step"
    )


def test_an_auto_limit_follows_the_first_step_until_a_later_one_has_ended_and_then_the_slowest(
    watch: RankWatch,
) -> None:
    asked = automatic()
    beat(watch, Phase.FIRST_STEP, 0, now=0.0)
    beat(watch, Phase.STEADY, 1, now=100.0)  # compiled for most of it
    assert watch.overdue(asked, 100.0 + 5 * 100.0) is None
    told = watch.overdue(asked, 100.1 + 5 * 100.0)
    assert told == (
        "steady limit of 500 s passed without a new step after step 1 (auto: 5 x a step, the "
        "first took 100 s; if this is no hang,"
        " set measurement.limits.steady)"
    )
    beat(watch, Phase.STEADY, 2, now=130.0)
    beat(watch, Phase.STEADY, 3, now=150.0)
    assert watch.overdue(asked, 150.0 + 5 * 30.0) is None
    assert "5 x a step, the slowest so far took 30 s" in (
        watch.overdue(asked, 150.1 + 5 * 30.0) or ""
    )


def test_what_is_said_again_of_the_same_step_is_no_step(watch: RankWatch) -> None:
    """A wrapper on another node than rank 0's says so every 50 ms, and knows no step."""
    beat(watch, Phase.FIRST_STEP, 0, now=0.0)
    for number in range(1, 4):
        beat(watch, Phase.STEADY, 0, now=40.0 * number)
    assert watch.seen == SeenSteps(first_seconds=40.0)


def test_when_the_teardown_began_is_the_ranks_own_word(watch: RankWatch) -> None:
    (watch.run_dir / heartbeat_file(0)).write_bytes(encode(Heartbeat(phase=Phase.TEARDOWN, at=7.5)))
    watch.read_heartbeat(9.0)
    assert watch.teardown_since == 7.5


def test_a_rank_that_was_killed_with_its_gang_is_no_witness_by_what_it_printed() -> None:
    killed = Evidence(
        rank=0, log_tail="torch.OutOfMemoryError: CUDA out of memory, caught in autotune\n"
    )
    assert judge([killed]) is None
    lost = Evidence(
        rank=1,
        exit_code=1,
        log_tail="RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer",
    )
    verdict = judge([killed, lost])
    assert verdict is not None
    assert (verdict[0].kind, verdict[0].rank) == (FailureKind.NCCL, 1)


def test_a_rank_that_was_killed_after_it_left_a_note_is_blamed() -> None:
    noted = Evidence(
        rank=0,
        exception="torch.OutOfMemoryError",
        message="CUDA out of memory.",
        at_unix_seconds=5.0,
    )
    lost = Evidence(rank=1, exit_code=1, log_tail="Connection closed by peer", at_unix_seconds=4.0)
    verdict = judge([noted, lost])
    assert verdict is not None
    assert (verdict[0].kind, verdict[0].rank, verdict[1]) == (FailureKind.OOM_GPU, 0, 5.0)


def test_a_fifo_in_place_of_a_ranks_files_is_not_waited_for(watch: RankWatch) -> None:
    for name in (heartbeat_file(0), result_file(0), failure_file(0)):
        os.mkfifo(watch.run_dir / name)
    watch.code = 0
    watch.read_last_words(now=1.0)
    assert watch.result is None and watch.bad_result is not None
    assert "no regular file" in watch.bad_result


def test_the_phases_of_a_rank_that_tells_none_are_those_of_its_heartbeats(watch: RankWatch) -> None:
    assert watch.outcome().phase_seconds == {}
    watch.phase_since = 100.0
    beat(watch, Phase.FIRST_STEP, 0, now=102.0)
    beat(watch, Phase.STEADY, 1, now=105.0)
    beat(watch, Phase.STEADY, 2, now=106.0)
    watch.code = 1
    watch.read_last_words(106.5)
    # The others of its gang are waited for.
    watch.read_last_words(120.0)
    assert watch.outcome().phase_seconds == {
        Phase.START: 2.0,
        Phase.FIRST_STEP: 3.0,
        Phase.STEADY: 1.5,
    }
