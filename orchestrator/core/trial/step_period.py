"""Finds that each n-th step is long, as if the clock waited for the device only then."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The mean of steps over their median: more is not noise. Long steps may hide the time of others.
UNEVEN_FACTOR = 1.5
# Fewer long steps may have one distance by chance. Two are enough if the first is at the end of a
# whole period, and the longer takes at most _ALIKE times as long as the other.
FEWEST_LONG = 3
_ALIKE = 1.1
# In steps of a period of two, the median is the mean.
SHORTEST_PERIOD, LONGEST_PERIOD = 3, 64
# The place of the last step that may be slow at the start, counted from 0: it is never long.
_LAST_SLOW = 2
# Most long steps out of the period, over those in it: another program had the processor.
_MOST_OTHERS = 0.25
# A step is long if it takes this many times the median, and this share of the third longest step.
_LONG_FACTOR, _LONG_SHARE = 2.0, 0.5


@dataclass(frozen=True, kw_only=True)
class StepPeriod:
    """The period of steps: each `num_steps`-th is long."""

    num_steps: int
    # The medians of the long steps and of all steps, in seconds.
    long: float
    usual: float

    @property
    def mean(self) -> float:
        """The mean seconds of a step, over a period with one long step."""
        return self.usual + (self.long - self.usual) / self.num_steps


def are_uneven(seconds: Sequence[float]) -> bool:
    """Return whether some steps are so long that the median of all is far below their mean."""
    return statistics.fmean(seconds) > UNEVEN_FACTOR * statistics.median(seconds)


def period_of(seconds: Sequence[float]) -> StepPeriod | None:
    """Return the period of steps in the order in which they ran; None: they have none."""
    if len(seconds) < FEWEST_LONG * SHORTEST_PERIOD:
        return None
    usual = statistics.median(seconds)
    longest = sorted(seconds)[-FEWEST_LONG]
    long = max(_LONG_FACTOR * usual, _LONG_SHARE * longest)
    is_long = [place > _LAST_SLOW and one > long for place, one in enumerate(seconds)]
    regular = _regular(is_long)
    if not regular:
        return None
    longs, num_steps = [seconds[place] for place in regular], regular[1] - regular[0]
    are_alike = len(longs) >= FEWEST_LONG or max(longs) <= _ALIKE * min(longs)
    found = StepPeriod(num_steps=num_steps, long=statistics.median(longs), usual=usual)
    return found if are_alike and found.mean > UNEVEN_FACTOR * usual else None


def _regular(is_long: Sequence[bool]) -> Sequence[int]:
    """Return the places of the long steps that follow each other at one distance; else nothing."""
    num_long = sum(is_long)
    if num_long < 2:
        return ()
    longest = min(len(is_long) // 2, LONGEST_PERIOD)
    for distance in range(SHORTEST_PERIOD, longest + 1):
        for phase in {place % distance for place, one in enumerate(is_long) if one}:
            places = range(phase, len(is_long), distance)
            # The very first steps are not counted as long.
            counted = places if places[0] > _LAST_SLOW else places[1:]
            num = len(counted)
            is_whole = num == len(places) and phase == distance - 1
            if num < (2 if is_whole else FEWEST_LONG) or num_long - num > _MOST_OTHERS * num:
                continue
            if all(is_long[place] for place in counted):
                return counted
    return ()
