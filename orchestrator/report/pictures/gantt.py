"""The cluster over time: each attempt on each of its nodes, and where GPU-seconds went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Self

from orchestrator.core.trial.reserved_time import Outcome, ReservedGpuSeconds
from orchestrator.report import quantities as show
from orchestrator.report.pictures.attempt_times import AttemptSpan, spans
from orchestrator.report.pictures.picture import (
    BLUE,
    GREY,
    HOVER_TRIAL,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Picture,
    PictureAxis,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

MOST_NODES = 64
# A browser draws this many bars in a second. Bars closer together than a share of the time are one.
MOST_BARS = 4_000
RESOLUTION = 400
UNKNOWN_NODE = "unknown node"
_COLORS = {
    Outcome.COUNTS: ("measured", BLUE),
    Outcome.OUT_OF_MEMORY: ("out of memory", ORANGE),
    Outcome.FAILED: (show.part_name("failed"), VERMILION),
    Outcome.LOST: ("lost", PURPLE),
    Outcome.CANCELLED: ("cancelled", GREY),
}
PART_COLORS = {
    "useful": BLUE,
    "warmup": SKY,
    "startup": "#B7D5EA",
    "profile": "#44AA99",
    "failed": VERMILION,
    "out_of_memory": ORANGE,
    "lost": PURPLE,
    "cancelled": "#BBBBBB",
    "under_way": "#F0E442",
    "idle": GREY,
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """An attempt on one of its nodes, in seconds since 1970."""

    node: str
    span: AttemptSpan


def bars(sweeps: Sequence[SweepRows]) -> tuple[Bar, ...]:
    """Return a bar for each attempt that ended, and each of its nodes."""
    return tuple(
        Bar(node=node, span=span)
        for sweep in sweeps
        if not is_replay(sweep)
        for span in spans(sweep)
        if span.has_ended
        for node in span.nodes or (UNKNOWN_NODE,)
    )


def is_replay(sweep: SweepRows) -> bool:
    """True if its attempts only looked up a table, at no time of a cluster."""
    return sweep.sweep.conditions.get("workload") == "replay"


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a row for each node, and a bar for each attempt."""
    found = bars(sweeps)
    blank = Picture(
        name="gantt",
        title="The cluster over time",
        question="Who used the cluster, and when was it idle?",
    )
    if not found:
        why = "No attempt has ended yet; `sweep run` starts some."
        if sweeps and all(map(is_replay, sweeps)):
            why = (
                "A replay has no time of a cluster: each attempt was looked up in a table."
                " `sweep run` measures on a cluster, and `sweep run --simulate` pretends to."
            )
        return replace(blank, why_empty=why)
    merged = (
        _merged(found)
        if len(found) > MOST_BARS
        else [_Drawn.of(bar, bar.span.end) for bar in found]
    )
    nodes, shown = _nodes(merged)
    traces = []
    for outcome, (name, color) in _COLORS.items():
        some = [bar for bar in merged if bar.outcome is outcome and bar.node in shown]
        if some:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "y": [bar.node for bar in some],
                    "base": [_at(bar.start) for bar in some],
                    "x": [round(1000 * (bar.end - bar.start), 3) for bar in some],
                    "customdata": [bar.trial_id for bar in some],
                    "hovertemplate": HOVER_TRIAL,
                    "marker": {"color": color, "line": {"width": 0.5, "color": "#ffffff"}},
                }
            )
    caption = _caption(found, len(nodes))
    if len(merged) < len(found):
        caption += (
            " A bar is several attempts of one kind that follow each other closely; it leads to"
            " the first of them."
        )
    if len(nodes) > len(shown):
        caption += f" Shown are {len(shown)} of {len(nodes):,} nodes."
    made = figure(
        traces,
        x=PictureAxis(title="time (UTC)"),
        y=PictureAxis(title="", names=list(reversed(shown))),
        height=170 + 24 * len(shown),
        barmode="overlay",
    )
    made["layout"]["xaxis"]["type"] = "date"
    return replace(blank, caption=caption, figure=made)


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A bar of the figure: one attempt, or several that follow each other closely."""

    node: str
    outcome: Outcome | None
    start: float
    end: float
    trial_id: int

    @classmethod
    def of(cls, bar: Bar, end: float) -> Self:
        """Return a bar, or several of which it is the first, until `end`."""
        span = bar.span
        return cls(
            node=bar.node,
            outcome=span.outcome,
            start=span.start,
            end=end,
            trial_id=span.trial_id,
        )


def _merged(found: Sequence[Bar]) -> list[_Drawn]:
    """Join bars of one node and outcome with a gap too small to be seen between them."""
    first, last = min(bar.span.start for bar in found), max(bar.span.end for bar in found)
    gap = (last - first) / RESOLUTION
    # The first bar of those that are joined, and the end of all.
    joined: dict[tuple[str, Outcome | None], tuple[Bar, float]] = {}
    merged: list[_Drawn] = []
    for bar in sorted(found, key=lambda it: it.span.start):
        key, span = (bar.node, bar.span.outcome), bar.span
        before = joined.get(key)
        if before is None:
            joined[key] = bar, span.end
        elif span.start - before[1] <= gap:
            joined[key] = before[0], max(before[1], span.end)
        else:
            merged.append(_Drawn.of(*before))
            joined[key] = bar, span.end
    return [*merged, *(_Drawn.of(*each) for each in joined.values())]


def _nodes(drawn: Sequence[_Drawn]) -> tuple[list[str], list[str]]:
    """Return all nodes in order, and the first of them that have few enough bars together."""
    counts = Counter(bar.node for bar in drawn)
    nodes = sorted(counts, key=_natural)
    total = 0
    shown: list[str] = []
    for node in nodes[:MOST_NODES]:
        total += counts[node]
        if shown and total > MOST_BARS:
            break
        shown.append(node)
    return nodes, shown


def _natural(node: str) -> tuple[int, str]:
    return len(node), node


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _caption(found: Sequence[Bar], num_nodes: int) -> str:
    seconds = sum(bar.span.end - bar.span.start for bar in found)
    return (
        f"{show.counted(len(found), 'bar')} on {show.counted(num_nodes, 'node')}:"
        f" attempts reserved nodes for {show.duration(seconds)} in all. A gap is a time without an"
        " attempt of this report."
    )


def parts(sweeps: Sequence[SweepRows]) -> tuple[ReservedGpuSeconds, float | None]:
    """Return the reserved GPU-seconds by use, and those of the cluster that were not reserved.

    Both together are the GPU-seconds of the whole cluster; None: its size is not known.
    """
    total = sum((sweep.reserved.total for sweep in sweeps), start=ReservedGpuSeconds())
    known = [sweep.reserved.capacity for sweep in sweeps]
    if not known or any(one is None for one in known):
        return total, None
    return total, max(sum(one or 0.0 for one in known) - total.reserved, 0.0)


def gpu_seconds(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw where the GPU-seconds went: one bar, its parts stacked."""
    total, unreserved = parts(sweeps)
    blank = Picture(
        name="gpu-seconds",
        title="Where the GPU-hours went",
        question="What did the sweep pay for?",
    )
    if not total.reserved:
        return replace(blank, why_empty="No GPU time is reserved yet; `sweep run` reserves it.")
    values = {name: value for name, value in total.parts.items() if value}
    if unreserved:
        values["not reserved"] = unreserved
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": show.part_name(name),
            "x": [value / 3600],
            "y": ["GPU-hours"],
            "hovertemplate": f"{show.gpu_hours(value)} GPU-hours"
            f"<extra>{show.part_name(name)}</extra>",
            "marker": {"color": PART_COLORS.get(name, "#DDDDDD")},
        }
        for name, value in values.items()
    ]
    caption = f"{show.gpu_hours(total.reserved)} GPU-hours reserved: {show.shares(total.parts)}."
    if unreserved is not None:
        caption += f" {show.gpu_hours(unreserved)} GPU-hours of the cluster were not reserved."
    made = figure(
        traces,
        x=PictureAxis(title="GPU-hours", from_zero=True),
        y=PictureAxis(title="", names=["GPU-hours"]),
        height=220,
        barmode="stack",
    )
    made["layout"]["yaxis"]["showticklabels"] = False
    return replace(blank, caption=caption, figure=made)
