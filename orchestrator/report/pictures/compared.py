"""Two sweeps compared, or two fingerprints of one: which layouts changed by more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.report.comparison import (
    Comparison,
    LayoutDifference,
    SpeedDifference,
    of_fingerprints,
    of_sweeps,
)
from orchestrator.report.pictures.picture import (
    BLUE,
    GREY,
    HOVER_TRIAL,
    VERMILION,
    Picture,
    PictureAxis,
    Trace,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

MOST_SHOWN = 40
_COLORS = {
    SpeedDifference.FASTER: BLUE,
    SpeedDifference.SLOWER: VERMILION,
    SpeedDifference.NOISE: GREY,
}


def comparison(sweeps: Sequence[SweepRows]) -> Comparison | None:
    """Return the comparison of two sweeps, or of the last two fingerprints of one."""
    if len(sweeps) == 2:
        return of_sweeps(*sweeps)
    return of_fingerprints(sweeps[0]) if len(sweeps) == 1 else None


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw the change of each layout with its interval."""
    blank = Picture(
        name="compared",
        title="Compared",
        question="Is the new one faster, or is it noise?",
    )
    found = comparison(sweeps)
    if found is None:
        why = "Everything was measured with one fingerprint of code and software."
        if len(sweeps) > 2:
            why = "This report has more than two sweeps."
        return replace(
            blank,
            why_empty=f"{why} A report of two sweeps compares them: `sweep report A B`, or"
            " `sweep compare A B`.",
        )
    if not found.layouts:
        return replace(blank, why_empty=f"{found.text()} So there is nothing to compare.")
    # Those that changed come first.
    shown = sorted(found.layouts, key=lambda one: (one.change is SpeedDifference.NOISE, one.ratio))
    shown = shown[:MOST_SHOWN]
    labels = [f"trial {one.after.trial_id}" for one in shown]
    traces = [
        _trace([one for one in shown if one.change is kind], kind) for kind in SpeedDifference
    ]
    caption = found.text() + (f" Changed: {found.changed}." if found.changed else "")
    if len(found.layouts) > len(shown):
        caption += f" Shown are {len(shown)}, those that changed first."
    made = figure(
        [trace for trace in traces if trace["x"]],
        x=PictureAxis(title=f"tokens/s/GPU of {found.after} over {found.before}, less 1"),
        y=PictureAxis(title="", names=list(reversed(labels))),
        height=170 + 22 * len(shown),
    )
    made["layout"]["xaxis"]["tickformat"] = "+.1%"
    return replace(blank, caption=caption, figure=made)


def _trace(some: Sequence[LayoutDifference], kind: SpeedDifference) -> Trace:
    ratios = [one.ratio - 1 for one in some]
    highs = [one.after.high / one.before.low - 1 for one in some]
    lows = [one.after.low / one.before.high - 1 for one in some]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{kind.value} ({len(some):,})",
        "x": ratios,
        "y": [f"trial {one.after.trial_id}" for one in some],
        "customdata": [one.after.trial_id for one in some],
        "hovertemplate": HOVER_TRIAL,
        "marker": {"color": _COLORS[kind], "size": 8},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - ratio for high, ratio in zip(highs, ratios, strict=True)],
            "arrayminus": [ratio - low for low, ratio in zip(lows, ratios, strict=True)],
            "color": _COLORS[kind],
            "thickness": 1,
        },
    }
