"""What the launcher knows of a rank, without processes: limits from its heartbeats, and who may be blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.failures import Evidence, FailureKind
from orchestrator.core.protocol import Heartbeat, Phase, encode, heartbeat_file
from orchestrator.launcher_log import RankLog
from orchestrator.launcher_watch import RankWatch, judge
from tests.orchestrator.launching import order


@pytest.fixture
def watch(tmp_path: Path) -> RankWatch:
    return RankWatch(rank=0, log=RankLog(tmp_path / "log-0.txt"), pipe=None, run_dir=tmp_path)


def beat(watch: RankWatch, phase: Phase, step: int, *, now: float) -> None:
    (watch.run_dir / heartbeat_file(0)).write_bytes(encode(Heartbeat(phase=phase, step=step, timed=step > 2)))
    watch.read_heartbeat(now)


def test_the_steady_limit_holds_from_step_to_step_however_long_all_of_them_take(watch: RankWatch) -> None:
    asked = order(limits={"steady": 2.0})
    for step in range(1, 11):
        beat(watch, Phase.STEADY, step, now=1.5 * step)
        assert watch.overdue(asked, 1.5 * step + 1.4) is None
    assert watch.overdue(asked, 17.1) == "steady limit of 2 s passed without a new step after step 10"


def test_other_limits_hold_for_their_whole_phase(watch: RankWatch) -> None:
    asked = order(limits={"first_step": 2.0})
    beat(watch, Phase.FIRST_STEP, 0, now=0.0)
    beat(watch, Phase.FIRST_STEP, 1, now=1.5)
    assert watch.overdue(asked, 1.9) is None
    assert watch.overdue(asked, 2.1) == "first_step limit of 2 s passed"


def test_a_rank_that_was_killed_with_its_gang_is_no_witness_by_what_it_printed() -> None:
    killed = Evidence(rank=0, log_tail="torch.OutOfMemoryError: CUDA out of memory, caught in autotune\n")
    assert judge([killed]) is None
    lost = Evidence(rank=1, exit_code=1, log_tail="RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    verdict = judge([killed, lost])
    assert verdict is not None
    assert (verdict[0].kind, verdict[0].rank) == (FailureKind.NCCL, 1)


def test_a_rank_that_was_killed_after_it_left_a_note_is_blamed() -> None:
    noted = Evidence(rank=0, exception="torch.OutOfMemoryError", message="CUDA out of memory.", at_unix_seconds=5.0)
    lost = Evidence(rank=1, exit_code=1, log_tail="Connection closed by peer", at_unix_seconds=4.0)
    verdict = judge([noted, lost])
    assert verdict is not None
    assert (verdict[0].kind, verdict[0].rank, verdict[1]) == (FailureKind.OOM_GPU, 0, 5.0)
