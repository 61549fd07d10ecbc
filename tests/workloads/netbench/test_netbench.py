"""The ranks that measure collectives, over gloo."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.physics.link_sample import Collective
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import order


def test_two_ranks_measure_every_collective_over_gloo(tmp_path: Path) -> None:
    options = {
        "collectives": [collective.value for collective in Collective],
        "sizes": [1024, 65536],
        "seconds": 0.02,
    }
    launcher = NodeLauncher(tmp_path / "runs", node="here")
    try:
        report = launcher.run(order("workloads.netbench", options=options))
    finally:
        launcher.close()
    assert report.failure is None, report.failure
    first, second = (outcome.result for outcome in report.ranks)
    assert first is not None and second is not None
    assert [(one.collective, one.message_bytes) for one in first.collectives] == [
        (collective.value, size) for collective in Collective for size in (1024, 65536)
    ]
    assert all(0 < one.seconds < 1 and one.num_calls >= 5 for one in first.collectives)
    assert second.collectives == [], "all ranks give the same: one tells"
