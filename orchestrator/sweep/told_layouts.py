"""The numbers that a cell's program reported with the newest fingerprint, and which are impossible.

Knows nothing of the search, or of which layout is best.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.cell_plausibility import ToldLayout, judge_cell


@dataclass(eq=False)
class ToldLayouts:
    """What was reported for each layout, by trial."""

    _told: dict[int, ToldLayout] = field(default_factory=dict)
    # Trials whose numbers cannot be true.
    _implausible: set[int] = field(default_factory=set)

    def note(self, trial_id: int, told: ToldLayout, *, is_implausible: bool = False) -> None:
        """Note what a trial reported."""
        self._told[trial_id] = told
        if is_implausible:
            self._implausible.add(trial_id)

    def has_to_count(self, layout: Layout) -> bool:
        """Return whether the lines of the user's program must be counted for this layout.

        A line may cover several steps, until a trial of the cell has plausible numbers. It may be
        that of a micro-batch, until a trial with several micro-batches has them.
        """
        shown = [one.layout for key, one in self._told.items() if key not in self._implausible]
        if layout.grad_accum_steps > 1:
            return not any(other.grad_accum_steps > 1 for other in shown)
        return not shown

    def newly_implausible(self) -> dict[int, str]:
        """Return the trials whose numbers contradict those of other layouts, and why."""
        reasons = judge_cell(self._told)
        return {key: why for key, why in reasons.items() if key not in self._implausible}
