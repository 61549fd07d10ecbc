"""Tells a step that is printed again from a counter of steps that begins again."""

from __future__ import annotations

import math

# Ranks that print each step are never so many steps apart.
_FEWEST_STEPS = 5.0
# Steps of a counter that begins again took their time: what they tell exceeds the time since the
# lines before them by this factor at most, and by the time between two looks.
_FACTOR, _SECONDS = 1.33, 0.05


class KnownSteps:
    """The numbers of steps in one stream of output.

    Several ranks may print each step into it. A buffer of theirs holds the lines of many steps, and
    then these come long after the last ones of another rank, but in no time.
    """

    def __init__(self, *, several_ranks: bool, began: float) -> None:
        """`several_ranks`: more than one may print here. `began`: the program, monotonic."""
        self._several_ranks = several_ranks
        self._first, self._last = math.inf, -math.inf
        # When lines with new steps came before, and come now; and what the latter tell.
        self._before = self._at = began
        self._told = 0.0
        # The last number before the counter began again among the lines that come now.
        self._last_before: float | None = None

    def begin_look(self, at: float) -> None:
        """Note that the lines of another look follow, at this time."""
        if self._told:
            self._before, self._told = self._at, 0.0
        self._at, self._last_before = at, None

    def is_known(self, number: object, seconds: float) -> bool:
        """Note the number of a step. Return whether this or a later one was told before."""
        if not isinstance(number, int | float) or isinstance(number, bool):
            return False
        if number <= self._last:
            if not self._may_begin_again(number):
                return True
            self._last_before = self._last
        if self._last_before is not None and not self._took(self._told + seconds):
            # They came too fast: they were printed again after all.
            self._last, self._last_before = max(self._last, self._last_before), None
            return True
        self._first, self._last = min(self._first, number), float(number)
        self._told += seconds
        return False

    def _may_begin_again(self, number: float) -> bool:
        is_in_order = not self._several_ranks or self._told == 0.0
        has_counted = self._last - self._first >= _FEWEST_STEPS
        # There may have been a line before the first step.
        return number <= self._first + 1 and has_counted and is_in_order

    def _took(self, seconds: float) -> bool:
        return seconds <= _FACTOR * (self._at - self._before) + _SECONDS
