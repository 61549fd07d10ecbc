"""Says what of a program's step times nothing checks, with the fix.

A document has no lines. Lines that are written at the end, or several at a time, do not show when
each step ended. And a line may be a step, a micro-batch or several steps: step numbers show it, or
how many lines a program writes that was told its number of steps.
"""

from __future__ import annotations

from orchestrator.core.trial.line_count import RUN_AS_ASKED
from orchestrator.core.trial.line_groups import LineGroups
from orchestrator.core.trial.pace import Pace, ToldSteps
from orchestrator.core.trial.protocol import RankResult

UNCHECKED_ADVICE = (
    "only the time that the program ran bounds the reported times, so a clock that does not wait"
    " for the device is not found: write a line when each step has ended, and flush it. If it does"
    " so, its steps are too short: raise measurement.min_steps"
)
_AT_ONCE = "all steps arrived at once"
_UNCOUNTED = (
    "nothing shows that each time is that of one step, and not of a micro-batch or of several:"
    f' give each line a field "step", or {RUN_AS_ASKED}'
)


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
    """Return what nothing checks of the step times, with the fix; None: nothing is known of it.

    The reasons are the same for all trials whose program writes in the same way.
    """
    seen, how = result.seen, how_steps_arrived(result)
    reasons = []
    if how is not None:
        what = how if how == _AT_ONCE else "several steps arrived at a time"
        reasons.append(f"{what}, and {UNCHECKED_ADVICE}")
    if (
        seen is not None
        and result.step_seconds
        and seen.steps_per_line is None
        and not seen.knows_num_steps
    ):
        reasons.append(_UNCOUNTED)
    return "; and ".join(reasons) or None
