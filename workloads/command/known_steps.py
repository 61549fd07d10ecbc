"""Distinguishes a step that is printed again from a counter of steps that begins again."""

from __future__ import annotations

import math

# A counter that begins again has counted at least this far: ranks that print each step are less far
# apart.
_FEWEST_STEPS = 5.0
# Steps of a counter that begins again take the seconds that their lines report, by this factor and
# the time between two reads: a step that is printed again takes none.
_FACTOR, _SECONDS = 1.33, 0.05


class KnownSteps:
    """The numbers of steps in one stream of output.

    Several ranks may print each step into it. If a rank buffers the lines of many steps, they come
    all at once, and long after the same lines of another rank.
    """

    def __init__(self, *, several_ranks: bool, began: float) -> None:
        """`several_ranks`: more than one may print here. `began`: the program, monotonic."""
        self._several_ranks = several_ranks
        self._first, self._last = math.inf, -math.inf
        # When the read before, and when this one, found new steps; monotonic.
        self._before = self._at = began
        # The seconds that the new steps of this read report.
        self._told = 0.0
        # The last number before the counter began again, if it did so in this read.
        self._last_before: float | None = None

    def begin_read(self, at: float) -> None:
        """Note that the lines of another read follow, at this monotonic time."""
        if self._told:
            self._before, self._told = self._at, 0.0
        self._at, self._last_before = at, None

    def is_new(self, number: object, seconds: float) -> bool:
        """Note a step by its number and reported seconds. False: it was printed before.

        Anything that is not a number counts as new.
        """
        if not isinstance(number, int | float) or isinstance(number, bool):
            return True
        if number <= self._last:
            if not self._may_begin_again(number):
                return False
            self._last_before = self._last
        if self._last_before is not None and not self._took(self._told + seconds):
            # They came too fast for new steps: they are printed again.
            self._last, self._last_before = max(self._last, self._last_before), None
            return False
        self._first, self._last = min(self._first, number), float(number)
        self._told += seconds
        return True

    def _may_begin_again(self, number: float) -> bool:
        is_in_order = not self._several_ranks or self._told == 0.0
        has_counted = self._last - self._first >= _FEWEST_STEPS
        # There may have been a line before the first step.
        return number <= self._first + 1 and has_counted and is_in_order

    def _took(self, seconds: float) -> bool:
        return seconds <= _FACTOR * (self._at - self._before) + _SECONDS
