"""Plans a trial that shows by the number of its lines whether a line is one step.

A line for each micro-batch, or for several steps, is in itself as good as one for each step: only
how many there are tells them apart. So a program that knows how many steps are asked for is not
ended early until that was seen, once in each cell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from orchestrator.core.trial.protocol import MeasurementPlan

# A program that writes so many times the lines that it was asked for does not write one for a step.
MORE_LINES = 1.5
# Such a trial asks for steps that should take so long, but for enough that a device at rest shows
# its median.
COUNTED_SECONDS = 60.0
FEWEST_COUNTED = 16
# A prediction may be so many times too long, and the steps still take `min_seconds`.
_TOO_LONG = 6.0
# A program that goes on after all its steps writes the next line within its usual time, and this.
_NEXT_SECONDS, _NEXT_STEPS, _MOST_NEXT_SECONDS = 2.0, 1.5, 30.0


def counting_plan(
    plan: MeasurementPlan, *, predicted_seconds: float | None, steps_per_line: int
) -> MeasurementPlan:
    """Return the plan of a trial whose lines are counted. `predicted_seconds`: of a step."""
    num = plan.max_steps
    if predicted_seconds is not None:
        seconds = max(COUNTED_SECONDS, _TOO_LONG * plan.min_seconds)
        least = max(FEWEST_COUNTED * steps_per_line, plan.min_steps)
        wanted = max(math.ceil(seconds / predicted_seconds), least)
        num = min(num, wanted)
    return plan.model_copy(update={"counts_lines": True, "max_steps": num})


def next_line_patience_seconds(step_seconds: Sequence[float]) -> float:
    """Return how long to wait for one more line of a program that has written all of these."""
    usual = statistics.median(step_seconds)
    return min(_NEXT_SECONDS + _NEXT_STEPS * usual, _MOST_NEXT_SECONDS)
