"""The plan of a trial whose lines are counted."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.line_count import counting_plan
from orchestrator.core.trial.protocol import MeasurementPlan

PLAN = MeasurementPlan(warmup_steps=3, min_steps=5, max_steps=50, relative_confidence=0.02)
GPU = PLAN.model_copy(update={"warmup_seconds": 2.0, "min_seconds": 5.0, "max_steps": 500})


@pytest.mark.parametrize(
    ("plan", "predicted", "every", "num"),
    [
        (PLAN, None, 1, 50),
        (PLAN, 0.1, 1, 50),
        (PLAN, 2.0, 1, 30),
        (PLAN, 60.0, 1, 16),
        (PLAN, 60.0, 3, 48),
        (PLAN, 60.0, 10, 50),
        (PLAN.model_copy(update={"min_steps": 20}), 60.0, 1, 20),
        # Enough for five seconds, if the steps are shorter than predicted.
        (GPU, 0.5, 1, 120),
        (GPU.model_copy(update={"min_seconds": 20.0}), 0.5, 1, 240),
    ],
)
def test_it_asks_for_steps_of_a_minute_but_for_some_and_for_no_more_than_the_file(
    plan: MeasurementPlan, predicted: float | None, every: int, num: int
) -> None:
    found = counting_plan(plan, predicted_seconds=predicted, steps_per_line=every)
    assert found.counts_lines and found.max_steps == num
    assert found.model_copy(update={"counts_lines": False, "max_steps": plan.max_steps}) == plan
