"""The plan of a program's lines, each of which tells the mean of some steps.

Ranks that read lines, and simulations of them, decide by it when the lines are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.trial.protocol import MeasurementPlan
from orchestrator.core.trial.step_period import are_uneven
from orchestrator.core.trial.stopping import Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePlan:
    """The plan of a trial, counted in lines."""

    # Lines are the samples of the timing, and a line takes the time of its steps.
    timing: MeasurementPlan
    least_warmup: int
    # Lines of the warm-up are among them.
    num_asked: int
    # The number of lines has to show whether a line is one step: no line may be missing.
    counts_lines: bool

    @classmethod
    def of(cls, plan: MeasurementPlan, *, steps_per_line: int, counts_lines: bool) -> LinePlan:
        """Return the plan of lines of so many steps each, from the plan of steps."""
        # A line that covers a step of the warm-up belongs to it.
        least_warmup = math.ceil(plan.warmup_steps / steps_per_line)
        timing = {
            "warmup_steps": least_warmup,
            "warmup_seconds": plan.warmup_seconds / steps_per_line,
            "min_seconds": plan.min_seconds / steps_per_line,
        }
        return cls(
            timing=plan.model_copy(update=timing),
            least_warmup=least_warmup,
            num_asked=least_warmup + math.ceil(plan.max_steps / steps_per_line),
            counts_lines=counts_lines,
        )

    def num_warmup(self, timing: Timing) -> int:
        """Return how many lines are warm-up.

        They are more than the plan asks for if those are too short, or show a trend. A program
        has only as many steps as it was asked for, so half of them are timed in any case.
        """
        return max(self.least_warmup, min(timing.num_warmup or 0, self.num_asked // 2))

    def are_enough(self, seconds: Sequence[float], timing: Timing) -> bool:
        """Return whether a program may end after lines of so many seconds per step.

        More lines may show what these do not: how many steps a line covers, or a period.
        """
        if len(seconds) >= self.num_asked:
            return True
        if self.counts_lines or not timing.is_enough:
            return False
        is_too_slow = timing.bound is not None
        return is_too_slow or not are_uneven(seconds[self.num_warmup(timing) :])
