"""Slices: how fast layouts with each value of an axis are, as a box for each value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.report import quantities as show
from orchestrator.report.pictures.axis_values import (
    MeasuredLayout,
    drift_note,
    measured_layouts,
    varying,
)
from orchestrator.report.pictures.importance import TOO_FEW, importances
from orchestrator.report.pictures.picture import (
    COLORS,
    HOVER_TRIAL,
    Picture,
    PictureAxis,
    Trace,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

MOST_AXES, MOST_VALUES = 6, 10
# More points of an axis hide its boxes.
MOST_POINTS = 300


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The measured layouts with one value of an axis."""

    axis: str
    value: str
    layouts: Sequence[MeasuredLayout]

    @property
    def label(self) -> str:
        """The text below its box."""
        return f"{self.axis} {self.value}"


def slices(sweeps: Sequence[SweepRows]) -> tuple[tuple[Slice, ...], ...]:
    """Return the slices of each axis that varies, in order of value, the most important axis first.

    Of an axis with very many values these are the values with most layouts.
    """
    found = measured_layouts(sweeps)
    values = varying(found)
    return tuple(
        _of_axis(one.axis, values[one.axis], found) for one in importances(sweeps)[:MOST_AXES]
    )


def _of_axis(
    axis: str, values: Sequence[str], found: Sequence[MeasuredLayout]
) -> tuple[Slice, ...]:
    made = [
        Slice(
            axis=axis,
            value=value,
            layouts=[one for one in found if one.values.get(axis) == value],
        )
        for value in values
    ]
    most = sorted(made, key=lambda one: -len(one.layouts))[:MOST_VALUES]
    return tuple(one for one in made if one in most)


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a box for each value of the axes that matter most."""
    found = slices(sweeps)
    blank = Picture(
        name="slices",
        title="Speed by the value of each axis",
        question="What does another value cost?",
    )
    if not found:
        return replace(
            blank,
            why_empty=TOO_FEW,
        )
    labels = [one.label for axis in found for one in axis]
    traces = [_trace(axis, COLORS[number % len(COLORS)]) for number, axis in enumerate(found)]
    num_axes = len(importances(sweeps))
    caption = (
        f"Of {show.counted(len(measured_layouts(sweeps)), 'layout')}, relative to the fastest of"
        " its cell. A box holds the middle half of the layouts with that value, its line their"
        " median. The most important axis comes first. A value whose box is low may still"
        " be in the best layout: boxes mix all values of the other axes."
    )
    if num_axes > len(found):
        caption += f" Shown are {len(found)} of {num_axes} axes."
    caption += drift_note(sweeps)
    return replace(
        blank,
        caption=caption,
        figure=figure(
            traces,
            x=PictureAxis(title="", names=labels),
            y=PictureAxis(title="tokens/s/GPU, relative to the cell's best", range=(0.0, 1.05)),
            showlegend=False,
        ),
    )


def _trace(axis: Sequence[Slice], color: str) -> Trace:
    layouts = [(one.label, layout) for one in axis for layout in one.layouts]
    trace: Trace = {
        "type": "box",
        "name": axis[0].axis,
        "x": [label for label, _ in layouts],
        "y": [round(layout.relative_speed, 4) for _, layout in layouts],
        "boxpoints": False,
        "marker": {"color": color, "size": 4, "opacity": 0.6},
        "line": {"color": color, "width": 1.5},
    }
    if len(layouts) <= MOST_POINTS:
        trace |= {"boxpoints": "all", "jitter": 0.5, "pointpos": 0, "hovertemplate": HOVER_TRIAL}
        trace["customdata"] = [layout.trial_id for _, layout in layouts]
    return trace
