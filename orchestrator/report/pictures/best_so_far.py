"""The best layout so far against the GPU-hours that were paid, failures included."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.report import quantities as show
from orchestrator.report.pictures.attempt_times import AttemptSpan, spans
from orchestrator.report.pictures.picture import (
    COLORS,
    HOVER_TRIAL,
    Picture,
    PictureAxis,
    Trace,
    figure,
    log_ticks,
)
from orchestrator.report.sweep_rows import SweepRows

MOST_CELLS = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """An attempt that ended, in the order of time. GPU-hours are of its cell, all ends included."""

    trial_id: int
    gpu_hours: float
    # None: it has no measurement that can be ranked.
    tokens_per_second_per_gpu: float | None
    # The best of this attempt and all before it; None: nothing was measured yet.
    best: float | None


@dataclass(frozen=True, kw_only=True)
class History:
    """The attempts of one cell."""

    cell: str
    steps: Sequence[Step]


def histories(sweeps: Sequence[SweepRows]) -> tuple[History, ...]:
    """Return the history of each cell in which an attempt has ended."""
    keys = Counter(status.cell.cell.key for sweep in sweeps for status in sweep.cells)
    found = []
    for sweep in sweeps:
        of_cells = defaultdict(list)
        for one in spans(sweep):
            if one.has_ended:
                of_cells[one.cell_id].append(one)
        for status in sweep.cells:
            ended = of_cells[status.cell.id]
            ended.sort(key=lambda one: (one.end, one.trial_id, one.attempt))
            name = status.cell.cell.key
            if keys[name] > 1:
                name = f"{sweep.name}: {name}"
            if ended:
                found.append(History(cell=name, steps=_steps(ended)))
    return tuple(found)


def _steps(ended: Sequence[AttemptSpan]) -> tuple[Step, ...]:
    steps: list[Step] = []
    seconds, best = 0.0, None
    for one in ended:
        seconds += one.gpu_seconds
        if one.speed is not None:
            best = one.speed if best is None else max(best, one.speed)
        steps.append(
            Step(
                trial_id=one.trial_id,
                gpu_hours=seconds / 3600,
                tokens_per_second_per_gpu=one.speed,
                best=best,
            )
        )
    return tuple(steps)


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a rising line for each cell, its measurements as points, its failures as ticks."""
    found = histories(sweeps)
    blank = Picture(
        name="best-so-far",
        title="Best so far against GPU-hours",
        question="Did the search pay; should it stop?",
    )
    if not found:
        return replace(blank, why_empty="No attempt has ended yet; `sweep run` starts some.")
    shown = sorted(found, key=lambda one: -one.steps[-1].gpu_hours)[:MOST_CELLS]
    shown = [one for one in found if one in shown]
    traces = [
        trace
        for number, one in enumerate(shown)
        for trace in _traces(one, COLORS[number % len(COLORS)])
    ]
    hours = sum(one.steps[-1].gpu_hours for one in found)
    num_ends = sum(len(one.steps) for one in found)
    caption = (
        f"{show.counted(num_ends, 'attempt')} took {show.gpu_hours(hours * 3600)} GPU-hours,"
        " failures included. Speeds are relative to the best of their cell. Ticks at the bottom"
        " are attempts without a measurement."
    )
    if len(found) > len(shown):
        caption += f" Shown are the {len(shown)} of {len(found)} cells that took most GPU-hours."
    return replace(
        blank,
        caption=caption,
        figure=figure(
            traces,
            x=_hours_axis(shown),
            y=PictureAxis(title="tokens/s/GPU, relative to the cell's best", range=(0.0, 1.05)),
        ),
    )


def _hours_axis(found: Sequence[History]) -> PictureAxis:
    """Logarithmic, if the first attempts would else be at the edge."""
    hours = [step.gpu_hours for one in found for step in one.steps]
    title = "GPU-hours paid in the cell"
    if not 0 < min(hours) < max(hours) / 30:
        return PictureAxis(title=title, from_zero=True)
    return PictureAxis(title=title, is_log=True, **log_ticks(hours))


def _traces(history: History, color: str) -> list[Trace]:
    top = history.steps[-1].best
    line = [one for one in history.steps if one.best is not None]
    failed = [one for one in history.steps if one.tokens_per_second_per_gpu is None]
    traces: list[Trace] = []
    if top is not None:
        dots = [one for one in history.steps if one.tokens_per_second_per_gpu is not None]
        traces = [
            {
                "type": "scatter",
                "mode": "lines",
                "name": history.cell,
                "legendgroup": history.cell,
                "x": [one.gpu_hours for one in line],
                "y": [(one.best or 0.0) / top for one in line],
                "line": {"shape": "hv", "color": color, "width": 2},
                "hoverinfo": "skip",
            },
            _marks(dots, [(one.tokens_per_second_per_gpu or 0.0) / top for one in dots], history)
            | {"marker": {"color": color, "size": 5, "opacity": 0.6}},
        ]
    if failed:
        marker = {"symbol": "line-ns", "size": 9, "line": {"width": 1.5, "color": color}}
        traces.append(
            _marks(failed, [0.02] * len(failed), history) | {"marker": {**marker, "color": color}}
        )
        traces[-1]["showlegend"] = not traces[:-1]
    return traces


def _marks(steps: Sequence[Step], heights: Sequence[float], history: History) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": history.cell,
        "legendgroup": history.cell,
        "showlegend": False,
        "x": [one.gpu_hours for one in steps],
        "y": list(heights),
        "customdata": [one.trial_id for one in steps],
        "hovertemplate": HOVER_TRIAL,
    }
