"""Measured layouts by their axes, with their speed relative to the best of their cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from orchestrator.core.problem.layout import SHORT_NAMES, Layout
from orchestrator.report.sweep_rows import SweepRows

_SHORT = {name: short for short, name in SHORT_NAMES.items()} | {"zero_stage": "zero"}


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """A layout with its values, as texts by the name of the axis."""

    trial_id: int
    cell_id: int
    values: dict[str, str]
    # Tokens/s/GPU over that of the fastest layout of its cell.
    relative_speed: float


def measured_layouts(sweeps: Sequence[SweepRows]) -> tuple[MeasuredLayout, ...]:
    """Return the layouts that can be ranked."""
    ranked = [
        one
        for sweep in sweeps
        for one in sweep.trials
        if one.trial.is_ranked and one.trial.tokens_per_second_per_gpu
    ]
    fastest: dict[int, float] = {}
    for one in ranked:
        speed = one.trial.tokens_per_second_per_gpu or 0.0
        fastest[one.trial.cell_id] = max(speed, fastest.get(one.trial.cell_id, 0.0))
    return tuple(
        MeasuredLayout(
            trial_id=one.trial.id,
            cell_id=one.trial.cell_id,
            values={"GPUs": str(one.cell.cell.num_gpus)} | values_of(one.trial.layout),
            relative_speed=(one.trial.tokens_per_second_per_gpu or 0.0)
            / fastest[one.trial.cell_id],
        )
        for one in ranked
    )


def drift_note(sweeps: Sequence[SweepRows]) -> str:
    """Return what a caption says of speeds as measured, if a machine drifted; else nothing."""
    if all(it.drift is None for sweep in sweeps for it in sweep.rankings.values()):
        return ""
    return " Speeds are as they were measured; the machine drifted, which the tables above correct."


def values_of(layout: Layout) -> dict[str, str]:
    """Return the value of each axis of a layout as text, options that vary included."""
    values = {
        _SHORT.get(field.name, field.name): str(getattr(layout, field.name))
        for field in fields(Layout)
        if field.name != "options"
    }
    return values | {name: str(value) for name, value in layout.options}


def varying(found: Sequence[MeasuredLayout]) -> dict[str, list[str]]:
    """Return the axes with more than one value, and their values in order."""
    values: dict[str, dict[str, None]] = {}
    for one in found:
        for name, value in one.values.items():
            values.setdefault(name, {})[value] = None
    return {name: sorted(some, key=_order) for name, some in values.items() if len(some) > 1}


def _order(value: str) -> tuple[float, str]:
    """Numbers by size, then texts."""
    return (float(value), "") if value.isdigit() else (float("inf"), value)
