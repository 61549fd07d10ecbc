"""How fast the step numbers in a program's lines rise: they show whether a line is one step."""

from __future__ import annotations

import math
from typing import Any

# A counter that begins again has counted more lines than this, and more than a step has
# micro-batches: it counts the steps of an epoch, and no parts of a step.
_FEWEST_LINES = 4


class StepNumbers:
    """The numbers of steps. A counter that begins again, as in each epoch, goes on counting."""

    def __init__(self, *, grad_accum_steps: int) -> None:
        self._fewest_lines = max(_FEWEST_LINES, grad_accum_steps)
        # Rises, and the lines in which they happened, until the counter began again last.
        self._rise = 0.0
        self._num_lines = 0
        # Line and number: the very first, the first since the counter began again, and the last.
        self._very_first = self._first = self._last = (0, math.nan)
        # The line since which no number is less than the one before.
        self._rises_since = 0

    def note(self, line: int, number: Any) -> None:
        """Note the number that a line has; what is no number is left out."""
        if not isinstance(number, int | float) or isinstance(number, bool):
            return
        if not math.isfinite(number):
            return
        here = (line, float(number))
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
        """By how much they rise from line to line; None: no two lines have one."""
        rise, num_lines = self._totals()
        return rise / num_lines if num_lines else None

    def _begins_again(self, number: float) -> bool:
        counted = self._last[0] - self._rises_since + 1
        # The first epoch may have had a line before its first step.
        return number <= self._very_first[1] + 1 and counted > self._fewest_lines

    def _totals(self) -> tuple[float, int]:
        (first_line, first), (last_line, last) = self._first, self._last
        return self._rise + (last - first), self._num_lines + (last_line - first_line)
