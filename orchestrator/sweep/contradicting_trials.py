"""The measured trials of one cell that contradict physics, in the order in which they are repeated.

Knows layouts and their times, but neither runs nor drift (confirmation.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.problem.contradiction import (
    Contradiction,
    TimedLayout,
    contradictions,
    shapes,
)
from orchestrator.core.problem.layout import Layout


@dataclass(eq=False)
class ContradictingTrials:
    """What is measured but not compared yet, and the trials of the contradictions found."""

    _layouts: dict[int, Layout] = field(default_factory=dict)
    _unchecked: set[int] = field(default_factory=set)  # trials not compared with physics yet
    # True once all trials were compared with each other, at the machine's present speed.
    _are_compared: bool = False
    _alike: dict[Layout, list[int]] = field(default_factory=dict)  # may contradict each other
    # Trials that are not in `_alike` yet.
    _ungrouped: list[int] = field(default_factory=list)
    # Trials of contradictions, in the order in which they are repeated, and why.
    _found: list[tuple[int, str]] = field(default_factory=list)

    @property
    def found(self) -> Sequence[tuple[int, str]]:
        """The trials to measure again, and why, in the order in which they are repeated."""
        return self._found

    @property
    def has_unchecked(self) -> bool:
        """True if a trial was measured since the last `check`."""
        return bool(self._unchecked)

    def note(self, trial_id: int, layout: Layout) -> None:
        """Note that a trial was measured, for the first time or again."""
        self._are_compared = False
        self._unchecked.add(trial_id)
        if trial_id not in self._layouts:
            self._layouts[trial_id] = layout
            self._ungrouped.append(trial_id)

    def note_begun(self, trial_id: int) -> None:
        """Note that a repeat of a trial was started: it is wanted no more."""
        self._found = [one for one in self._found if one[0] != trial_id]

    def compare_all(self) -> None:
        """Let the next `check` compare all trials, unless nothing is new since the last time."""
        if not self._are_compared:
            self._unchecked, self._are_compared = set(self._layouts), True

    def compared(self) -> set[int]:
        """Return the trials that the next `check` compares: those that are new, and those alike."""
        for trial_id in self._ungrouped:
            for shape in shapes(self._layouts[trial_id]):
                self._alike.setdefault(shape, []).append(trial_id)
        self._ungrouped.clear()
        return {
            other
            for trial_id in self._unchecked
            for shape in shapes(self._layouts[trial_id])
            for other in self._alike[shape]
        }

    def check(
        self,
        timed: Mapping[int, TimedLayout],
        *,
        best_seconds: float,
        repeatable: Collection[int],
    ) -> None:
        """Compare what is new with physics. `timed` has the measurements of `compared`.

        `repeatable`: those of them that may be measured again.
        """
        unchecked, self._unchecked = self._unchecked, set()
        waiting = {trial_id for trial_id, _ in self._found}
        for one in contradictions(timed, unchecked, best_seconds=best_seconds):
            for trial_id in (one.less, one.more):
                if trial_id not in waiting and trial_id in repeatable:
                    waiting.add(trial_id)
                    self._found.append((trial_id, self._why(one)))

    def _why(self, one: Contradiction) -> str:
        less, more = self._layouts[one.less].short, self._layouts[one.more].short
        does_less = f"trial {one.less} ({less}) does less work than trial {one.more} ({more})"
        return f"{does_less}, and was {one.slower:.0%} slower: both are measured again"
