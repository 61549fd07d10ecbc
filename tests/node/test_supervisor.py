"""One node's part of a gang, without processes: whom it names when a limit has passed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import (
    Heartbeat,
    Phase,
    RankResult,
    encode,
    heartbeat_file,
    result_file,
)
from orchestrator.node.cpu_watch import CpuWatch
from orchestrator.node.gpu_monitor import GpuMonitor
from orchestrator.node.machine_watch import MachineWatch
from orchestrator.node.program_software import ProgramSoftware
from orchestrator.node.rank_log import RankLog
from orchestrator.node.rank_watch import RankWatch, judge
from orchestrator.node.supervisor import NodeGang
from tests.node.launching import order


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[NodeGang]:
    """Two ranks that wait for each other longer than they may."""
    reader, writer = os.pipe()
    asked = order(limits={"rendezvous": 1.0})
    gang = NodeGang(
        asked,
        node="node-0",
        run_dir=tmp_path,
        wake=reader,
        cancelled=(),
        machine=MachineWatch(
            gpus=GpuMonitor.open(()),
            cpus=CpuWatch(root=tmp_path, warden=None, orchestrator=""),
            program=ProgramSoftware().begin(asked),
        ),
    )
    for rank in (0, 1):
        log = RankLog(tmp_path / f"log-{rank}.txt")
        gang.watches.append(RankWatch(rank=rank, log=log, pipe=None, run_dir=tmp_path))
        say(gang, rank, Phase.RENDEZVOUS)
        gang.watches[rank].read_heartbeat(0.0)
    yield gang
    os.close(reader)
    os.close(writer)


def say(gang: NodeGang, rank: int, phase: Phase) -> None:
    folder = gang.watches[rank].run_dir
    (folder / heartbeat_file(rank)).write_bytes(encode(Heartbeat(phase=phase, step=0)))


def test_a_rank_that_measured_while_stacks_were_taken_is_not_blamed_for_the_one_that_hangs(
    gang: NodeGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = RankResult(step_seconds=[0.1] * 6, peak_flops=1e12)

    def rank_0_goes_on(watches: Sequence[RankWatch]) -> None:
        assert [watch.rank for watch in watches] == [0, 1]
        say(gang, 0, Phase.TEARDOWN)
        (gang.watches[0].run_dir / result_file(0)).write_bytes(encode(measured))

    monkeypatch.setattr(gang, "_collect_stacks", rank_0_goes_on)
    assert gang._check_progress(1.5)
    gang.finish()
    left = [watch.evidence("node-0") for watch in gang.watches if not watch.measured]
    found = judge(left)
    assert found is not None, "the gang ended for no reason that is known"
    assert (found[0].kind, found[0].rank) == (FailureKind.START_TIMEOUT, 1)


def test_a_rank_that_went_on_while_stacks_were_taken_is_named_where_its_limit_passed(
    gang: NodeGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both_go_on(watches: Sequence[RankWatch]) -> None:
        for watch in watches:
            say(gang, watch.rank, Phase.STEADY)

    monkeypatch.setattr(gang, "_collect_stacks", both_go_on)
    assert gang._check_progress(1.5)
    gang.finish()
    found = judge([watch.evidence("node-0") for watch in gang.watches])
    assert found is not None
    assert (found[0].kind, found[0].phase) == (FailureKind.START_TIMEOUT, Phase.RENDEZVOUS)
    assert "in rendezvous: rendezvous limit of 1 s passed" in found[0].message
