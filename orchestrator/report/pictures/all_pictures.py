"""The pictures of a report, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.report.pictures import (
    best_so_far,
    failures,
    gantt,
    heat_map,
    memory_bars,
    prediction,
    scaling,
)
from orchestrator.report.pictures.picture import Picture
from orchestrator.report.sweep_rows import SweepRows

# By the name that `sweep plot` takes.
PICTURES: Mapping[str, Callable[[Sequence[SweepRows]], Picture]] = {
    "best-layouts": heat_map.picture,
    "scaling": scaling.picture,
    "memory": memory_bars.picture,
    "best-so-far": best_so_far.picture,
    "gantt": gantt.picture,
    "gpu-seconds": gantt.gpu_seconds,
    "failures": failures.picture,
    "prediction": prediction.picture,
}


def pictures(sweeps: Sequence[SweepRows]) -> list[Picture]:
    """Draw every picture of some sweeps."""
    return [draw(sweeps) for draw in PICTURES.values()]
