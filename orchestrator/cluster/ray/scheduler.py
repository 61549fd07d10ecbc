"""Gangs on Ray: starts attempts on the nodes chosen for them, reaches their agents, and reports how they ended.

Ray places and connects; it retries nothing here (max_restarts=0) and holds no queue: the queue is in SQL. The agents of a gang stand in
leases (leases.py), which outlive it.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.exceptions import OutOfMemoryError as RayOutOfMemory

from orchestrator.cluster.contract import (
    Finished,
    Placed,
    Progressed,
    SchedulerEvent,
    Slots,
    first_failure,
    least_advanced,
)
from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.ray.agent import CLOSE_SECONDS
from orchestrator.cluster.ray.bounded_calls import first_line, within
from orchestrator.cluster.ray.cluster import (
    CUT_OFF_SECONDS,
    ClusterNodes,
    Head,
    connect,
)
from orchestrator.cluster.ray.guard import RayGuard
from orchestrator.cluster.ray.job import threads_asked_for
from orchestrator.cluster.ray.leases import Leases, Part
from orchestrator.cluster.ray.probes import Probes
from orchestrator.cluster.ray.unanswered_calls import UNANSWERED_SECONDS, UnansweredCalls
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.node_health import ENOUGH_OF_A_KIND, NodeFacts
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.failures import is_aftermath
from orchestrator.core.trial.protocol import (
    Device,
    Heartbeat,
    LaunchOrder,
    NodeReport,
    Phase,
    TrialRequest,
)
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.node.probe import NodeProbe, ProbePlan, with_clock
from orchestrator.node.processes import global_identity
from orchestrator.node.supervisor import SERVER_START_SECONDS

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = (
    120.0  # a gang that was promised free slots and has no agents by then is given up
)
PLACEMENT_JITTER_SECONDS = 30.0  # more, by chance: two sweeps that hold half of each other's nodes do not give up, and try again, in step
OVERTIME_SECONDS = (
    SERVER_START_SECONDS + 60.0
)  # beyond a trial's own total limit: an agent that is silent for so long is lost
ENDING_SECONDS = 40.0  # after which an agent that was told to end its ranks is ended itself
PROGRESS_SECONDS = 1.0
NODES_SECONDS = 5.0  # how often the head is asked which nodes there are
SIGTERM_TEXT = "The process receives a SIGTERM"  # what Ray says of a worker
GPU_MATMUL_SECONDS, CPU_MATMUL_SECONDS = (
    2.0,
    0.3,
)  # a GPU takes a second to get as hot as it will be; cores are only compared


class _GangStage(StrEnum):
    FORMING = "forming"
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


@dataclass(eq=False, kw_only=True)
class _GangOnRay:
    request: TrialRequest
    parts: list[Part]  # of leases, in rank order
    stage: _GangStage
    refs: dict[Any, int]  # outstanding object refs -> index of the agent
    since: float  # monotonic; when the stage began
    patience_seconds: float  # for its gang to form
    placed_at: float | None = None  # monotonic; its gang is formed
    ending_since: float | None = None  # monotonic; agents were told to end their ranks
    is_cancelled: bool = False
    reports: dict[int, NodeReport] = field(default_factory=dict)
    loss: Failure | None = (
        None  # what the first agent to be lost stands for, where no rank had failed before
    )
    lost: set[int] = field(default_factory=set)  # agents that are thrown away
    gpu_seconds: float = 0.0  # that it held of leases which are lost
    shares_nodes: bool = False  # another attempt ran on one of its nodes meanwhile
    progress: dict[int, Heartbeat] = field(default_factory=dict)  # what each agent said last
    progress_refs: dict[Any, int] = field(
        default_factory=dict
    )  # outstanding questions -> index of the agent
    progress_at: float = 0.0  # monotonic; when the last question was asked
    unanswered_calls: UnansweredCalls = field(default_factory=UnansweredCalls)
    told: Heartbeat | None = None  # the last `Progressed`

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(part.node for part in self.parts)

    @property
    def total_limit_seconds(self) -> float:
        """As the launchers said last: steps that are seen may have raised it."""
        told = [heartbeat.total_limit_seconds or 0.0 for heartbeat in self.progress.values()]
        return max(self.request.limits.total, *told) if told else self.request.limits.total

    @property
    def running(self) -> list[int]:
        """Agents whose report is still to come."""
        return [
            index
            for index in range(len(self.parts))
            if index not in self.reports and index not in self.lost
        ]


class RayScheduler:
    """See `orchestrator.cluster.contract.Scheduler`. `address` None starts a local Ray; `auto` or HOST:PORT joins a cluster.

    `rank_environment` and `rank_secrets` reach ranks and nothing else; the values of the latter are written and told nowhere.
    """

    def __init__(
        self,
        *,
        address: str | None,
        device: Device | None,
        root: Path,
        gpus_per_node: int | None = None,
        rank_environment: Mapping[str, str] | None = None,
        rank_secrets: Mapping[str, str] | None = None,
    ) -> None:
        self._root = str(root)
        self._local = address is None
        self._guard = RayGuard() if self._local else None
        try:
            connect(address, self._guard)
            self._head = Head(self._guard)
            self._nodes = ClusterNodes.of(device, gpus_per_node)
        except BaseException:  # no cluster, or a signal
            self._leave()
            raise
        self._nodes_at = time.monotonic()
        # A slot without GPUs is one core: a rank that takes more of them disturbs its peers.
        threads = threads_asked_for(os.environ) or ("1" if self._nodes.device is Device.CPU else "")
        self._rank_environment = ({"OMP_NUM_THREADS": threads} if threads else {}) | dict(
            rank_environment or {}
        )
        self._rank_secrets = dict(rank_secrets or {})
        self._identity = global_identity()
        self._meter = LeaseMeter(time.monotonic())
        self._leases = Leases(self._nodes, self._head, self._meter, root=self._root)
        self._probes = Probes(self._nodes, self._head, self._meter)
        self._flights: dict[int, _GangOnRay] = {}
        self._events: list[SchedulerEvent] = []

    @property
    def slots(self) -> Slots:
        return self._nodes.slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return self._leases.free_on_nodes()

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        parts = self._leases.take(shape.slots_per_node, nodes, program=_program(request))
        flight = _GangOnRay(
            request=request,
            parts=parts,
            stage=_GangStage.FORMING,
            refs={
                part.agent.address.remote(): index
                for index, part in enumerate(parts)
                if part.lease.address is None
            },
            since=time.monotonic(),
            patience_seconds=PLACEMENT_SECONDS + random.uniform(0.0, PLACEMENT_JITTER_SECONDS),
        )
        self._flights[request.trial_id] = flight
        if not flight.refs:
            self._begin(flight)

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if self._head.is_gone:
            whose = (
                "the local Ray was ended from outside"
                if self._local
                else "the head of the Ray cluster does not answer"
            )
            raise ClusterUnavailable(
                f"{whose}. Nothing acknowledged is lost; the same command goes on"
            )
        if not self._events:
            ready = self._ready(
                min(timeout_seconds, PROGRESS_SECONDS) if self._flights else timeout_seconds
            )
            for flight in list(self._flights.values()):
                self._advance(flight, [ref for ref in ready if ref in flight.refs])
                self._follow(flight, ready)
                self._overdue(flight)
            self._probes.hear(ready)
        if time.monotonic() - self._nodes_at > NODES_SECONDS:
            self._head.ask(self._nodes.refresh)
            self._nodes_at = time.monotonic()
            self._leases.discard_lost()
            self._lose_what_cannot_form()
        events, self._events = self._events, []
        return events

    def cancel(self, trial_id: int) -> None:
        flight = self._flights.get(trial_id)
        if flight is None:
            return
        flight.is_cancelled = True
        flight.ending_since = time.monotonic()
        if self._head.is_gone:
            return
        if flight.stage is _GangStage.RUNNING:
            self._end_ranks(flight)
        elif flight.stage is _GangStage.FORMING:
            self._give_up(flight, FailureKind.CANCELLED, "cancelled before its ranks were started")
        # The agent that holds the meeting point answers at once, and may serve others: it is waited for.

    def life_of(self, node: str) -> str:
        return self._nodes.id_of(node)

    def begin_looks(self, nodes: Collection[str], *, reserve: bool = True) -> None:
        """See `orchestrator.cluster.contract.Prober`. Without `reserve` GPUs are looked at while others use them."""
        on_gpus = self._nodes.device is Device.CUDA
        is_comparable = (
            on_gpus or len(self._nodes.slots.nodes) >= ENOUGH_OF_A_KIND
        )  # else the cores of nobody would tell anything
        seconds = (GPU_MATMUL_SECONDS if on_gpus else CPU_MATMUL_SECONDS) if is_comparable else 0.0
        plans = [ProbePlan(node=name, home=self._root, matmul_seconds=seconds) for name in nodes]
        if self._local and not on_gpus:  # an actor would be a second's work, and say the same
            for plan in plans:
                self._probes.tell(with_clock(NodeProbe().gather(plan), time.time))
        else:
            if reserve:
                self._leases.vacate(nodes)
            self._probes.begin(plans, reserve=reserve)

    def looks(self) -> Mapping[str, NodeFacts | str]:
        return self._probes.said()

    def close(self) -> None:
        """End all agents and their ranks, and leave Ray; a local one ends with it. Placement groups go with their driver."""
        self._probes.close()
        self._leases.close()
        self._leave()

    def _leave(self) -> None:
        guard, self._guard = self._guard, None
        is_gone = guard is not None and guard.ray_is_gone()
        if (
            guard is not None and is_gone
        ):  # first: `ray.shutdown` waits for what is gone, and agents and ranks go on meanwhile
            guard.dismiss()
        if ray.is_initialized():
            within(CLOSE_SECONDS, ray.shutdown)  # it waits for a head that is gone
        if guard is not None and not is_gone:
            guard.dismiss()
        elif guard is not None:
            guard.remove_folder()

    def leased(self) -> Leased:
        return self._meter.leased(time.monotonic(), total_slots=self._nodes.slots.total)

    def _ready(self, timeout_seconds: float) -> list[Any]:
        """The refs that have a value; waits for the first of them."""
        refs = [
            ref for f in self._flights.values() for ref in (*f.refs, *f.progress_refs)
        ] + self._probes.refs
        if not refs:
            time.sleep(0.0 if self._flights else timeout_seconds)
            return []
        try:
            ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_seconds, fetch_local=True)
            if ready:  # whatever else is ready by now
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
        except RayError as exc:
            raise ClusterUnavailable(
                f"the Ray cluster stopped answering: {first_line(exc)}. Run the same command again to go on"
            ) from exc
        return list(ready)

    # -- attempts ------------------------------------------------------------------------------------------------------------

    def _advance(self, flight: _GangOnRay, ready: Sequence[Any]) -> None:
        for ref in ready:
            index = flight.refs.pop(ref, None)
            if index is None:
                continue  # of an agent that was lost with another's answer
            try:
                value = ray.get(ref)
            except RayError as exc:
                self._lose(flight, [index], self._why_lost(flight.parts[index], exc))
                if self._flights.get(flight.request.trial_id) is not flight:
                    return
                continue
            match flight.stage:
                case _GangStage.FORMING:
                    flight.parts[index].lease.address = value
                case _GangStage.RENDEZVOUS:
                    if flight.is_cancelled:
                        flight.loss = Failure(
                            kind=FailureKind.CANCELLED,
                            message="cancelled before its ranks were started",
                        )
                        self._end(flight)
                    else:
                        self._run(flight, master_port=value)
                    return
                case _GangStage.RUNNING:
                    flight.reports[index] = value
                    if value.failure is not None:
                        self._end_ranks(flight)
        if not flight.refs:
            if flight.stage is _GangStage.FORMING:
                self._begin(flight)
            elif flight.stage is _GangStage.RUNNING:
                self._end(flight)

    def _why_lost(self, part: Part, exc: RayError) -> Failure:
        """What the loss of its agent stands for."""
        node = part.node
        if isinstance(exc, RayTaskError):
            text = f"the launcher raised {first_line(exc.cause or exc)}"
            return Failure(
                kind=FailureKind.LAUNCH_FAILED, message=text, node=node, log_tail=str(exc)
            )
        if isinstance(
            exc, RayOutOfMemory
        ):  # Ray's memory monitor chose the agent, whatever it was that grew: its ranks
            text = "the node ran out of memory, and Ray ended the agent"
            if (
                part.lease.is_shared
            ):  # of one attempt's ranks: each is tried again alone, and shows whose
                return Failure(
                    kind=FailureKind.NODE_LOST,
                    message=f"{text}, which served several attempts",
                    node=node,
                    log_tail=str(exc),
                )
            return Failure(
                kind=FailureKind.OOM_HOST,
                message=text,
                node=node,
                memory=MemoryShortage(),
                log_tail=str(exc),
            )
        if isinstance(exc, RayActorError) and (exc.preempted or SIGTERM_TEXT in str(exc)):
            text = (
                "Ray drained the node for preemption"
                if exc.preempted
                else "SIGTERM from outside ended the agent"
            )
            number = None if exc.preempted else signal.SIGTERM
            return Failure(
                kind=FailureKind.PREEMPTED,
                message=f"{node}: {text}",
                node=node,
                signal=number,
                evidence=first_line(exc),
            )
        if isinstance(exc, ActorUnavailableError):
            self._nodes.doubt(node)
        return Failure(
            kind=FailureKind.NODE_LOST,
            message=f"lost the agent on node {node}: {first_line(exc)}",
            node=node,
        )

    def _begin(self, flight: _GangOnRay) -> None:
        """The gang stands: find a meeting point, or start the ranks at once where all of them share a node."""
        self._events.append(Placed(trial_id=flight.request.trial_id, nodes=flight.nodes))
        flight.since = flight.placed_at = time.monotonic()
        self._leases.stand(flight.parts)
        self._note_shared_nodes(flight)
        if len(flight.parts) == 1:
            self._run(flight, master_port=None)
        else:
            flight.stage, first = _GangStage.RENDEZVOUS, flight.parts[0]
            flight.refs = {first.agent.rendezvous.remote(first.slots[0]): 0}

    def _note_shared_nodes(self, flight: _GangOnRay) -> None:
        own = set(flight.nodes)
        for other in self._flights.values():
            if (
                other is not flight
                and other.placed_at is not None
                and not own.isdisjoint(other.nodes)
            ):
                flight.shares_nodes = other.shares_nodes = True

    def _run(self, flight: _GangOnRay, *, master_port: int | None) -> None:
        flight.stage, flight.since = _GangStage.RUNNING, time.monotonic()
        first = flight.parts[0].lease.address
        flight.refs = {
            part.agent.run.remote(
                part.slots,
                LaunchOrder(
                    request=flight.request,
                    program=_program(flight.request),
                    first_rank=index * len(part.slots),
                    local_world_size=1 if flight.request.one_rank_per_node else len(part.slots),
                    node_rank=index,
                    node_slots=self._nodes.slots.nodes.get(part.node),
                    master_addr=first
                    if first is not None and master_port is not None
                    else "127.0.0.1",
                    master_port=master_port,
                    address=part.lease.address,
                    environment=self._rank_environment,
                    secrets=self._rank_secrets,
                    orchestrator=self._identity,
                ),
            ): index
            for index, part in enumerate(flight.parts)
        }

    def _end_ranks(self, flight: _GangOnRay) -> None:
        """Have those agents end their ranks that have not reported."""
        flight.ending_since = flight.ending_since or time.monotonic()
        for part in (flight.parts[index] for index in flight.running):
            part.agent.kill.remote(part.slots[0], flight.request.tag)

    def _follow(self, flight: _GangOnRay, ready: Sequence[Any]) -> None:
        """Ask the nodes of a long attempt how far they are, at most once a second, and tell what all of them have reached."""
        for ref in [ref for ref in ready if ref in flight.progress_refs]:
            index = flight.progress_refs.pop(ref)
            try:
                heartbeat = ray.get(ref)
            except RayError:
                continue  # the run's own ref says what happened
            flight.progress[index] = heartbeat or flight.progress.get(
                index, Heartbeat(phase=Phase.START)
            )
        if (
            flight.stage is not _GangStage.RUNNING
            or self._flights.get(flight.request.trial_id) is not flight
        ):
            return
        running = flight.running
        flight.unanswered_calls.listen(
            time.monotonic(), set(flight.progress_refs.values()).intersection(running)
        )
        least = least_advanced([flight.progress.get(index) for index in running])
        if least is not None and least != flight.told:
            flight.told = least
            self._events.append(
                Progressed(trial_id=flight.request.trial_id, phase=least.phase, step=least.step)
            )
        now = time.monotonic()
        if now - max(flight.since, flight.progress_at) > PROGRESS_SECONDS:
            flight.progress_at = now
            asked = {
                index: flight.parts[index]
                for index in set(running) - set(flight.progress_refs.values())
            }
            flight.progress_refs |= {
                part.agent.progress.remote(part.slots[0]): index for index, part in asked.items()
            }

    def _overdue(self, flight: _GangOnRay) -> None:
        if flight.request.trial_id not in self._flights:
            return
        now = time.monotonic()
        waited = now - flight.since
        if flight.ending_since is not None and now - flight.ending_since > ENDING_SECONDS:
            self._give_up(
                flight,
                FailureKind.NODE_LOST,
                f"an agent has not ended its ranks for {ENDING_SECONDS:.0f} s",
            )
        elif flight.stage is not _GangStage.RUNNING and waited > flight.patience_seconds:
            late = ", ".join(
                flight.parts[index].node for index in sorted(set(flight.refs.values()))
            )
            text = f"no agent on {late} within {waited:.0f} s: are its slots held by another job of the cluster? If not, start Ray there anew"
            self._give_up(flight, FailureKind.LAUNCH_FAILED, text)
            self._leases.vacate(
                flight.nodes
            )  # a gang of another sweep may wait for what this one has of its nodes, and hold the rest
        elif (index := flight.unanswered_calls.lost()) is not None and index in flight.running:
            node = flight.parts[index].node
            self._nodes.doubt(node, seconds=CUT_OFF_SECONDS)
            text = f"node {node} has been silent for {UNANSWERED_SECONDS:.0f} s"
            self._lose(
                flight, [index], Failure(kind=FailureKind.NODE_LOST, message=text, node=node)
            )
        elif (
            flight.stage is _GangStage.RUNNING
            and waited > flight.total_limit_seconds + OVERTIME_SECONDS
        ):
            self._give_up(
                flight,
                FailureKind.NODE_LOST,
                f"an agent was silent {OVERTIME_SECONDS:.0f} s beyond the trial's total limit",
            )

    def _give_up(self, flight: _GangOnRay, kind: FailureKind, message: str) -> None:
        """Throw away every agent that owes an answer."""
        self._lose(flight, sorted(set(flight.refs.values())), Failure(kind=kind, message=message))

    def _lose_what_cannot_form(self) -> None:
        """Gangs that wait for an agent on a node that is no more: Ray would have them wait for ever."""
        for flight in list(self._flights.values()):
            gone = [
                index
                for index, part in enumerate(flight.parts)
                if not self._nodes.is_alive(part.lease.node_id)
            ]
            if (
                gone and flight.stage is not _GangStage.RUNNING
            ):  # of a running one the agents themselves tell
                node = flight.parts[gone[0]].node
                text = f"node {node} left the cluster while the gang formed"
                self._lose(
                    flight, gone, Failure(kind=FailureKind.NODE_LOST, message=text, node=node)
                )

    def _lose(self, flight: _GangOnRay, indices: Sequence[int], failure: Failure) -> None:
        """Agents are gone, or cannot be trusted any more: they die, and with them their ranks. The others end theirs, and stay."""
        known = first_failure(list(flight.reports.values()))
        if flight.loss is None and (known is None or is_aftermath(known)):
            flight.loss = (
                Failure(kind=FailureKind.CANCELLED, message="cancelled")
                if flight.is_cancelled
                else failure
            )
        flight.lost |= set(indices)
        if (
            flight.stage is not _GangStage.RUNNING
        ):  # nothing runs yet: the others are not waited for
            flight.refs = {}
            self._leases.stand(
                flight.parts
            )  # slots may have been reserved while their agents were on their way
        flight.refs = {ref: index for ref, index in flight.refs.items() if index not in flight.lost}
        flight.gpu_seconds += self._leases.discard([flight.parts[index] for index in indices])
        if flight.refs:
            self._end_ranks(flight)
        else:
            self._end(flight)

    def _end(self, flight: _GangOnRay) -> None:
        """Nobody owes an answer: the attempt is over."""
        del self._flights[flight.request.trial_id]
        reports = [flight.reports[index] for index in sorted(flight.reports)]
        kept = [part for index, part in enumerate(flight.parts) if index not in flight.lost]
        self._events.append(
            Finished(
                trial_id=flight.request.trial_id,
                reports=reports,
                failure=flight.loss or first_failure(reports),
                gpu_seconds=flight.gpu_seconds + self._leases.put_back(kept),
                shared_nodes=flight.shares_nodes if flight.placed_at is not None else None,
            )
        )


def _program(request: TrialRequest) -> str:
    return f"workloads.{request.workload}"
