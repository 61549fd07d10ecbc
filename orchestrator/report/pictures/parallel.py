"""Parallel coordinates: a line for each layout through its values, coloured by its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.report import quantities as show
from orchestrator.report.pictures.axis_values import (
    MeasuredLayout,
    drift_note,
    measured_layouts,
    varying,
)
from orchestrator.report.pictures.picture import Picture, PictureAxis, Trace, figure, marked_up
from orchestrator.report.sweep_rows import SweepRows

# From slow to fast: parts of Viridis, with the lower ends of their relative speeds.
BANDS = ((0.0, "#440154"), (0.5, "#3B528B"), (0.7, "#21918C"), (0.85, "#5EC962"), (0.95, "#D9C400"))
SPEED = "speed"


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw an axis for each name that varies, and one for the relative speed."""
    found = measured_layouts(sweeps)
    blank = Picture(
        name="parallel",
        title="Layouts by all of their axes",
        question="Which settings always win?",
    )
    axes = varying(found)
    if len(found) < 2 or not axes:
        return replace(
            blank,
            why_empty="It takes two measured layouts that differ; `sweep run` measures more.",
        )
    names = [*axes, SPEED]
    traces = []
    ends = [low for low, _ in BANDS[1:]] + [2.0]
    for (low, color), high in zip(BANDS, ends, strict=True):
        some = [one for one in found if low <= one.relative_speed < high]
        if some:
            traces.append(_trace(some, axes, low, high, color))
    made = figure(
        traces,
        x=PictureAxis(title="", ticks=list(range(len(names))), texts=names),
        y=PictureAxis(title="relative speed", range=(-0.05, 1.05)),
        height=440,
        annotations=_labels(axes),
        shapes=[_axis_line(place) for place in range(len(names))],
    )
    made["layout"]["meta"] = {"axes": axes}
    made["layout"]["yaxis"] |= {"side": "right", "tickformat": ".0%", "showgrid": False}
    made["layout"]["xaxis"] |= {
        "showgrid": False,
        "zeroline": False,
        "range": [-0.4, len(names) - 0.95],
    }
    return replace(
        blank,
        caption=f"{show.counted(len(found), 'layout')}; speed is relative to the best of the cell."
        " Axes with one value are left out. A click on a band of the legend hides it."
        + drift_note(sweeps),
        figure=made,
    )


def _labels(axes: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the values of each axis as plotly's annotations."""
    return [
        {
            "x": place,
            "y": height,
            # An option may have any text.
            "text": marked_up(value),
            "showarrow": False,
            "xanchor": "right",
            "xshift": -6,
            "font": {"size": 11},
        }
        for place, name in enumerate(axes)
        for value, height in heights(axes[name]).items()
    ]


def _axis_line(place: int) -> dict[str, Any]:
    """Return the line of an axis as one of plotly's shapes."""
    return {
        "type": "line",
        "x0": place,
        "x1": place,
        "y0": 0,
        "y1": 1,
        "line": {"width": 1, "color": "#8A8F98"},
    }


def heights(values: Sequence[str]) -> dict[str, float]:
    """Return where each value is on its axis, from 0 to 1."""
    return {value: number / (len(values) - 1) for number, value in enumerate(values)}


def _trace(
    some: Sequence[MeasuredLayout],
    axes: dict[str, list[str]],
    low: float,
    high: float,
    color: str,
) -> Trace:
    places = {name: heights(values) for name, values in axes.items()}
    xs: list[float | None] = []
    ys: list[float | None] = []
    for one in some:
        # An option that only some layouts have leaves a gap.
        heights_of = [places[name].get(one.values.get(name, "")) for name in axes]
        xs += [*range(len(axes) + 1), None]
        ys += [*heights_of, one.relative_speed, None]
    name = f"{low:.0%} to {high:.0%}" if high <= 1 else f"{low:.0%} and more"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name} ({len(some):,})",
        "x": xs,
        "y": ys,
        "hoverinfo": "skip",
        # For the filter of the page: the layout of each line.
        "meta": {
            "ids": [one.trial_id for one in some],
            "values": [[one.values.get(name, "") for name in axes] for one in some],
        },
        "line": {"color": color, "width": 1 if len(some) > 50 else 1.5},
        "opacity": 0.8 if low >= 0.85 else 0.45,
    }
