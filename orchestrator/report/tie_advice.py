"""Says below tied layouts what would decide between them, and which to take otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.core.problem.layout import Layout, RecomputeMode
from orchestrator.core.trial.machine_load import is_disturbed
from orchestrator.report.remarks import key_of_spent_budget

if TYPE_CHECKING:
    from db.read.rows import SweepRow, TrialRow
    from orchestrator.report.ranking import Ranking

# At least this many repeats are advised, and at most those that `search.confirm` accepts.
FEWEST_REPEATS = 2
MOST_REPEATS, MOST_CONTENDERS = 32, 64
# Above this, the number is not given.
MANY_RUNS = 1_000
# The simplest layout is advised only among those whose step took longer by at most this share.
NEARLY_AS_FAST = 0.05


def tie_advice(sweep: SweepRow, ranking: Ranking, stop_reason: str | None = None) -> str:
    """Say what would decide between the tied layouts of a cell, and which to take otherwise.

    `stop_reason` says why the search of the cell ended: a budget that is spent pays for no repeat.
    """
    tied = [trial for trial in ranking.leading if trial.id in ranking.tied]
    near = [row for row in tied if _slowness(row, ranking) <= NEARLY_AS_FAST]
    take = _simplest(near, is_all=len(near) == len(tied))
    # A table of measured runs has no more of them.
    confirm = json.loads(sweep.spec_json).get("search", {}).get("confirm")
    if confirm is None or sweep.conditions.get("workload") == "replay":
        return f"To choose one: {take}"
    quieter = []
    if not sweep.is_simulated and _is_noisy(ranking, tied):
        quieter = ["measure on a quieter machine, where runs differ less"]
    num_runs = ranking.runs_to_decide
    if num_runs is not None and num_runs > 1 + MOST_REPEATS:
        about = f"About {int(float(f'{num_runs:.2g}')):,}"
        if num_runs > MANY_RUNS:
            about = f"More than {MANY_RUNS:,}"
        return (
            f"{about} runs of each of the first two would be needed to see which is faster, and"
            f" search.confirm.repeats is {MOST_REPEATS} at most: {', or '.join([*quieter, take])}"
        )
    wanted = {
        "repeats": min(
            max(2 * confirm["repeats"], (num_runs or 1) - 1, FEWEST_REPEATS), MOST_REPEATS
        ),
        "contenders": min(max(len(tied), confirm["contenders"]), MOST_CONTENDERS),
    }
    keys = [f"search.confirm.{name}={n}" for name, n in wanted.items() if n > confirm[name]]
    ways = []
    if keys:
        simulate = " --simulate" if sweep.is_simulated else ""
        about = "" if num_runs is None else _enough(num_runs, most=1 + wanted["repeats"])
        if (key := key_of_spent_budget(stop_reason)) is not None:
            about += f"; {key} is spent, so raise it, too"
        ways.append(f"repeat them more often (sweep run FILE{simulate} {' '.join(keys)}{about})")
    ways += quieter
    if not ways:
        return f"To choose one: {take}"
    return f"To decide between them, {', or '.join(ways)}; or {take}"


def _simplest(near: Sequence[TrialRow], *, is_all: bool) -> str:
    """Return the advice to take the simplest of these; `is_all`: of all that are tied."""
    # The first of equals is the fastest.
    simplest = min(near, key=lambda row: _complexity(row.layout))
    if is_all:
        return f"take trial {simplest.id}, the simplest of them"
    if simplest is near[0]:
        return f"take trial {simplest.id}, the fastest so far"
    return f"take trial {simplest.id}, the simplest of those nearly as fast as trial {near[0].id}"


def _complexity(layout: Layout) -> tuple[int, int]:
    """Return what orders layouts by simplicity: their techniques, then what they recompute."""
    return layout.num_techniques, list(RecomputeMode).index(layout.recompute.mode)


def _enough(num_runs: int, *, most: int) -> str:
    """Say how many runs may be enough; `most`: as many as the advised options allow."""
    if num_runs >= most:
        return f"; about {num_runs} runs of each of the first two may be enough"
    return (
        f"; at most {most} runs of each, and about {num_runs} of each of the first two may be"
        " enough"
    )


def _slowness(row: TrialRow, ranking: Ranking) -> float:
    """Return how much longer its step took than the first one's, relative; 0 if not compared."""
    first, one = (ranking.compared.get(key) for key in (ranking.leading[0].id, row.id))
    if first is None or one is None:
        return 0.0
    return one.step_seconds / first.step_seconds - 1.0


def _is_noisy(ranking: Ranking, tied: Sequence[TrialRow]) -> bool:
    """Return whether noise may have caused the tie.

    It may if runs of one layout differ more than the first two layouts do, or if somebody else used
    the machine while a tied layout was measured.
    """
    if any(is_disturbed(trial.load) for trial in tied):
        return True
    lead = 0.0 if ranking.margin is None else ranking.margin.value
    return ranking.spread is not None and ranking.spread > lead
