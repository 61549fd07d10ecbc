"""Says why nothing but the time that a program ran bounds the step times that it reports.

That is so for a document, and for lines that are written at the end, or are held back.
"""

from __future__ import annotations

from orchestrator.core.trial.line_groups import LineGroups
from orchestrator.core.trial.pace import Pace, ToldSteps
from orchestrator.core.trial.protocol import RankResult

ADVICE = (
    "only the time that the program ran bounds the reported times, so a clock that does not wait"
    " for the device is not found: write a line when each step has ended, and flush it"
)


def how_steps_arrived(result: RankResult) -> str | None:
    """Return how steps arrived, if their times cannot be compared with the time between lines.

    None: they can, they are too few, or nobody saw how they arrived.
    """
    seen = result.seen
    if seen is None or not result.step_seconds:
        return None
    if Pace.of(seen, told := ToldSteps.of(result, seen)) is not None:
        return None
    if len(seen.reads) < 2:
        return "all steps arrived at once" if len(told.seconds) > 1 else None
    groups = LineGroups.of(result)
    if groups is None or not groups.are_held_back:
        return None
    return f"{groups.num_lines:.3g} steps arrived at a time"


def why_unchecked(result: RankResult) -> str | None:
    """Return why the times of a measurement were not checked, with the fix; None: they were."""
    how = how_steps_arrived(result)
    return None if how is None else f"{how}, and {ADVICE}"
