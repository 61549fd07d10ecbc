"""The cluster over time: each attempt on each of its nodes, and where GPU-seconds went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

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
    Axis,
    Picture,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

MOST_NODES = 64
UNKNOWN_NODE = "unknown node"
_COLORS = {
    Outcome.COUNTS: ("measured", BLUE),
    Outcome.OUT_OF_MEMORY: ("out of memory", ORANGE),
    Outcome.FAILED: ("failed, or does not count", VERMILION),
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
    nodes = list(dict.fromkeys(sorted((bar.node for bar in found), key=_natural)))
    shown = set(nodes[:MOST_NODES])
    traces = []
    for outcome, (name, color) in _COLORS.items():
        some = [bar for bar in found if bar.span.outcome is outcome and bar.node in shown]
        if some:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "y": [bar.node for bar in some],
                    "base": [_at(bar.span.start) for bar in some],
                    "x": [round(1000 * (bar.span.end - bar.span.start), 3) for bar in some],
                    "customdata": [bar.span.trial_id for bar in some],
                    "hovertemplate": HOVER_TRIAL,
                    "marker": {"color": color, "line": {"width": 0.5, "color": "#ffffff"}},
                }
            )
    caption = _caption(sweeps, found, len(nodes))
    if len(nodes) > MOST_NODES:
        caption += f" Shown are {MOST_NODES} of {len(nodes):,} nodes."
    made = figure(
        traces,
        x=Axis(title="time (UTC)"),
        y=Axis(title="", names=[node for node in reversed(nodes) if node in shown]),
        height=170 + 24 * min(len(nodes), MOST_NODES),
        barmode="overlay",
    )
    made["layout"]["xaxis"]["type"] = "date"
    return replace(blank, caption=caption, figure=made)


def _natural(node: str) -> tuple[int, str]:
    return len(node), node


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _caption(sweeps: Sequence[SweepRows], found: Sequence[Bar], num_nodes: int) -> str:
    seconds = sum(bar.span.end - bar.span.start for bar in found)
    return (
        f"{show.counted(len(found), 'bar')} on {show.counted(num_nodes, 'node')}:"
        f" attempts held nodes for {show.duration(seconds)} in all. A gap is a time without an"
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
            "name": name.replace("_", " "),
            "x": [value / 3600],
            "y": ["GPU-hours"],
            "hovertemplate": f"%{{x:.3f}} GPU-hours<extra>{name.replace('_', ' ')}</extra>",
            "marker": {"color": PART_COLORS.get(name, "#DDDDDD")},
        }
        for name, value in values.items()
    ]
    caption = f"{show.gpu_hours(total.reserved)} GPU-hours reserved: {show.shares(total.parts)}."
    if unreserved is not None:
        caption += f" {show.gpu_hours(unreserved)} GPU-hours of the cluster were not reserved."
    made = figure(
        traces,
        x=Axis(title="GPU-hours", from_zero=True),
        y=Axis(title="", names=["GPU-hours"]),
        height=220,
        barmode="stack",
    )
    made["layout"]["yaxis"]["showticklabels"] = False
    return replace(blank, caption=caption, figure=made)
