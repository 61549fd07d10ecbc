"""The rank's half of the protocol, in this process: what it leaves in its run directory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.core.trial.protocol import (
    RUN_DIR_VARIABLE,
    Heartbeat,
    Phase,
    RankFailure,
    RankResult,
    decode_failure,
    decode_heartbeat,
    decode_result,
    encode,
)
from tests.node.launching import order
from workloads import rank as ranks
from workloads.rank import Rank


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "request.json").write_bytes(encode(order().request))
    for name, value in {
        RUN_DIR_VARIABLE: str(tmp_path),
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("faulthandler.enable", lambda: None)  # pytest's stderr is no file
    monkeypatch.setattr("faulthandler.register", lambda *_, **__: None)
    return tmp_path


def failure(run_dir: Path) -> RankFailure:
    return decode_failure((run_dir / "failure-1.json").read_bytes())


def test_a_result_is_written_and_the_rank_is_in_its_teardown(run_dir: Path) -> None:
    assert ranks.run(lambda rank: RankResult(step_seconds=[0.5])) == 0
    assert decode_result((run_dir / "result-1.json").read_bytes()).step_seconds == [0.5]
    assert decode_heartbeat((run_dir / "heartbeat-1.json").read_bytes()).phase is Phase.TEARDOWN
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "heartbeat-1.json",
        "request.json",
        "result-1.json",
    ]  # nothing half-written


def test_a_heartbeat_replaces_the_one_before_whatever_their_lengths(run_dir: Path) -> None:
    rank = ranks.context()
    for phase, step, timed in [
        (Phase.RENDEZVOUS, 0, False),
        (Phase.STEADY, 123456789, True),
        (Phase.STEADY, 1, False),
    ]:
        rank.heartbeat(phase, step, timed=timed)
        said = decode_heartbeat((run_dir / "heartbeat-1.json").read_bytes())
        assert said == Heartbeat(phase=phase, step=step, timed=timed, at=said.at)
        assert said.at == pytest.approx(time.monotonic(), abs=60.0)


def test_an_exception_becomes_a_note_that_says_where(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(rank: Rank) -> RankResult:
        rank.heartbeat(Phase.STEADY, 7)
        raise ranks.ConfigRejected("zero_stage 3 is not for this workload")

    assert ranks.run(fail) == 1
    note = failure(run_dir)
    assert (note.exception, note.phase, note.step) == (
        "workloads.rank.ConfigRejected",
        Phase.STEADY,
        7,
    )
    assert "zero_stage 3" in note.message and "in fail" in note.traceback and not note.out_of_memory
    assert "Traceback" in capsys.readouterr().err


class OutOfMemoryError(RuntimeError):
    """As torch's, by name."""


class Wrapped(OutOfMemoryError):
    pass


@pytest.mark.parametrize(
    "exc",
    [
        OutOfMemoryError(),
        Wrapped("x"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_marked(run_dir: Path, exc: Exception) -> None:
    def fail(rank: Rank) -> RankResult:
        raise exc

    assert ranks.run(fail) == 1
    assert failure(run_dir).out_of_memory


def test_a_note_stays_within_its_bounds_however_long_the_message(run_dir: Path) -> None:
    def fail(rank: Rank) -> RankResult:
        raise ValueError("x" * 1_000_000)

    assert ranks.run(fail) == 1
    assert failure(run_dir).message == "x" * 4000


def test_what_happens_after_finish_is_only_noted(run_dir: Path) -> None:
    def fail_late(rank: Rank) -> RankResult:
        rank.finish(RankResult(step_seconds=[0.5]))
        raise RuntimeError("the process group would not go")

    assert ranks.run(fail_late) == 1
    assert decode_result((run_dir / "result-1.json").read_bytes()).step_seconds == [0.5]
    assert failure(run_dir).phase is Phase.TEARDOWN
