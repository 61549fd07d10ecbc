"""Gangs on Ray: starts attempts on given nodes, calls their agents, and reports how they ended.

Ray places and connects. It repeats nothing (max_restarts=0) and holds no queue: the queue is in
SQL. The agents of a gang are in leases (leases.py), which outlive it.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

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
from orchestrator.cluster.ray.cluster import CUT_OFF_SECONDS, ClusterNodes, RayHead, connect
from orchestrator.cluster.ray.gang import Gang, GangStage, program_of, why_lost
from orchestrator.cluster.ray.guard import RayGuard
from orchestrator.cluster.ray.job import threads_asked_for
from orchestrator.cluster.ray.leases import Leases
from orchestrator.cluster.ray.probes import Probes
from orchestrator.cluster.ray.unanswered_calls import UNANSWERED_SECONDS
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.node_health import ENOUGH_OF_A_KIND, NodeFacts
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.failures import is_aftermath
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.protocol import Device, Heartbeat, Phase, TrialRequest
from orchestrator.core.trial.rank_environment import python_settings
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.node.probe import NodeProbe, ProbePlan, with_clock
from orchestrator.node.processes import global_identity
from orchestrator.node.supervisor import SERVER_START_SECONDS

logger = logging.getLogger(__name__)

# A gang on free slots is given up if its agents have not started after this long. Two sweeps may
# each hold half of the nodes that the other needs; the jitter keeps them from giving up, and trying
# again, at the same time.
PLACEMENT_SECONDS = 120.0
PLACEMENT_JITTER_SECONDS = 30.0
# Added to a trial's own total limit. An agent that has not answered by then is lost.
OVERTIME_SECONDS = SERVER_START_SECONDS + 60.0
ENDING_SECONDS = 40.0  # for an agent to end ranks
PROGRESS_SECONDS = 1.0  # between two requests for progress
NODES_SECONDS = 5.0  # between two requests for the nodes
# A GPU takes a second to become as hot as it will be; cores are only compared.
GPU_MATMUL_SECONDS, CPU_MATMUL_SECONDS = 2.0, 0.3


class RayScheduler:
    """A `Scheduler` and `Prober` (see `orchestrator.cluster.contract`).

    `address` None starts a local Ray; `auto` or HOST:PORT joins a cluster. `rank_environment` and
    `rank_secrets` reach only ranks; the secrets' values are never stored or logged.
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
        # Ray changes some of them in this process.
        of_python = python_settings(os.environ) if self._local else {}
        self._guard = RayGuard() if self._local else None
        try:
            connect(address, self._guard)
            self._head = RayHead(self._guard)
            self._nodes = ClusterNodes.of(device, gpus_per_node)
        except Exception:  # no cluster
            self._leave()
            raise
        except BaseException:  # a signal
            # A Ray that has half started can crash this process in its shutdown. The process ends
            # without a shutdown; a cluster notices that it has disconnected.
            if self._guard is not None:
                self._guard.dismiss()
            raise
        self._nodes_at = time.monotonic()
        # A slot without GPUs is one core. A rank that uses more cores slows its peers.
        threads = threads_asked_for(os.environ) or ("1" if self._nodes.device is Device.CPU else "")
        of_threads = {"OMP_NUM_THREADS": threads} if threads else {}
        self._rank_environment = of_python | of_threads | dict(rank_environment or {})
        self._rank_secrets = dict(rank_secrets or {})
        self._identity = global_identity()
        self._meter = LeaseMeter(time.monotonic())
        self._leases = Leases(self._nodes, self._head, self._meter, root=self._root)
        self._probes = Probes(self._nodes, self._head, self._meter)
        self._gangs: dict[int, Gang] = {}  # by trial
        self._events: list[SchedulerEvent] = []

    @property
    def slots(self) -> Slots:
        return self._nodes.slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return self._leases.free_on_nodes()

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        parts = self._leases.take(shape.slots_per_node, nodes, program=program_of(request))
        gang = Gang(
            request=request,
            parts=parts,
            refs={
                part.agent.address.remote(): index
                for index, part in enumerate(parts)
                if part.lease.address is None
            },
            since=time.monotonic(),
            patience_seconds=PLACEMENT_SECONDS + random.uniform(0.0, PLACEMENT_JITTER_SECONDS),
        )
        self._gangs[request.trial_id] = gang
        if not gang.refs:
            self._begin(gang)

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if self._head.is_gone:
            whose = (
                "the local Ray was ended from outside"
                if self._local
                else "the head of the Ray cluster does not answer"
            )
            raise ClusterUnavailable(
                f"{whose}. Nothing acknowledged is lost; the same command continues"
            )
        if not self._events:
            if self._gangs:
                timeout_seconds = min(timeout_seconds, PROGRESS_SECONDS)
            ready = self._ready(timeout_seconds)
            for gang in list(self._gangs.values()):
                self._advance(gang, [ref for ref in ready if ref in gang.refs])
                self._follow(gang, ready)
                self._check_overdue(gang)
            self._probes.take_answers(ready)
        if time.monotonic() - self._nodes_at > NODES_SECONDS:
            self._head.ask(self._nodes.refresh)
            self._nodes_at = time.monotonic()
            self._leases.discard_lost()
            self._lose_gangs_on_lost_nodes()
        events, self._events = self._events, []
        return events

    def cancel(self, trial_id: int) -> None:
        gang = self._gangs.get(trial_id)
        if gang is None:
            return
        gang.is_cancelled = True
        gang.ending_since = time.monotonic()
        if self._head.is_gone:
            return
        if gang.stage is GangStage.RUNNING:
            self._end_ranks(gang)
        elif gang.stage is GangStage.FORMING:
            self._give_up(gang, FailureKind.CANCELLED, "cancelled before its ranks were started")
        # An agent that opens a rendezvous answers at once, and may serve other attempts.

    def start_id(self, node: str) -> str:
        return self._nodes.id_of(node)

    def begin_probes(self, nodes: Collection[str], *, reserve: bool = True) -> None:
        """See `Prober`. Without `reserve`, GPUs are probed while others use them."""
        on_gpus = self._nodes.device is Device.CUDA
        # The speed of cores is only used in comparisons.
        is_comparable = on_gpus or len(self._nodes.slots.nodes) >= ENOUGH_OF_A_KIND
        seconds = (GPU_MATMUL_SECONDS if on_gpus else CPU_MATMUL_SECONDS) if is_comparable else 0.0
        plans = [ProbePlan(node=name, home=self._root, matmul_seconds=seconds) for name in nodes]
        # An actor would take a second longer and return the same.
        if self._local and not on_gpus:
            for plan in plans:
                self._probes.add_facts(with_clock(NodeProbe().gather(plan), time.time))
        else:
            if reserve:
                self._leases.vacate(nodes)
            self._probes.begin(plans, reserve=reserve)

    def probed(self) -> Mapping[str, NodeFacts | str]:
        return self._probes.take_results()

    def close(self) -> None:
        """End all agents and their ranks, and disconnect; a local Ray ends too."""
        self._probes.close()
        self._leases.close()
        self._leave()

    def _leave(self) -> None:
        guard, self._guard = self._guard, None
        is_gone = guard is not None and guard.ray_is_gone()
        # If Ray is gone, end its processes first: `ray.shutdown` waits for it, and meanwhile its
        # ranks would run on.
        if guard is not None and is_gone:
            guard.dismiss()
        if ray.is_initialized():
            within(CLOSE_SECONDS, ray.shutdown)
        if guard is not None and not is_gone:
            guard.dismiss()
        elif guard is not None:
            guard.remove_folder()

    def leased(self) -> Leased:
        return self._meter.leased(time.monotonic(), total_slots=self._nodes.slots.total)

    def _ready(self, timeout_seconds: float) -> list[Any]:
        """Wait for the first ref that has a value, and return all that have one."""
        gangs = self._gangs.values()
        refs = [ref for gang in gangs for ref in (*gang.refs, *gang.progress_refs)]
        refs += self._probes.refs
        if not refs:
            time.sleep(0.0 if self._gangs else timeout_seconds)
            return []
        try:
            ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_seconds, fetch_local=True)
            if ready:
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
        except RayError as exc:
            raise ClusterUnavailable(
                f"the Ray cluster stopped answering: {first_line(exc)}."
                " Run the same command again to go on"
            ) from exc
        return list(ready)

    # -- attempts --------------------------------------------------------------------------------

    def _advance(self, gang: Gang, ready: Sequence[Any]) -> None:
        for ref in ready:
            index = gang.refs.pop(ref, None)
            if index is None:
                continue  # its agent was lost meanwhile
            try:
                value = ray.get(ref)
            except RayError as exc:
                part = gang.parts[index]
                failure = why_lost(part, exc)
                is_lost = failure.kind is FailureKind.NODE_LOST
                if is_lost and isinstance(exc, ActorUnavailableError):
                    self._nodes.doubt(part.node)
                self._lose(gang, [index], failure)
                if self._gangs.get(gang.trial_id) is not gang:
                    return
                continue
            match gang.stage:
                case GangStage.FORMING:
                    gang.parts[index].lease.address = value
                case GangStage.RENDEZVOUS:
                    if gang.is_cancelled:
                        gang.loss = Failure(
                            kind=FailureKind.CANCELLED,
                            message="cancelled before its ranks were started",
                        )
                        self._end(gang)
                    else:
                        self._run(gang, master_port=value)
                    return
                case GangStage.RUNNING:
                    gang.reports[index] = value
                    if value.failure is not None or value.has_enough:
                        self._end_ranks(gang)
        if not gang.refs:
            if gang.stage is GangStage.FORMING:
                self._begin(gang)
            elif gang.stage is GangStage.RUNNING:
                self._end(gang)

    def _begin(self, gang: Gang) -> None:
        """All agents have started: open a rendezvous, or start the ranks if they share a node."""
        self._events.append(Placed(trial_id=gang.trial_id, nodes=gang.nodes))
        gang.since = gang.placed_at = time.monotonic()
        self._leases.begin(gang.parts)
        self._note_shared_nodes(gang)
        if len(gang.parts) == 1:
            self._run(gang, master_port=None)
        else:
            gang.stage, first = GangStage.RENDEZVOUS, gang.parts[0]
            gang.refs = {first.agent.rendezvous.remote(first.slots[0]): 0}

    def _note_shared_nodes(self, gang: Gang) -> None:
        own = set(gang.nodes)
        for other in self._gangs.values():
            is_placed = other is not gang and other.placed_at is not None
            if is_placed and not own.isdisjoint(other.nodes):
                gang.shares_nodes = other.shares_nodes = True

    def _run(self, gang: Gang, *, master_port: int | None) -> None:
        gang.stage, gang.since = GangStage.RUNNING, time.monotonic()
        request, first = gang.request, gang.parts[0].lease.address
        master_addr = first if first is not None and master_port is not None else "127.0.0.1"
        gang.refs = {
            part.agent.run.remote(
                part.slots,
                LaunchOrder(
                    request=request,
                    program=program_of(request),
                    first_rank=index * len(part.slots),
                    local_world_size=len(part.slots),
                    node_rank=index,
                    node_slots=self._nodes.slots.nodes.get(part.node),
                    master_addr=master_addr,
                    master_port=master_port,
                    address=part.lease.address,
                    environment=self._rank_environment,
                    secrets=self._rank_secrets,
                    orchestrator=self._identity,
                ),
            ): index
            for index, part in enumerate(gang.parts)
        }

    def _end_ranks(self, gang: Gang) -> None:
        """Tell agents that have not reported to end their ranks."""
        gang.ending_since = gang.ending_since or time.monotonic()
        for part in (gang.parts[index] for index in gang.running):
            part.agent.kill.remote(part.slots[0], gang.request.tag)

    def _follow(self, gang: Gang, ready: Sequence[Any]) -> None:
        """Ask agents about progress, and report the phase and step that all nodes have reached."""
        for ref in [ref for ref in ready if ref in gang.progress_refs]:
            index = gang.progress_refs.pop(ref)
            try:
                heartbeat = ray.get(ref)
            except RayError:
                continue  # `run` raises the reason
            known = gang.progress.get(index, Heartbeat(phase=Phase.START))
            gang.progress[index] = heartbeat or known
        if gang.stage is not GangStage.RUNNING or self._gangs.get(gang.trial_id) is not gang:
            return
        running, outstanding = set(gang.running), set(gang.progress_refs.values())
        now = time.monotonic()
        gang.unanswered_calls.count(now, outstanding & running)
        least = least_advanced([gang.progress.get(index) for index in gang.running])
        if least is not None and least != gang.reported:
            gang.reported = least
            self._events.append(
                Progressed(trial_id=gang.trial_id, phase=least.phase, step=least.step)
            )
        if now - max(gang.since, gang.progress_at) > PROGRESS_SECONDS:
            gang.progress_at = now
            for index in running - outstanding:
                part = gang.parts[index]
                gang.progress_refs[part.agent.progress.remote(part.slots[0])] = index

    def _check_overdue(self, gang: Gang) -> None:
        if gang.trial_id not in self._gangs:
            return
        now = time.monotonic()
        waited, is_running = now - gang.since, gang.stage is GangStage.RUNNING
        if gang.ending_since is not None and now - gang.ending_since > ENDING_SECONDS:
            text = f"an agent has not ended its ranks for {ENDING_SECONDS:.0f} s"
            self._give_up(gang, FailureKind.NODE_LOST, text)
        elif not is_running and waited > gang.patience_seconds:
            late = ", ".join(gang.parts[index].node for index in sorted(set(gang.refs.values())))
            text = (
                f"no agent on {late} within {waited:.0f} s: are its slots held by another job of"
                " the cluster? If not, start Ray there anew"
            )
            self._give_up(gang, FailureKind.LAUNCH_FAILED, text)
            # Another sweep's gang may wait for these nodes while it holds the others that we need.
            self._leases.vacate(gang.nodes)
        elif (index := gang.unanswered_calls.lost()) is not None and index in gang.running:
            node = gang.parts[index].node
            self._nodes.doubt(node, seconds=CUT_OFF_SECONDS)
            text = f"node {node} has not answered for {UNANSWERED_SECONDS:.0f} s"
            failure = Failure(kind=FailureKind.NODE_LOST, message=text, node=node)
            self._lose(gang, [index], failure)
        elif is_running and waited > gang.total_limit_seconds + OVERTIME_SECONDS:
            text = (
                f"an agent had not answered {OVERTIME_SECONDS:.0f} s after the trial's total limit"
            )
            self._give_up(gang, FailureKind.NODE_LOST, text)

    def _give_up(self, gang: Gang, kind: FailureKind, message: str) -> None:
        """Discard every agent that has not answered."""
        self._lose(gang, sorted(set(gang.refs.values())), Failure(kind=kind, message=message))

    def _lose_gangs_on_lost_nodes(self) -> None:
        """Give up gangs that wait for an agent on a lost node. Ray would let them wait forever.

        The agents of a running gang report the loss themselves.
        """
        for gang in list(self._gangs.values()):
            lost = [
                index
                for index, part in enumerate(gang.parts)
                if not self._nodes.is_alive(part.lease.node_id)
            ]
            if lost and gang.stage is not GangStage.RUNNING:
                node = gang.parts[lost[0]].node
                text = f"node {node} left the cluster while the gang formed"
                failure = Failure(kind=FailureKind.NODE_LOST, message=text, node=node)
                self._lose(gang, lost, failure)

    def _lose(self, gang: Gang, indices: Sequence[int], failure: Failure) -> None:
        """Discard agents with their ranks. The gang's other agents end their ranks, and stay."""
        known = first_failure(list(gang.reports.values()))
        if gang.loss is None and (known is None or is_aftermath(known)):
            cancelled = Failure(kind=FailureKind.CANCELLED, message="cancelled")
            gang.loss = cancelled if gang.is_cancelled else failure
        gang.lost |= set(indices)
        # Before the ranks start, the other agents need not end any.
        if gang.stage is not GangStage.RUNNING:
            gang.refs = {}
            # Ray may have reserved slots while their agents were starting.
            self._leases.begin(gang.parts)
        gang.refs = {ref: index for ref, index in gang.refs.items() if index not in gang.lost}
        gang.gpu_seconds += self._leases.discard([gang.parts[index] for index in indices])
        if gang.refs:
            self._end_ranks(gang)
        else:
            self._end(gang)

    def _end(self, gang: Gang) -> None:
        """No agent has to answer any more: report the end of the attempt."""
        del self._gangs[gang.trial_id]
        reports = [gang.reports[index] for index in sorted(gang.reports)]
        kept = [part for index, part in enumerate(gang.parts) if index not in gang.lost]
        self._events.append(
            Finished(
                trial_id=gang.trial_id,
                reports=reports,
                failure=None if gang.has_enough else gang.loss or first_failure(reports),
                gpu_seconds=gang.gpu_seconds + self._leases.put_back(kept),
                shared_nodes=gang.shares_nodes if gang.placed_at is not None else None,
            )
        )
