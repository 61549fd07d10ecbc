"""What a launcher reports of its node's GPUs."""

from __future__ import annotations

from orchestrator.core.trial.node_report import GpuUsage


def test_the_energy_of_a_token_is_power_over_speed_and_unknown_without_power() -> None:
    assert GpuUsage(power_watts=600.0).joules_per_token(1500.0) == 0.4
    assert GpuUsage().joules_per_token(1500.0) is None
