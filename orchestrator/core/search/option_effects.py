"""The options that vary, whose values no formula knows: which are untried, and what they may do.

Each value has one constant in the belief of memory, and one in that of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.core.problem.arrays import Floats, Mask
from orchestrator.core.search.lattice import Lattice

# The worth of a row that shows an untried value together with other changes, as a share of that of
# a row which differs from the best row in this value alone: its effect is seen best there.
WORTH_AMONG_OTHER_CHANGES = 0.3
# Log seconds per logarithm of what layers keep: kernels that keep more also move more. Attention
# that keeps its scores keeps 3 times as much, and takes 1.1 to 1.5 times as long.
SECONDS_PER_MEMORY = 0.2


class OptionEffects:
    """The options of one lattice."""

    def __init__(self, lattice: Lattice) -> None:
        self._axes = [axis for axis in lattice.axes if axis.name in lattice.options]
        self._steps = np.stack(
            [axis.steps for axis in lattice.axes] or [np.zeros(len(lattice), dtype=np.int64)],
            axis=1,
        )

    def __bool__(self) -> bool:
        return bool(self._axes)

    def worth(self, ran: Sequence[int], best: int) -> Floats:
        """Return a factor on the worth of each row, 0 to 1.

        It is less if an untried value of an option is not the row's only change from the best one.
        """
        shows = np.zeros(len(self._steps), dtype=np.bool_)
        for axis, untried in zip(self._axes, self._untried(ran), strict=True):
            shows |= untried[axis.steps]
        changes = (self._steps != self._steps[best]).sum(axis=1)
        return np.where(shows & (changes > 1), WORTH_AMONG_OTHER_CHANGES, 1.0)

    def log_seconds(self, ran: Sequence[int], memory_constants: Floats) -> Floats:
        """Return what each row's untried values add to its log seconds.

        It follows from their effects on memory. `memory_constants` are those that are expected by
        now; the last ones are the options' values.
        """
        num = sum(len(axis) for axis in self._axes)
        effects = memory_constants[len(memory_constants) - num :]
        found = np.zeros(len(self._steps))
        for axis, untried in zip(self._axes, self._untried(ran), strict=True):
            of_axis, effects = effects[: len(axis)], effects[len(axis) :]
            found += SECONDS_PER_MEMORY * np.where(untried, of_axis, 0.0)[axis.steps]
        return found

    def _untried(self, ran: Sequence[int]) -> list[Mask]:
        """Return for each option the values that no row that ran has."""
        found = []
        for axis in self._axes:
            untried = np.ones(len(axis), dtype=np.bool_)
            untried[axis.steps[list(ran)]] = False
            found.append(untried)
        return found
