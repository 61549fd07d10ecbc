"""The gang of one attempt on Ray: its parts of leases, the calls under way, and what agents said.

Also decides which failure the loss of an agent means.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ray.exceptions import OutOfMemoryError as RayOutOfMemory
from ray.exceptions import RayActorError, RayError, RayTaskError

from orchestrator.cluster.ray.bounded_calls import first_line
from orchestrator.cluster.ray.leases import LeasePart
from orchestrator.cluster.ray.unanswered_calls import UnansweredCalls
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Heartbeat, TrialRequest

SIGTERM_TEXT = "The process receives a SIGTERM"  # in Ray's message about a worker


class GangStage(StrEnum):
    FORMING = "forming"
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


@dataclass(eq=False, kw_only=True)
class Gang:
    """Times are monotonic; agents are counted by the index of their part."""

    request: TrialRequest
    parts: list[LeasePart]  # in rank order
    refs: dict[Any, int]  # outstanding object refs -> agent
    since: float  # when the stage began
    patience_seconds: float  # for the agents to start
    stage: GangStage = GangStage.FORMING
    placed_at: float | None = None  # when all agents had started
    ending_since: float | None = None  # agents were told to end ranks
    is_cancelled: bool = False
    reports: dict[int, NodeReport] = field(default_factory=dict)
    # Failure of the first lost agent, unless a rank had failed before.
    loss: Failure | None = None
    lost: set[int] = field(default_factory=set)  # agents that were discarded
    gpu_seconds: float = 0.0  # reserved in leases that are lost
    shares_nodes: bool = False  # with another attempt, at any time
    progress: dict[int, Heartbeat] = field(default_factory=dict)  # agent -> its last answer
    progress_refs: dict[Any, int] = field(default_factory=dict)  # outstanding requests -> agent
    progress_at: float = 0.0  # when progress was last requested
    unanswered_calls: UnansweredCalls = field(default_factory=UnansweredCalls)
    reported: Heartbeat | None = None  # the last `Progressed`

    @property
    def trial_id(self) -> int:
        return self.request.trial_id

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(part.node for part in self.parts)

    @property
    def total_limit_seconds(self) -> float:
        """The largest limit that a launcher reported: slow steps may have raised it."""
        reported = (heartbeat.total_limit_seconds or 0.0 for heartbeat in self.progress.values())
        return max(self.request.limits.total, *reported, 0.0)

    @property
    def has_enough(self) -> bool:
        """True if its numbers have arrived: then neither a lost agent nor a failed rank matters."""
        return any(report.has_enough for report in self.reports.values())

    @property
    def running(self) -> list[int]:
        """Agents that have not reported yet."""
        done = self.reports.keys() | self.lost
        return [index for index in range(len(self.parts)) if index not in done]


def program_of(request: TrialRequest) -> str:
    return f"workloads.{request.workload}"


def why_lost(part: LeasePart, exc: RayError) -> Failure:
    """Return the failure behind an agent's error."""
    node = part.node
    if isinstance(exc, RayTaskError):
        text = f"the launcher raised {first_line(exc.cause or exc)}"
        return Failure(kind=FailureKind.LAUNCH_FAILED, message=text, node=node, log_tail=str(exc))
    # Ray's memory monitor ends the agent, although the ranks need the memory.
    if isinstance(exc, RayOutOfMemory):
        text, kind = "the node ran out of memory, and Ray ended the agent", FailureKind.OOM_HOST
        memory: MemoryShortage | None = MemoryShortage()
        # It is unknown which attempt used the memory. Each is tried again alone, which shows it.
        if part.lease.is_shared:
            text, kind = f"{text}, which served several attempts", FailureKind.NODE_LOST
            memory = None
        return Failure(kind=kind, message=text, node=node, memory=memory, log_tail=str(exc))
    if isinstance(exc, RayActorError) and (exc.preempted or SIGTERM_TEXT in str(exc)):
        if exc.preempted:
            text, number = "Ray drained the node for preemption", None
        else:
            text, number = "SIGTERM from outside ended the agent", signal.SIGTERM
        return Failure(
            kind=FailureKind.PREEMPTED,
            message=f"{node}: {text}",
            node=node,
            signal=number,
            evidence=first_line(exc),
        )
    text = f"lost the agent on node {node}: {first_line(exc)}"
    return Failure(kind=FailureKind.NODE_LOST, message=text, node=node)
