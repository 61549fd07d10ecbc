"""Failed attempts by kind and by node: is one node faulty, or one layout wrong?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import (
    COLORS,
    Picture,
    PictureAxis,
    Trace,
    figure,
    marked_up,
)
from orchestrator.report.sweep_rows import SweepRows

UNKNOWN_NODE = "unknown node"
MOST_NODES = 30
# Attempts that are named when somebody points at a bar; its trials are listed with the picture.
MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed, with the node of its first bad rank."""

    trial_id: int
    attempt: int
    kind: FailureKind
    node: str
    # The first bad one; None: none is known.
    rank: int | None
    layout: str

    @property
    def text(self) -> str:
        """The attempt in one line."""
        rank = "no rank known" if self.rank is None else f"first bad rank {self.rank}"
        return f"trial {self.trial_id}, attempt {self.attempt}: {rank}, {self.layout}"


def failed_attempts(sweeps: Sequence[SweepRows]) -> tuple[FailedAttempt, ...]:
    """Return every attempt that failed, out of memory included, in the order of trials."""
    return tuple(
        FailedAttempt(
            trial_id=one.trial.id,
            attempt=attempt.number,
            kind=attempt.failure.kind,
            node=attempt.failure.node or next(iter(attempt.nodes or ()), UNKNOWN_NODE),
            rank=attempt.failure.rank,
            layout=one.trial.layout.short,
        )
        for sweep in sweeps
        for one, attempt in sweep.attempts()
        if attempt.failure is not None
    )


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a bar for each node, and its failures stacked by kind."""
    found = failed_attempts(sweeps)
    num_attempts = sum(1 for sweep in sweeps for _ in sweep.attempts())
    blank = Picture(
        name="failures",
        title="Failures by kind and node",
        question="Is a node faulty, or a layout wrong?",
    )
    if not found:
        why = f"None of {show.counted(num_attempts, 'attempt')} failed: there is nothing to show."
        return replace(blank, why_empty=why)
    by_node = Counter(one.node for one in found)
    nodes = [node for node, _ in by_node.most_common(MOST_NODES)]
    kinds = [kind for kind, _ in Counter(one.kind for one in found).most_common()]
    bars: dict[FailureKind, dict[str, list[FailedAttempt]]] = {}
    for one in found:
        bars.setdefault(one.kind, {}).setdefault(one.node, []).append(one)
    traces = [
        _bars(kind, {node: bars[kind][node] for node in nodes if node in bars[kind]})
        | {"marker": {"color": COLORS[number % len(COLORS)]}}
        for number, kind in enumerate(kinds)
    ]
    means = "; ".join(f"{kind.value}: {POLICIES[kind].means}" for kind in kinds[:3])
    caption = (
        f"{show.counted(len(found), 'failed attempt')} of {num_attempts:,}, on"
        f" {show.counted(len(by_node), 'node')}. {means}."
    )
    if len(by_node) > len(nodes):
        caption += f" Shown are the {len(nodes)} nodes with most failures."
    return replace(
        blank,
        caption=caption,
        figure=figure(
            traces,
            x=PictureAxis(title="failed attempts", from_zero=True),
            y=PictureAxis(title="", names=list(reversed(nodes))),
            height=160 + 26 * len(nodes),
            barmode="stack",
        ),
    )


def _bars(kind: FailureKind, by_node: Mapping[str, Sequence[FailedAttempt]]) -> Trace:
    """The failures of one kind, a bar for each node, which leads to its trials."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind.value,
        "x": [len(some) for some in by_node.values()],
        "y": list(by_node),
        "customdata": [
            list(dict.fromkeys(one.trial_id for one in some)) for some in by_node.values()
        ],
        "text": [_hover(kind, node, some) for node, some in by_node.items()],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover(kind: FailureKind, node: str, some: Sequence[FailedAttempt]) -> str:
    lines = [f"{node}: {len(some):,} × {kind.value}", *(one.text for one in some[:MOST_NAMED])]
    if len(some) > MOST_NAMED:
        lines.append(f"and {len(some) - MOST_NAMED:,} more")
    return "<br>".join(map(marked_up, lines))
