"""Notices that every rank of a node writes each step, by how lines arrive.

One rank that writes several lines at a time waits for several steps in between; several ranks that
each write one wait for one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

# Shorter steps cannot be told apart with a check every 50 ms.
LEAST_STEP_SECONDS = 0.2
# Lines that arrive within this part of a step are of one step.
_TOGETHER = 0.25
# The time from step to step may differ from what a step tells by this part.
_TOLERANCE = 0.3
_FEWEST_STEPS = 4


class RepeatedSteps:
    """The arrivals of lines, in groups."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._began: list[float] = []  # of each group
        self._sizes: list[int] = []

    def note(self, num_lines: int, *, step_seconds: Sequence[float], at: float) -> None:
        """Note the number of lines at this time; `step_seconds` are those that they report."""
        new, self._num_lines = num_lines - self._num_lines, num_lines
        if new == 0 or not step_seconds:
            return
        if self._began and at - self._began[-1] < _TOGETHER * step_seconds[-1]:
            self._sizes[-1] += new
        else:
            self._began.append(at)
            self._sizes.append(new)

    def are_written_by(self, num_ranks: int, *, step_seconds: Sequence[float]) -> bool:
        """Return whether each of `num_ranks` seems to have written each of the last steps."""
        # The last group may not be complete.
        began, sizes = self._began[-_FEWEST_STEPS - 1 :], self._sizes[-_FEWEST_STEPS - 1 : -1]
        if num_ranks < 2 or len(sizes) < _FEWEST_STEPS or set(sizes) != {num_ranks}:
            return False
        step = statistics.median(step_seconds[-_FEWEST_STEPS * num_ranks :])
        return step >= LEAST_STEP_SECONDS and all(
            abs(later - earlier - step) <= _TOLERANCE * step for earlier, later in pairwise(began)
        )
