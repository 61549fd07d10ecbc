"""Says below tied layouts what would decide between them, and which to take otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from db.read.rows import SweepRow, TrialRow

# At least this many repeats are advised, and at most those that `search.confirm` accepts.
FEWEST_REPEATS = 2
MOST_REPEATS, MOST_CONTENDERS = 32, 64


def tie_advice(sweep: SweepRow, tied: Sequence[TrialRow]) -> str:
    """Say what would decide between tied layouts, and which to take otherwise."""
    # The first of equals is the fastest.
    simplest = min(tied, key=lambda row: row.layout.num_techniques)
    take = f"take trial {simplest.id}, the simplest of them"
    # A table of measured runs has no more of them.
    confirm = json.loads(sweep.spec_json).get("search", {}).get("confirm")
    if confirm is None or sweep.conditions.get("workload") == "replay":
        return f"To choose one: {take}"
    wanted = {
        "repeats": min(max(2 * confirm["repeats"], FEWEST_REPEATS), MOST_REPEATS),
        "contenders": min(max(len(tied), confirm["contenders"]), MOST_CONTENDERS),
    }
    keys = [f"search.confirm.{name}={n}" for name, n in wanted.items() if n > confirm[name]]
    quieter = "measure on a quieter machine, where runs differ less"
    if not keys:
        return f"To decide between them, {quieter}; or {take}"
    simulate = " --simulate" if sweep.is_simulated else ""
    more = f"repeat them more often (sweep run FILE{simulate} {' '.join(keys)})"
    if sweep.is_simulated:
        return f"To decide between them, {more}; or {take}"
    return f"To decide between them, {more}, or {quieter}; or {take}"
