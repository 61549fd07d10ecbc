"""The importance of each axis: the share of the differences in speed that it explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from orchestrator.report import quantities as show
from orchestrator.report.pictures.axis_values import (
    MeasuredLayout,
    drift_note,
    measured_layouts,
    varying,
)
from orchestrator.report.pictures.picture import BLUE, Picture, PictureAxis, figure, marked_up
from orchestrator.report.sweep_rows import SweepRows

FEWEST = 4  # layouts
TOO_FEW = (
    f"It takes {FEWEST} measured layouts of different speed; `sweep run` with a larger"
    " search.max_trials measures more."
)


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The share of the variance of log speed that lies between the values of an axis.

    It is corrected for the number of values (epsilon squared), so that chance gives 0.
    """

    axis: str
    share: float
    # The value whose layouts are fastest in the mean; None: values of several cells mean different
    # things.
    best_value: str | None


def importances(sweeps: Sequence[SweepRows]) -> tuple[Importance, ...]:
    """Return the importance of each axis that varies, the largest first."""
    found = measured_layouts(sweeps)
    if len(found) < FEWEST:
        return ()
    logs = _within_cells(found)
    total = sum(value**2 for value in logs.values())
    if not total:
        return ()
    shares = []
    num_cells = len({one.cell_id for one in found})
    for axis in varying(found):
        if axis == "GPUs":
            # The speeds are relative within a number of GPUs.
            continue
        groups: defaultdict[str, list[float]] = defaultdict(list)
        for one in found:
            groups[one.values.get(axis, "-")].append(logs[one.trial_id])
        shares.append(
            Importance(
                axis=axis,
                share=between(groups.values(), total),
                best_value=_fastest(groups) if num_cells == 1 else None,
            )
        )
    return tuple(sorted(shares, key=lambda one: (-one.share, one.axis)))


def _fastest(groups: Mapping[str, Sequence[float]]) -> str:
    return max(groups, key=lambda value: fmean(groups[value]))


def _within_cells(found: Sequence[MeasuredLayout]) -> dict[int, float]:
    """Return the logarithm of each speed, less the mean of its cell."""
    cells: defaultdict[int, list[float]] = defaultdict(list)
    for one in found:
        cells[one.cell_id].append(log(one.relative_speed))
    means = {cell_id: fmean(some) for cell_id, some in cells.items()}
    return {one.trial_id: log(one.relative_speed) - means[one.cell_id] for one in found}


def between(groups: Collection[Sequence[float]], total: float) -> float:
    """Return the share of `total` that lies between groups, less what chance would give."""
    num = sum(map(len, groups))
    between = sum(len(some) * fmean(some) ** 2 for some in groups)
    freedom = len(groups) - 1
    if num <= len(groups):
        # Each value has one layout: nothing tells its effect from chance.
        return 0.0
    by_chance = freedom * (total - between) / (num - len(groups))
    return max(between - by_chance, 0.0) / total


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a bar for each axis."""
    found = importances(sweeps)
    blank = Picture(
        name="importance",
        title="Importance of each axis",
        question="What should I set right first?",
    )
    if not found:
        return replace(
            blank,
            why_empty=TOO_FEW,
        )
    axes = [one.axis for one in found]
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": "importance",
        "showlegend": False,
        "x": [one.share for one in found],
        "y": axes,
        "text": [_label(one) for one in found],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:.1%}<extra></extra>",
        "marker": {"color": BLUE},
    }
    made = figure(
        [trace],
        x=PictureAxis(title="share of the variance of log speed", range=(0.0, 1.0)),
        y=PictureAxis(title="", names=list(reversed(axes))),
        height=150 + 32 * len(axes),
    )
    made["layout"]["xaxis"]["tickformat"] = ".0%"
    num = len(measured_layouts(sweeps))
    return replace(
        blank,
        caption=f"Of {show.counted(num, 'layout')}, within their cells, corrected for chance. Axes"
        " that depend on each other share what they explain, so the bars need not add up to 100 %."
        + drift_note(sweeps),
        figure=made,
    )


def _label(one: Importance) -> str:
    fastest = "" if one.best_value is None else f", fastest: {marked_up(one.best_value)}"
    return f"{one.share:.0%}{fastest}"
