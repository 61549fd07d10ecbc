"""Failed attempts by kind and by node: is one node sick, or one layout wrong?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import COLORS, Picture, PictureAxis, figure
from orchestrator.report.sweep_rows import SweepRows

UNKNOWN_NODE = "unknown node"
MOST_NODES = 30


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed, with the node of its first bad rank."""

    trial_id: int
    attempt: int
    kind: FailureKind
    node: str


def failed_attempts(sweeps: Sequence[SweepRows]) -> tuple[FailedAttempt, ...]:
    """Return every attempt that failed, out of memory included, in the order of trials."""
    return tuple(
        FailedAttempt(
            trial_id=one.trial.id,
            attempt=attempt.number,
            kind=attempt.failure.kind,
            node=attempt.failure.node or next(iter(attempt.nodes or ()), UNKNOWN_NODE),
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
        question="Is a node sick?",
    )
    if not found:
        why = f"None of {show.counted(num_attempts, 'attempt')} failed: there is nothing to show."
        return replace(blank, why_empty=why)
    by_node = Counter(one.node for one in found)
    nodes = [node for node, _ in by_node.most_common(MOST_NODES)]
    kinds = [kind for kind, _ in Counter(one.kind for one in found).most_common()]
    counts = Counter((one.kind, one.node) for one in found)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind.value,
            "x": [counts[kind, node] for node in nodes if counts[kind, node]],
            "y": [node for node in nodes if counts[kind, node]],
            "hovertemplate": f"%{{y}}: %{{x}}<extra>{kind.value}</extra>",
            "marker": {"color": COLORS[number % len(COLORS)]},
        }
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
