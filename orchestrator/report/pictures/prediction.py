"""Predicted against measured: speed and memory of every measured trial, with the error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean, median
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import (
    BLUE,
    GIB,
    GREY,
    HOVER_TRIAL,
    ORANGE,
    Picture,
    PictureAxis,
    Trace,
    log_ticks,
)
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import TrialRow

# Between the two halves, as a share of the width.
GAP = 0.12


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One quantity of a trial, as it was predicted before the trial, and as it was measured."""

    trial_id: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, of the prediction."""
        return self.predicted / self.measured - 1


def speeds(sweeps: Iterable[SweepRows]) -> tuple[Pair, ...]:
    """Return the tokens/s/GPU of each measured trial that had a prediction."""
    return tuple(
        Pair(trial_id=it.id, predicted=it.predicted_tokens_per_second_per_gpu, measured=speed)
        for it in _measured(sweeps)
        if it.predicted_tokens_per_second_per_gpu is not None
        and (speed := it.tokens_per_second_per_gpu)
        and it.is_comparable
    )


def memories(sweeps: Iterable[SweepRows]) -> tuple[Pair, ...]:
    """Return the allocated memory in bytes of each measured trial that had a prediction."""
    return tuple(
        Pair(trial_id=it.id, predicted=it.predicted_memory_bytes, measured=peak)
        for it in _measured(sweeps)
        if it.predicted_memory_bytes is not None and (peak := it.peak_memory_allocated_bytes)
    )


def _measured(sweeps: Iterable[SweepRows]) -> Iterator[TrialRow]:
    return (
        one.trial
        for sweep in sweeps
        for one in sweep.trials
        if one.trial.state is TrialState.MEASURED
    )


def mean_error(pairs: Sequence[Pair]) -> float:
    """The mean absolute relative error (MAPE), 0 to 1."""
    return fmean(abs(one.error) for one in pairs)


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw both quantities, each with the line on which predictions are right."""
    of_speed, of_memory = speeds(sweeps), memories(sweeps)
    blank = Picture(
        name="prediction",
        title="Predicted against measured",
        question="Can I trust the estimator?",
    )
    if not of_speed and not of_memory:
        return replace(
            blank,
            why_empty="No measured trial had a prediction: the device is unknown. Name it in the"
            " sweep file (device: h100-sxm), or let the first trials measure its peak.",
        )
    traces: list[Trace] = []
    layout: dict[str, dict[str, object]] = {}
    halves = [
        (of_speed, "speed", 1.0, "tokens/s/GPU", BLUE),
        (of_memory, "memory", GIB, "GiB", ORANGE),
    ]
    shown = [half for half in halves if half[0]]
    for number, (pairs, name, unit, title, color) in enumerate(shown):
        suffix = "" if number == 0 else str(number + 1)
        traces += _half(pairs, name, unit, color, suffix)
        share = (1 - GAP * (len(shown) - 1)) / len(shown)
        start = number * (share + GAP)
        values = [value / unit for one in pairs for value in (one.predicted, one.measured)]
        ticks = log_ticks(values)
        for letter, other, kind in (("x", "y", "measured"), ("y", "x", "predicted")):
            axis = PictureAxis(title=f"{kind} {name} ({title})", is_log=True, **ticks)
            layout[f"{letter}axis{suffix}"] = axis.layout() | {"anchor": f"{other}{suffix}"}
        layout[f"xaxis{suffix}"]["domain"] = [start, min(start + share, 1.0)]
    captions = [_caption(pairs, name) for pairs, name, *_ in shown]
    return replace(
        blank,
        caption=" ".join(captions),
        figure={"data": traces, "layout": {**layout, "height": 420}},
    )


def _half(pairs: Sequence[Pair], name: str, unit: float, color: str, suffix: str) -> list[Trace]:
    values = [value / unit for one in pairs for value in (one.predicted, one.measured)]
    ends = [min(values), max(values)]
    axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "predicted = measured",
            "showlegend": False,
            "x": ends,
            "y": ends,
            "hoverinfo": "skip",
            "line": {"color": GREY, "dash": "dash", "width": 1},
            **axes,
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [one.measured / unit for one in pairs],
            "y": [one.predicted / unit for one in pairs],
            "customdata": [one.trial_id for one in pairs],
            "hovertemplate": HOVER_TRIAL,
            "marker": {"color": color, "size": 7, "opacity": 0.7},
            **axes,
        },
    ]


def _caption(pairs: Sequence[Pair], name: str) -> str:
    ratio = exp(median(log(one.predicted / one.measured) for one in pairs))
    return (
        f"{name.capitalize()} of {show.counted(len(pairs), 'trial')}: mean absolute error"
        f" {show.percent(mean_error(pairs))}, predicted/measured {ratio:.2f} in the median."
    )
