"""The groups of ranks of a collective, and the seconds of a ring over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Bytes per second of the links inside a node and of a card between nodes.

    `congestion`: how much each doubling of the nodes slows the links between them.
    """

    inside: float
    across: float
    congestion: float

    @classmethod
    def of(cls, hardware: Hardware, c: StepTimeConstants) -> LinkRates:
        return cls(
            inside=hardware.intra_node_bandwidth * c.intra_node_share,
            across=hardware.inter_node_bandwidth * c.inter_node_share,
            congestion=c.node_congestion,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveGroup:
    """The groups of a collective: their size, and how many members share a node and its cards."""

    size: Floats
    members_per_node: Floats
    crosses: Mask

    @classmethod
    def of(cls, size: Ints, stride: Ints, gpus_per_node: int) -> CollectiveGroup:
        """Return groups of `size` ranks, of which each is `stride` after the one before."""
        members = np.clip(gpus_per_node // np.maximum(stride, 1), 1, size)
        return cls(
            size=size.astype(np.float64),
            members_per_node=members.astype(np.float64),
            crosses=np.asarray(size * stride > gpus_per_node),
        )

    def bandwidth(self, links: LinkRates) -> Floats:
        """Bytes per second of a ring: each member of a node brings a network card.

        No faster than the links inside.
        """
        slowed = links.across / (
            links.congestion * np.log2(np.maximum(self.size / self.members_per_node, 1.0)) + 1.0
        )
        slowed *= self.members_per_node
        found: Floats = np.where(self.crosses, np.minimum(slowed, links.inside), links.inside)
        return found

    def link(self, links: LinkRates) -> Floats:
        """Bytes per second between neighbours of a ring, over one card: the slowest link counts."""
        alone = replace(
            self, members_per_node=np.ones_like(self.size), size=self.size / self.members_per_node
        )
        return alone.bandwidth(links)

    def latency(self, c: StepTimeConstants) -> Floats:
        """Seconds of one pass beyond its bytes."""
        one = np.where(self.crosses, c.inter_node_collective_seconds, c.collective_seconds)
        found: Floats = np.where(
            self.size > 1, np.log2(np.maximum(self.size, 2.0)) * one / 3.0, 0.0
        )
        return found


def ring_seconds(
    *,
    num_ranks: Floats,
    num_nodes: Floats,
    num_bytes: Floats,
    hardware: Hardware,
    constants: StepTimeConstants,
) -> Floats:
    """Return the seconds of one pass of a ring over a message, by links and latencies.

    All arrays have one entry per message. Each link takes (n - 1) / n of its bytes. Ranks are
    spread evenly over nodes.
    """
    group = CollectiveGroup(
        size=num_ranks, members_per_node=num_ranks / num_nodes, crosses=num_nodes > 1
    )
    through = num_bytes * (num_ranks - 1) / num_ranks
    found: Floats = through / group.bandwidth(LinkRates.of(hardware, constants))
    return found + group.latency(constants)
