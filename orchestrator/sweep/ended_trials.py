"""The objective of the trials of a cell that ended, in their order: do the last ones gain?

Of a search for a front, it is the volume of the front once the trial had ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from orchestrator.core.problem.hypervolume import hypervolume, on_front
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Plateau
from orchestrator.core.trial.merit import Merit


class EndedTrials:
    """The result of each ended trial of a cell."""

    def __init__(self, objective: Objective, merits: Sequence[Merit] = (Merit.SPEED,)) -> None:
        self._merits = tuple(merits)
        self._is_of_front = self._merits != (Merit.SPEED,)
        self._sign = 1.0 if self._is_of_front or objective.is_larger_better else -1.0
        self._front = np.empty((0, len(self._merits)))
        # Larger is better; -inf without a value.
        self._values: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def note(self, value: float | None) -> None:
        """Note the objective of a trial that ended; None: it has none."""
        self._values.append(float("-inf") if value is None else self._sign * value)

    def note_point(self, values: Mapping[Merit, float | None]) -> None:
        """Note the merits of a trial that ended, 0 or more each; None: it was not read."""
        point = [values.get(merit) for merit in self._merits]
        known = [value for value in point if value is not None]
        if len(known) == len(point):
            points = np.vstack([self._front, known])
            self._front = points[on_front(points)]
        self.note(hypervolume(self._front) or None)

    @property
    def is_of_front(self) -> bool:
        """True if `note_point` is to be told, in place of one value."""
        return self._is_of_front

    def have_plateaued(self, plateau: Plateau) -> bool:
        """Return whether the last trials gained less, relative, over the best before them."""
        if len(self._values) <= plateau.trials:
            return False
        before = max(self._values[: -plateau.trials])
        since = max(self._values[-plateau.trials :])
        return before > float("-inf") and since - before < plateau.gain * abs(before)
