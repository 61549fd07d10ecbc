"""Plans a trial that shows by the number of its lines whether a line is one step.

A line of a micro-batch, or of several steps, looks like a line of one step: only the number of
lines shows the difference. So in the first trial of a cell, a program that knows how many steps are
asked for is not ended early.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from orchestrator.core.trial.protocol import MeasurementPlan

# How a program is told its number of steps. A sweep replaces the name in braces.
TELL_NUM_STEPS = (
    'write "{num_steps}" in argv where it takes that number, or have it read SWEEP_NUM_STEPS'
)
RUN_AS_ASKED = f"have it run as many as it is asked for ({TELL_NUM_STEPS})"
# Lines written over lines asked for: from this on, a line is not one step.
MORE_LINES = 1.5
# Such a trial asks for steps that take this long by their prediction, and for this many lines at
# least, so that a quiet device has a precise median.
COUNTED_SECONDS = 60.0
FEWEST_COUNTED = 16
# Predicted over real step time: up to this, the steps take `min_seconds`, too.
_TOO_LONG = 6.0
# After the last step, another line may come within this many seconds and steps together, and within
# the most seconds in any case.
_NEXT_SECONDS, _NEXT_STEPS, _MOST_NEXT_SECONDS = 2.0, 1.5, 30.0


def counting_plan(
    plan: MeasurementPlan, *, predicted_seconds: float | None, steps_per_line: int
) -> MeasurementPlan:
    """Return the plan of a trial whose lines are counted.

    `predicted_seconds`: of a step; None: unknown, and `max_steps` are asked for.
    """
    num = plan.max_steps
    if predicted_seconds is not None:
        seconds = max(COUNTED_SECONDS, _TOO_LONG * plan.min_seconds)
        least = max(FEWEST_COUNTED * steps_per_line, plan.min_steps)
        wanted = max(math.ceil(seconds / predicted_seconds), least)
        num = min(num, wanted)
    return plan.model_copy(update={"counts_lines": True, "max_steps": num})


def next_line_patience_seconds(step_seconds: Sequence[float]) -> float:
    """Return the seconds to wait for one more line after the last step. `step_seconds`: so far."""
    usual = statistics.median(step_seconds)
    return min(_NEXT_SECONDS + _NEXT_STEPS * usual, _MOST_NEXT_SECONDS)
