"""One measured collective, and which bandwidth it shows.

Bandwidths are those of NCCL's tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the
algorithm's is bytes over seconds; the bus's is that times a factor that makes numbers of ranks
comparable, and shows what the links do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Collective(StrEnum):
    """The collectives that are timed over links."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    SEND_RECV = "send_recv"


# Ring passes over the message: (n - 1) / n of its bytes through each link. All-reduce scatters,
# then gathers.
PASSES: Mapping[Collective, float] = MappingProxyType(
    {Collective.ALL_REDUCE: 2.0, Collective.ALL_GATHER: 1.0, Collective.REDUCE_SCATTER: 1.0}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The members of a collective: a number of ranks, spread evenly over a number of nodes."""

    num_ranks: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSample:
    """One collective at one message size.

    The message of an all-gather is all that is gathered, of a reduce-scatter all that is reduced.
    """

    collective: Collective
    span: Span
    message_bytes: int
    seconds: float  # of one call: the median

    @property
    def algorithm_bytes_per_second(self) -> float:
        """Bytes of the message over seconds."""
        return self.message_bytes / self.seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """Bytes per second through each link of a ring, whatever the number of ranks."""
        return self.algorithm_bytes_per_second * bus_factor(self.collective, self.span.num_ranks)


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Return the bytes through each link of a ring, per byte of the message.

    From NCCL's tests, doc/PERFORMANCE.md.
    """
    if collective is Collective.SEND_RECV:
        return 1.0
    return PASSES[collective] * (num_ranks - 1) / num_ranks
