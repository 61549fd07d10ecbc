"""Finds objectives of a sweep file that nothing could tell, or that its search cannot look for."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Search
from orchestrator.core.trial.merit import Merit

NO_ENERGY = frozenset({"synthetic", "replay"})  # workloads that compute nothing


def objective_mistake(
    objectives: Sequence[Objective], search: Search, *, workload: str, device: str
) -> str | None:
    """Return why the objectives cannot be had: nothing measures one, or the search has none."""
    merits = {one.merit for one in objectives}
    if Merit.EFFICIENCY in merits:
        energy = f"{Objective.JOULES_PER_TOKEN}: the energy is read from GPUs (NVML), and"
        if device == "cpu":
            return f"{energy} device cpu has none; leave it out"
        if workload in NO_ENERGY:
            return f"{energy} workload {workload} uses none; leave it out"
    if merits == {Merit.SPEED}:
        return None
    if not search.strategy.finds_fronts:
        return (
            f"strategy {search.strategy} looks for the fastest layout only; use auto, random or"
            " exhaustive, or name one objective of speed"
        )
    if search.early_stop is True:
        return (
            "search.early_stop would end trials that are slower than the best, which may be on the"
            " front; leave early_stop out"
        )
    return None
