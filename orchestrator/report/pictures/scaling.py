"""The scaling scatter: every trial by GPUs and memory, with speed, utilisation and state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log2

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.peak_memory import needed_bytes, sources_of
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import (
    GIB,
    GREY,
    HOVER_TRIAL,
    ORANGE,
    SCALE,
    VERMILION,
    Picture,
    PictureAxis,
    Trace,
    figure,
    gpu_ticks,
    line_at,
)
from orchestrator.report.sweep_rows import SweepRows

# Points of the same number of GPUs are spread over this part of a doubling.
SPREAD = 0.6
# Rows above the limit, as a share of it.
ROW = 0.06
SMALLEST, LARGEST = 6.0, 26.0  # diameters, in pixels
_WITHOUT_SPEED = {
    TrialState.OUT_OF_MEMORY: ("out of memory", "x-thin", ORANGE),
    TrialState.PRUNED: ("pruned: needs at least as much", "line-ew", GREY),
    TrialState.FAILED: ("failed", "cross-thin", VERMILION),
}


_ROWS = (TrialState.MEASURED, *_WITHOUT_SPEED)


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """A trial that ended. Unknown is None."""

    trial_id: int
    state: TrialState
    num_gpus: int
    # None unless it was measured.
    memory_bytes: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None


def points(sweeps: Iterable[SweepRows]) -> tuple[ScalingPoint, ...]:
    """Return a point for each trial that was measured, failed, or does not fit."""
    return tuple(
        ScalingPoint(
            trial_id=one.trial.id,
            state=one.trial.state,
            num_gpus=one.cell.cell.num_gpus,
            memory_bytes=needed_bytes(one.trial)
            if one.trial.state is TrialState.MEASURED
            else None,
            tokens_per_second_per_gpu=one.trial.tokens_per_second_per_gpu,
            mfu=one.trial.mfu,
        )
        for sweep in sweeps
        for one in sweep.trials
        if one.trial.state is TrialState.MEASURED or one.trial.state in _WITHOUT_SPEED
    )


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw trials by memory, those without above the limit; if no memory is known, by speed."""
    found = points(sweeps)
    has_memory = any(one.memory_bytes is not None for one in found)
    drawn = found if has_memory else [one for one in found if one.tokens_per_second_per_gpu]
    blank = Picture(
        name="scaling",
        title="Every trial by GPUs and memory" if has_memory else "Every trial by GPUs",
        question="Where is the good region?",
    )
    if not drawn:
        why = "No trial has ended yet; `sweep run` measures some."
        if found:
            why = "No trial was measured: the picture of failures, and `sweep trials`, say why."
        return replace(blank, why_empty=why)
    limits = _limits(sweeps) if has_memory else []
    lines = [line_at(limit / GIB, f"limit {show.memory(limit)}") for limit in limits]
    places, heights = _places(drawn), _heights(drawn, limits, has_memory=has_memory)
    title = "tokens/s/GPU"
    if has_memory:
        kinds = sources_of(one.trial for sweep in sweeps for one in sweep.trials)
        title = f"peak memory, {kinds}, worst rank (GiB)"
    caption = (
        "A larger point is faster; its colour is the utilisation (MFU). Points of one number of"
        " GPUs are spread sideways, the fastest at the left."
    )
    if has_memory and any(one.memory_bytes is None for one in drawn):
        caption += " Trials whose peak is not known are in rows above the limit, by their state."
    return replace(
        blank,
        caption=caption,
        figure=figure(
            [*_measured(drawn, places, heights), *_others(drawn, places, heights)],
            x=PictureAxis(title="GPUs", is_log=True, **gpu_ticks(one.num_gpus for one in drawn)),
            y=PictureAxis(title=title, from_zero=True),
            height=480,
            shapes=[shape for shape, _ in lines],
            annotations=[label for _, label in lines],
        ),
    )


def _heights(
    found: Sequence[ScalingPoint], limits: Sequence[int], *, has_memory: bool
) -> dict[int, float]:
    """Return where each point is on the other axis."""
    if not has_memory:
        return {one.trial_id: one.tokens_per_second_per_gpu or 0.0 for one in found}
    known = [one.memory_bytes for one in found if one.memory_bytes is not None]
    top = max([*known, *limits]) / GIB
    rows = {state: top * (1 + ROW * (number + 1)) for number, state in enumerate(_ROWS)}
    return {
        one.trial_id: rows[one.state] if one.memory_bytes is None else one.memory_bytes / GIB
        for one in found
    }


def _places(found: Sequence[ScalingPoint]) -> dict[int, float]:
    """Return where each point is on the axis of GPUs: the fastest at the left."""
    alike: defaultdict[tuple[int, TrialState], list[ScalingPoint]] = defaultdict(list)
    for one in found:
        alike[one.num_gpus, one.state].append(one)
    places = {}
    for (num_gpus, _), some in alike.items():
        some.sort(key=lambda one: (-(one.tokens_per_second_per_gpu or 0.0), one.trial_id))
        for number, one in enumerate(some):
            aside = (number + 0.5) / len(some) - 0.5 if len(some) > 1 else 0.0
            places[one.trial_id] = round(2 ** (log2(num_gpus) + SPREAD * aside), 4)
    return places


def _measured(
    found: Sequence[ScalingPoint], places: dict[int, float], ys: dict[int, float]
) -> list[Trace]:
    some = [one for one in found if one.tokens_per_second_per_gpu is not None]
    if not some:
        return []
    most = max(one.tokens_per_second_per_gpu or 0.0 for one in some)
    known = [one.mfu for one in some if one.mfu is not None]
    marker = {
        "size": [_size((one.tokens_per_second_per_gpu or 0.0) / most) for one in some],
        "opacity": 0.75,
        "line": {"width": 0.5, "color": "#ffffff"},
    }
    if known:
        marker |= {
            "color": [None if one.mfu is None else round(one.mfu, 4) for one in some],
            "colorscale": SCALE,
            "colorbar": {"title": {"text": "MFU"}, "tickformat": ".0%", "thickness": 12},
        }
    return [_trace(some, places, ys, "measured", marker)]


def _size(share: float) -> float:
    return round(SMALLEST + (LARGEST - SMALLEST) * share, 1)


def _others(
    found: Sequence[ScalingPoint], places: dict[int, float], ys: dict[int, float]
) -> list[Trace]:
    traces = []
    for state, (name, symbol, color) in _WITHOUT_SPEED.items():
        some = [
            one for one in found if one.state is state and one.tokens_per_second_per_gpu is None
        ]
        if some:
            marker = {"symbol": symbol, "size": 8, "line": {"width": 1.5, "color": color}}
            traces.append(_trace(some, places, ys, name, {**marker, "color": color}))
    return traces


def _trace(
    some: Sequence[ScalingPoint],
    places: dict[int, float],
    ys: dict[int, float],
    name: str,
    marker: dict[str, object],
) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{name} ({len(some):,})",
        "x": [places[one.trial_id] for one in some],
        "y": [ys[one.trial_id] for one in some],
        "customdata": [one.trial_id for one in some],
        "hovertemplate": HOVER_TRIAL,
        "marker": marker,
    }


def _limits(sweeps: Iterable[SweepRows]) -> list[int]:
    """The memory of the devices that trials ran on."""
    known = {
        one.trial.device_memory_bytes
        for sweep in sweeps
        for one in sweep.trials
        if one.trial.device_memory_bytes is not None
    }
    # Devices of one kind differ by what their driver keeps; more than a few lines say nothing.
    return sorted(known) if len(known) <= 3 else [max(known)]
