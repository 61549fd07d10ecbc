"""The objective of the trials of a cell that ended, in their order: do the last ones gain?"""

from __future__ import annotations

from orchestrator.core.sweepfile.sections import Objective, Plateau


class EndedTrials:
    """What each ended trial of a cell reached."""

    def __init__(self, objective: Objective) -> None:
        self._sign = -1.0 if objective is Objective.STEP_SECONDS else 1.0
        # Larger is better; -inf without a value.
        self._values: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def note(self, value: float | None) -> None:
        """Note the objective of a trial that ended; None: it has none."""
        self._values.append(float("-inf") if value is None else self._sign * value)

    def have_plateaued(self, plateau: Plateau) -> bool:
        """Return whether the last trials gained less, relative, over the best before them."""
        if len(self._values) <= plateau.trials:
            return False
        before = max(self._values[: -plateau.trials])
        since = max(self._values[-plateau.trials :])
        return before > float("-inf") and since - before < plateau.gain * abs(before)
