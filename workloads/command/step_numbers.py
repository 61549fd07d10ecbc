"""Computes how much the step numbers rise from line to line: by 1 if a line is one step."""

from __future__ import annotations

import math
from typing import Any

# A counter that begins again after more lines than this, and after more than a step has
# micro-batches, counts the steps of an epoch. Otherwise it counts the parts of a step.
_FEWEST_LINES = 4


def step_number(value: Any) -> float | None:
    """Return the number that a line gives its step; None: the value is no finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


class StepNumbers:
    """The step numbers of a program. A counter that begins again in each epoch continues here."""

    def __init__(self, *, grad_accum_steps: int) -> None:
        self._fewest_lines = max(_FEWEST_LINES, grad_accum_steps)
        # The sum of rises, and the number of their lines, before the counter began again last.
        self._rise = 0.0
        self._num_lines = 0
        # Line and number: the very first, the first since the counter began again, and the last.
        self._very_first = self._first = self._last = (0, math.nan)
        # From this line on, no number is less than the one before.
        self._rises_since = 0

    def note(self, line: int, number: Any) -> None:
        """Note the step number of a line, counted from 1; any other value is left out."""
        if (number := step_number(number)) is None:
            return
        here = (line, number)
        if math.isnan(self._last[1]):
            self._very_first = self._first = here
            self._rises_since = line
        elif number < self._last[1]:
            if self._begins_again(number):
                self._rise, self._num_lines = self._totals()
                self._first = here
            self._rises_since = line
        self._last = here

    @property
    def per_line(self) -> float | None:
        """The mean rise from line to line; None: fewer than two lines have a number."""
        rise, num_lines = self._totals()
        return rise / num_lines if num_lines else None

    def _begins_again(self, number: float) -> bool:
        counted = self._last[0] - self._rises_since + 1
        # The first epoch may have had a line before its first step.
        return number <= self._very_first[1] + 1 and counted > self._fewest_lines

    def _totals(self) -> tuple[float, int]:
        (first_line, first), (last_line, last) = self._first, self._last
        return self._rise + (last - first), self._num_lines + (last_line - first_line)
