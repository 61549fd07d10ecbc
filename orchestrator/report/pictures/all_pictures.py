"""The pictures of a report, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.report.pictures import (
    best_so_far,
    compared,
    efficiency,
    failures,
    gantt,
    heat_map,
    importance,
    memory_bars,
    memory_boundary,
    parallel,
    pareto,
    prediction,
    profiles,
    scaling,
    slices,
)
from orchestrator.report.pictures.picture import Picture
from orchestrator.report.sweep_rows import SweepRows

# By the name that `sweep plot` takes.
PICTURES: Mapping[str, Callable[[Sequence[SweepRows]], Picture]] = {
    "best-layouts": heat_map.picture,
    "scaling": scaling.picture,
    "efficiency": efficiency.picture,
    "pareto": pareto.picture,
    "importance": importance.picture,
    "slices": slices.picture,
    "parallel": parallel.picture,
    "memory": memory_bars.picture,
    "memory-boundary": memory_boundary.picture,
    "memory-timeline": profiles.memory_timeline,
    "step-split": profiles.step_split,
    "best-so-far": best_so_far.picture,
    "gantt": gantt.picture,
    "gpu-seconds": gantt.gpu_seconds,
    "failures": failures.picture,
    "prediction": prediction.picture,
    "compared": compared.picture,
}


def pictures(sweeps: Sequence[SweepRows]) -> list[Picture]:
    """Draw every picture of some sweeps."""
    return [draw(sweeps) for draw in PICTURES.values()]
