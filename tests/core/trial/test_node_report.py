"""What a launcher reports of its node's GPUs."""

from __future__ import annotations

from orchestrator.core.trial.node_report import GpuUsage, NodeReport, RankOutcome
from orchestrator.core.trial.protocol import Phase


def test_the_energy_of_a_token_is_power_over_speed_and_unknown_without_power() -> None:
    assert GpuUsage(power_watts=600.0).joules_per_token(1500.0) == 0.4
    assert GpuUsage().joules_per_token(1500.0) is None


def test_a_report_of_which_nothing_is_told_is_of_nothing() -> None:
    report = NodeReport(node="a", ranks=[RankOutcome(rank=1)])
    assert (report.has_enough, report.seconds, report.processes_killed) == (False, 0.0, 0)
    assert (report.ranks[0].step, report.ranks[0].phase) == (0, Phase.START)
    assert report.gpu.num_samples == 0
