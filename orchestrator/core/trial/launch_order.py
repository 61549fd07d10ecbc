"""Orders to the launcher of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.trial.protocol import TrialRequest


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """An order to one node's launcher: run its share of a gang, once."""

    request: TrialRequest
    program: str  # module with `main() -> int`: "workloads.llama"
    # Ranks of the gang on this node.
    local_world_size: int
    first_rank: int = 0  # global rank of this node's first
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    # None: the whole gang is on this node, and the launcher binds a port itself.
    master_port: int | None = None
    address: str | None = None  # for the gang's other nodes
    # For CUDA_VISIBLE_DEVICES, physical indices or UUIDs, one per rank.
    devices: Sequence[str] = ()
    cpus: Sequence[int] = ()  # to divide among ranks; empty: unpinned
    # The process that asks for it (processes.global_identity): its CPU time is the sweep's.
    orchestrator: str = ""
    # Ranks that this node can have, other gangs' included; they share the cores if not pinned.
    node_slots: int | None = None
    # Variables of ranks, in addition to those that the launcher sets.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Secret ones: ranks get them, and they are removed from every log, report and message.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def reporting_rank(self) -> int:
        """The rank of the gang whose result has the steps."""
        return self.request.reporting_rank(local_world_size=self.local_world_size)

    @property
    def num_processes(self) -> int:
        """The number of processes to start: one per rank, or one for all ranks of the node."""
        return 1 if self.request.one_rank_per_node else self.local_world_size
