"""Says why the step times of a program could not be compared with the times of its lines.

A document has no lines. Lines that are written at the end, or several at a time, do not show when
each step ended.
"""

from __future__ import annotations

from orchestrator.core.trial.line_groups import LineGroups
from orchestrator.core.trial.pace import Pace, ToldSteps
from orchestrator.core.trial.protocol import RankResult

UNCHECKED_ADVICE = (
    "only the time that the program ran bounds the reported times, so a clock that does not wait"
    " for the device is not found: write a line when each step has ended, and flush it. If it does"
    " so, its steps are too short: raise measurement.min_steps"
)
_AT_ONCE = "all steps arrived at once"


def how_steps_arrived(result: RankResult) -> str | None:
    """Return how steps arrived, if their times cannot be compared with the time between lines.

    None: they can, they are too few, or nobody saw how they arrived.
    """
    seen = result.seen
    if seen is None or not result.step_seconds:
        return None
    told = ToldSteps.of(result, seen)
    pace = Pace.of(seen, told)
    # If `least` is 0, nothing shows that most steps took as long as they report, or longer.
    if pace is not None and pace.least > 0:
        return None
    if len(seen.reads) < 2:
        return _AT_ONCE if len(told.seconds) > 1 else None
    groups = LineGroups.of(result)
    return None if groups is None else f"{groups.num_lines:.3g} steps arrived at a time"


def why_unchecked(result: RankResult) -> str | None:
    """Return why step times could not be compared with the pace of their lines, with the fix.

    None: as in `how_steps_arrived`. The reason is the same for all trials whose lines come so.
    """
    how = how_steps_arrived(result)
    if how is None:
        return None
    return (
        f"{how if how == _AT_ONCE else 'several steps arrived at a time'}, and {UNCHECKED_ADVICE}"
    )
