"""Counts the trials of a sweep by state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from orchestrator.core.trial.lifecycle import UNDER_WAY, TrialState
from orchestrator.sweep.attempts import Attempts


class TrialCounts:
    """The trials of a sweep by state: those of the store, and those of attempts under way."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        # None of them is under way: the ledger of attempts has these.
        self._stored: Counter[TrialState] = Counter()

    @property
    def now(self) -> dict[TrialState, int]:
        """All trials by state."""
        under_way = {state: self._attempts.num_in(state) for state in UNDER_WAY}
        return {**self._stored, **under_way}

    def add_all(self, stored: Iterable[TrialState]) -> None:
        """Count trials, by their states in the store."""
        self._stored.update(state for state in stored if state not in UNDER_WAY)

    def begin_anew(self, stored: Iterable[TrialState]) -> None:
        """Count all trials of the sweep, and forget what was counted before."""
        self._stored.clear()
        self.add_all(stored)

    def add(self, state: TrialState, num: int = 1) -> None:
        """Note that trials have this state in the store now."""
        self._stored[state] += num

    def remove(self, state: TrialState, num: int = 1) -> None:
        """Note that trials no longer have this state."""
        self._stored[state] -= num

    def move(self, num: int, before: TrialState, after: TrialState) -> None:
        """Note that trials have changed their state."""
        self.remove(before, num)
        self.add(after, num)

    def note_launched(self) -> None:
        """Note that a trial that waited, or was never launched, has an attempt now."""
        self.remove(TrialState.QUEUED)
