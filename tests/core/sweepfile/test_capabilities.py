"""What a workload can run, at the bounds."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule, ScheduleKind
from orchestrator.core.sweepfile.capabilities import CAPABILITIES, Capabilities

FEW = Capabilities(
    zero_stages=frozenset({0, 1}),
    precisions=frozenset({Precision.BF16}),
    pipeline_schedules=frozenset({ScheduleKind.ONE_F_ONE_B}),
    max_tensor_parallel_size=4,
)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor_parallel_size": 4}, None),
        (
            {"tensor_parallel_size": 8},
            "tensor_parallel_size 8 is more than 4, the most that this workload can do",
        ),
        ({"pipeline_parallel_size": 999, "context_parallel_size": 999}, None),
        ({"zero_stage": 2}, "zero_stage 2 is not one of 0, 1"),
        (
            {"pipeline_schedule": PipelineSchedule.parse("gpipe")},
            "pipeline_schedule gpipe is not one of 1f1b",
        ),
        ({"precision": Precision.FP8}, "precision fp8 is not one of bf16"),
    ],
)
def test_a_layout_is_refused_by_the_first_bound_it_breaks(
    sizes: dict[str, Any], said: str | None
) -> None:
    assert FEW.refusal(Layout(**{"data_parallel_size": 1} | sizes)) == said


@pytest.mark.parametrize("workload", CAPABILITIES)
def test_every_workload_runs_every_stage_and_precision(workload: str) -> None:
    for stage in (0, 1, 2, 3):
        for precision in Precision:
            layout = Layout(data_parallel_size=2, zero_stage=stage, precision=precision)
            assert CAPABILITIES[workload].refusal(layout) is None
