"""Gangs on Ray: places them, reaches their nodes, and gives their slots back. With ray_cluster.py the only importer of ray.

Ray places and connects; it retries nothing here (max_restarts=0) and holds no queue: the queue is in SQL. A gang is leased: its
placement group and its agents, one per node, are kept while the next attempt has its shape. After any loss all of it is thrown away,
since Ray re-homes placement groups silently.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.exceptions import OutOfMemoryError as RayOutOfMemory
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.core.communication import passed
from orchestrator.core.errors import ClusterUnavailable, ResourcesInsufficient
from orchestrator.core.failures import Failure, FailureKind
from orchestrator.core.held import Leased
from orchestrator.core.node_health import ENOUGH_OF_A_KIND, NodeFacts
from orchestrator.core.packing import Shape
from orchestrator.core.protocol import Device, Heartbeat, LaunchOrder, NodeReport, Phase, TrialRequest
from orchestrator.gang import Finished, Placed, Progressed, SchedulerEvent, Slots, first_failure, least_advanced
from orchestrator.head_watch import HeadWatch
from orchestrator.launcher import NodeLauncher
from orchestrator.launcher_gang import SERVER_START_SECONDS
from orchestrator.lease_meter import LeaseMeter
from orchestrator.node_probe import NodeProbe, ProbePlan, with_clock
from orchestrator.ray_cluster import CUT_OFF_SECONDS, ClusterNodes, answered, bundles, connect, first_line, probe_nodes, strategy, within
from orchestrator.ray_guard import RayGuard, ray_processes
from orchestrator.ray_job import threads_asked_for
from orchestrator.silence import SILENCE_SECONDS, Silence

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PLACEMENT_SECONDS = 120.0  # a gang that was promised free slots and has no agents by then is given up
OVERTIME_SECONDS = SERVER_START_SECONDS + 60.0  # beyond a trial's own total limit: an agent that is silent for so long is lost
CANCEL_SECONDS = 40.0  # after which an agent that was told to end its ranks is ended itself
PROGRESS_SECONDS = 1.0
REMOVE_SECONDS = 10.0  # for the head to remove a placement group, or to tell of one: milliseconds where it is well
CLOSE_SECONDS = 10.0  # for an agent to end its ranks by itself
NODE_ID = "ray.io/node-id"  # the label that Ray gives every node
NODES_SECONDS = 5.0  # how often the head is asked which nodes there are
GPU_MATMUL_SECONDS, CPU_MATMUL_SECONDS = 2.0, 0.3  # a GPU takes a second to get as hot as it will be; cores are only compared
LEASE_SETTLE_SECONDS = 5.0  # slots just given back take up to one heartbeat of the head to show


class NodeAgent:
    """Runs inside a Ray actor on each node of a gang and owns that node's launcher."""

    def __init__(self, root: str, program: str, node: str, node_environment: Mapping[str, str]) -> None:
        os.environ.update(node_environment)
        self._launcher = NodeLauncher(Path(root), node=node)
        self._launcher.prepare(program)  # imports torch while the rest of the gang still forms
        self._head_watch = HeadWatch(ray.get_runtime_context().gcs_address, self._end)

    def address(self) -> str:
        """Where other nodes reach this one."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def rendezvous(self) -> int:
        return self._launcher.rendezvous()

    def run(self, order: LaunchOrder) -> NodeReport:
        if order.request.device is Device.CUDA:
            order = replace(order, devices=[str(device) for device in ray.get_gpu_ids()])  # those Ray gave this actor alone
        return self._launcher.run(order)

    def progress(self) -> Heartbeat | None:
        return self._launcher.progress()

    def kill(self, tag: str) -> None:
        self._launcher.kill(tag)

    def close(self) -> None:
        self._head_watch.let_go()
        self._launcher.close()

    def _end(self) -> None:
        within(CLOSE_SECONDS, self._launcher.close)
        os._exit(1)  # whatever the launcher could not end, its warden does now


class _Stage(StrEnum):
    FORMING = "forming"
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"


@dataclass(eq=False)
class _Gang:
    shape: Shape
    nodes: tuple[str, ...]  # by name, in rank order
    group: PlacementGroup
    agents: list[Any]
    asked_at: float  # monotonic
    addresses: dict[int, str] = field(default_factory=dict)  # of each agent's node; empty until formed
    used_at: float = 0.0


@dataclass(eq=False)
class _Flight:
    request: TrialRequest
    gang: _Gang
    stage: _Stage
    refs: dict[Any, int]  # outstanding object refs -> index of the agent
    since: float  # monotonic; when the stage began
    placed_at: float | None = None  # monotonic; its gang is formed
    reports: dict[int, NodeReport] = field(default_factory=dict)
    shares_nodes: bool = False  # another attempt ran on one of its nodes meanwhile
    progress: dict[int, Heartbeat] = field(default_factory=dict)  # what each agent said last
    progress_refs: dict[Any, int] = field(default_factory=dict)  # outstanding questions -> index of the agent
    progress_at: float = 0.0  # monotonic; when the last question was asked
    silence: Silence = field(default_factory=Silence)
    told: Heartbeat | None = None  # the last `Progressed`
    cancelled_at: float | None = None


class RayScheduler:
    """See `orchestrator.gang.Scheduler`. `address` None starts a local Ray; `auto` or HOST:PORT joins a cluster.

    `rank_environment`, which may hold secrets, reaches ranks and nothing else.
    """

    def __init__(
        self,
        *,
        address: str | None,
        device: Device | None,
        root: Path,
        gpus_per_node: int | None = None,
        rank_environment: Mapping[str, str] | None = None,
    ) -> None:
        self._root = str(root)
        self._local = address is None
        connect(address)
        self._head_is_gone = False
        self._guard = RayGuard.over(ray_processes()) if self._local else None
        self._nodes = ClusterNodes.of(device, gpus_per_node)
        self._nodes_at = time.monotonic()
        # A slot without GPUs is one core: a rank that takes more of them disturbs its peers.
        threads = threads_asked_for(os.environ) or ("1" if self._nodes.device is Device.CPU else "")
        self._rank_environment = ({"OMP_NUM_THREADS": threads} if threads else {}) | dict(rank_environment or {})
        self._resource = "GPU" if self._nodes.device is Device.CUDA else "CPU"
        self._agent_class = ray.remote(NodeAgent)
        self._gangs: list[_Gang] = []  # every gang that holds slots
        self._flights: dict[int, _Flight] = {}
        self._events: list[SchedulerEvent] = []
        self._meter = LeaseMeter(time.monotonic())

    @property
    def slots(self) -> Slots:
        return self._nodes.slots

    def standing(self) -> Mapping[Shape, Sequence[tuple[str, ...]]]:
        found: dict[Shape, list[tuple[str, ...]]] = {}
        for gang in self._idle():
            found.setdefault(gang.shape, []).append(gang.nodes)
        return found

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        now = time.monotonic()
        gang = next((gang for gang in self._idle() if gang.shape == shape and set(gang.nodes) == set(nodes)), None)
        if gang is not None:
            flight = _Flight(request=request, gang=gang, stage=_Stage.FORMING, refs={}, since=now)
            self._flights[request.trial_id] = flight
            self._begin(flight)
            return
        self._make_room(shape, nodes)
        gang = self._form(shape, sorted(nodes), _program(request))
        refs = {agent.address.remote(): i for i, agent in enumerate(gang.agents)}
        self._flights[request.trial_id] = _Flight(request=request, gang=gang, stage=_Stage.FORMING, refs=refs, since=now)

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if self._ray_is_gone():
            whose = "the local Ray was ended from outside" if self._local else "the head of the Ray cluster does not answer"
            raise ClusterUnavailable(f"{whose}. Nothing acknowledged is lost; the same command goes on")
        if not self._events and self._flights:
            refs = [ref for f in self._flights.values() for ref in (*f.refs, *f.progress_refs)]
            try:
                ready, _ = (
                    ray.wait(refs, num_returns=1, timeout=min(timeout_seconds, PROGRESS_SECONDS), fetch_local=True) if refs else ([], [])
                )
                if ready:  # whatever else is ready by now
                    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
            except RayError as exc:
                raise ClusterUnavailable(
                    f"the Ray cluster stopped answering: {first_line(exc)}. Run the same command again to go on"
                ) from exc
            for flight in list(self._flights.values()):
                self._advance(flight, [ref for ref in ready if ref in flight.refs])
                self._follow(flight, ready)
                self._overdue(flight)
        elif not self._events:
            time.sleep(timeout_seconds)
        if time.monotonic() - self._nodes_at > NODES_SECONDS:
            self._ask(self._nodes.refresh)
            self._nodes_at = time.monotonic()
        events, self._events = self._events, []
        return events

    def cancel(self, trial_id: int) -> None:
        flight = self._flights.get(trial_id)
        if flight is None:
            return
        flight.cancelled_at = time.monotonic()
        if self._ray_is_gone():
            return
        if flight.stage is _Stage.RUNNING:
            for agent in flight.gang.agents:
                agent.kill.remote(flight.request.tag)
        else:
            self._lose(flight, FailureKind.CANCELLED, "cancelled before its ranks were started")

    def probe(
        self, nodes: Collection[str] | None = None, *, on_wait: Callable[[], None] = lambda: None, reserve: bool = True
    ) -> dict[str, NodeFacts | str]:
        """See `orchestrator.gang.Prober`; of all nodes where none are named. Without `reserve` GPUs are looked at while others use them."""
        names = list(self._nodes.slots.nodes) if nodes is None else list(nodes)
        on_gpus = self._nodes.device is Device.CUDA
        is_comparable = on_gpus or len(self._nodes.slots.nodes) >= ENOUGH_OF_A_KIND  # else the cores of nobody would tell anything
        seconds = (GPU_MATMUL_SECONDS if on_gpus else CPU_MATMUL_SECONDS) if is_comparable else 0.0
        plans = [ProbePlan(node=name, home=self._root, matmul_seconds=seconds) for name in names]
        if self._local and not on_gpus:  # an actor would be a second's work, and say the same
            return {plan.node: with_clock(NodeProbe().gather(plan), time.time) for plan in plans}
        return probe_nodes(self._nodes, plans, reserve=reserve, on_wait=on_wait)

    def close(self) -> None:
        """End all agents and their ranks, and leave Ray; a local one ends with it. Placement groups go with their driver."""
        if not self._ray_is_gone():
            self._close_agents([agent for gang in self._gangs for agent in gang.agents])
        for gang in self._gangs:
            self._meter.returned(gang, time.monotonic())
        if ray.is_initialized():
            within(CLOSE_SECONDS, ray.shutdown)  # it waits for a head that is gone
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None

    def leased(self) -> Leased:
        return self._meter.leased(time.monotonic(), total_slots=self._nodes.slots.total)

    def _ray_is_gone(self) -> bool:
        return self._head_is_gone or (self._guard is not None and self._guard.ray_is_gone())

    def _reserved_at(self, gang: _Gang) -> float | None:
        """When Ray had reserved the slots of a gang, by its own account of how long that took; None: it has not, or is gone with its account."""
        if self._ray_is_gone():
            return None
        try:
            told = self._ask(lambda: placement_group_table(gang.group))
        except (RayError, ClusterUnavailable):
            return None
        if told.get("state") != "CREATED":
            return None
        return float(gang.asked_at + told["stats"]["end_to_end_creation_latency_ms"] / 1e3)

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Have the head answer; what would have to wait for it is left undone from then on where it does not."""
        try:
            return answered(call)
        except ClusterUnavailable:
            self._head_is_gone = True
            raise

    # -- gangs ---------------------------------------------------------------------------------------------------------------

    @property
    def _unit(self) -> str:
        return "GPUs" if self._resource == "GPU" else "cores"

    def _idle(self) -> list[_Gang]:
        """Gangs without an attempt, least recently used first."""
        busy = {id(flight.gang) for flight in self._flights.values()}
        return sorted((gang for gang in self._gangs if id(gang) not in busy), key=lambda gang: gang.used_at)

    def _make_room(self, shape: Shape, nodes: Sequence[str]) -> None:
        """Give back idle gangs until these nodes have the slots free. Raises ResourcesInsufficient where attempts hold them."""
        for node in nodes:
            for gang in [None, *self._idle()]:
                if gang is not None and node in gang.nodes:
                    self._release(gang)
                held = sum(gang.shape.slots_per_node for gang in self._gangs if node in gang.nodes)
                if held + shape.slots_per_node <= self._nodes.slots.nodes.get(node, 0):
                    break
            else:
                raise ResourcesInsufficient(
                    f"a trial needs {shape.slots_per_node} {self._unit} on {node}, which has {self._nodes.slots.nodes.get(node, 0)},"
                    f" {held} of them taken; the cluster's nodes have {self._nodes.slots.by_size}"
                )

    def _form(self, shape: Shape, nodes: Sequence[str], program: str) -> _Gang:
        group = self._ask(
            lambda: placement_group(
                bundles(shape, self._nodes.device),
                strategy=strategy(shape),
                bundle_label_selector=[{NODE_ID: self._nodes.id_of(node)} for node in nodes],
            )
        )
        cpus = 1.0 if self._resource == "GPU" else float(shape.slots_per_node)
        agents = self._ask(
            lambda: [
                self._agent_class.options(
                    num_cpus=cpus,
                    num_gpus=float(shape.slots_per_node) if self._resource == "GPU" else 0,
                    max_restarts=0,
                    max_task_retries=0,
                    max_concurrency=4,  # run, beside kill and progress
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i),
                ).remote(self._root, program, node, passed(os.environ))
                for i, node in enumerate(nodes)
            ]
        )
        gang = _Gang(shape=shape, nodes=tuple(nodes), group=group, agents=agents, asked_at=time.monotonic())
        self._gangs.append(gang)
        return gang

    def _release(self, gang: _Gang, *, kill: bool = False) -> None:
        """End the agents and give the slots back; with `kill` at once, without asking them."""
        if not kill:
            self._close_agents(gang.agents)
        for agent in gang.agents:
            try:
                self._ask(partial(ray.kill, agent))
            except RayError as exc:
                logger.debug("Agent already gone: %s", first_line(exc))
        if gang in self._gangs:
            self._gangs.remove(gang)
            self._meter.returned(gang, time.monotonic())
        if not within(REMOVE_SECONDS, lambda: remove_placement_group(gang.group)):
            self._head_is_gone = True
            raise ClusterUnavailable(
                "Ray does not give slots back: it is gone, or going. Nothing acknowledged is lost; the same command goes on"
            )
        self._await_free(gang.shape)

    def _close_agents(self, agents: Sequence[Any]) -> None:
        try:
            ray.get([agent.close.remote() for agent in agents], timeout=CLOSE_SECONDS)
        except RayError as exc:
            logger.warning("An agent did not close by itself: %s", first_line(exc))

    def _await_free(self, shape: Shape) -> None:
        """Wait until the head sees the slots free: a group asked for earlier waits a whole second in Ray's back-off."""
        held = sum(gang.shape.num_slots for gang in self._gangs)
        deadline = time.monotonic() + LEASE_SETTLE_SECONDS
        while time.monotonic() < deadline:
            available = self._ask(ray.available_resources)
            if available.get(self._resource, 0.0) >= min(shape.num_slots, self._nodes.slots.total - held):
                return
            time.sleep(0.01)

    # -- attempts ------------------------------------------------------------------------------------------------------------

    def _advance(self, flight: _Flight, ready: Sequence[Any]) -> None:
        for ref in ready:
            index = flight.refs.pop(ref)
            try:
                value = ray.get(ref)
            except RayTaskError as exc:
                self._lose(flight, FailureKind.LAUNCH_FAILED, f"the launcher raised {first_line(exc.cause or exc)}", detail=str(exc))
                return
            except RayOutOfMemory as exc:  # Ray's memory monitor chose the agent, whatever it was that grew: its ranks
                self._lose(flight, FailureKind.OOM_HOST, "the node ran out of memory, and Ray ended the agent", detail=str(exc))
                return
            except RayError as exc:  # the actor died, or its answer is lost with its node
                node = flight.gang.nodes[index]
                if isinstance(exc, ActorUnavailableError):
                    self._nodes.doubt(node)
                self._lose(flight, FailureKind.NODE_LOST, f"lost the agent on node {node}: {first_line(exc)}", node=node)
                return
            match flight.stage:
                case _Stage.FORMING:
                    flight.gang.addresses[index] = value
                case _Stage.RENDEZVOUS:
                    self._run(flight, master_port=value)
                    return
                case _Stage.RUNNING:
                    flight.reports[index] = value
                    if value.failure is not None:
                        self._kill_others(flight, index)
        if not flight.refs:
            if flight.stage is _Stage.FORMING:
                self._begin(flight)
            elif flight.stage is _Stage.RUNNING:
                self._finish(flight)

    def _begin(self, flight: _Flight) -> None:
        """The gang stands: find a meeting point, or start the ranks at once where all of them share a node."""
        self._events.append(Placed(trial_id=flight.request.trial_id, nodes=flight.gang.nodes))
        flight.since = flight.placed_at = time.monotonic()
        self._hold(flight)
        self._note_shared_nodes(flight)
        if flight.gang.shape.num_nodes == 1:
            self._run(flight, master_port=None)
        else:
            flight.stage = _Stage.RENDEZVOUS
            flight.refs = {flight.gang.agents[0].rendezvous.remote(): 0}

    def _hold(self, flight: _Flight) -> None:
        """From here on the gang is the attempt's; one that was formed for it, from the moment that Ray had reserved its slots."""
        gang, at = flight.gang, time.monotonic()
        if not self._meter.knows(gang):
            reserved_at = self._reserved_at(gang)
            if reserved_at is None:
                return
            at = min(reserved_at, at)
            self._meter.stands(gang, num_slots=gang.shape.num_slots, at=at)
        self._meter.begins(gang, at)

    def _note_shared_nodes(self, flight: _Flight) -> None:
        own = set(flight.gang.nodes)
        for other in self._flights.values():
            if other is not flight and other.placed_at is not None and not own.isdisjoint(other.gang.nodes):
                flight.shares_nodes = other.shares_nodes = True

    def _run(self, flight: _Flight, *, master_port: int | None) -> None:
        gang = flight.gang
        flight.stage, flight.since = _Stage.RUNNING, time.monotonic()
        flight.refs = {
            agent.run.remote(
                LaunchOrder(
                    request=flight.request,
                    program=_program(flight.request),
                    first_rank=i * gang.shape.slots_per_node,
                    local_world_size=1 if flight.request.one_rank_per_node else gang.shape.slots_per_node,
                    node_rank=i,
                    node_slots=self._nodes.slots.nodes.get(gang.nodes[i]),
                    master_addr=gang.addresses[0] if master_port is not None else "127.0.0.1",
                    master_port=master_port,
                    address=gang.addresses[i],
                    environment=self._rank_environment,
                )
            ): i
            for i, agent in enumerate(gang.agents)
        }

    def _kill_others(self, flight: _Flight, index: int) -> None:
        for i, agent in enumerate(flight.gang.agents):
            if i != index and i not in flight.reports:
                agent.kill.remote(flight.request.tag)

    def _follow(self, flight: _Flight, ready: Sequence[Any]) -> None:
        """Ask the nodes of a long attempt how far they are, at most once a second, and tell what all of them have reached."""
        for ref in [ref for ref in ready if ref in flight.progress_refs]:
            index = flight.progress_refs.pop(ref)
            try:
                heartbeat = ray.get(ref)
            except RayError:
                continue  # the run's own ref says what happened
            flight.progress[index] = heartbeat or flight.progress.get(index, Heartbeat(phase=Phase.START))
        if flight.stage is not _Stage.RUNNING or self._flights.get(flight.request.trial_id) is not flight:
            return
        running = [index for index in range(len(flight.gang.agents)) if index not in flight.reports]
        flight.silence.listen(time.monotonic(), set(flight.progress_refs.values()).intersection(running))
        least = least_advanced([flight.progress.get(index) for index in running])
        if least is not None and least != flight.told:
            flight.told = least
            self._events.append(Progressed(trial_id=flight.request.trial_id, phase=least.phase, step=least.step))
        now = time.monotonic()
        if now - max(flight.since, flight.progress_at) > PROGRESS_SECONDS:
            flight.progress_at = now
            unanswered = set(flight.progress_refs.values())
            flight.progress_refs |= {flight.gang.agents[i].progress.remote(): i for i in running if i not in unanswered}

    def _overdue(self, flight: _Flight) -> None:
        if flight.request.trial_id not in self._flights:
            return
        waited = time.monotonic() - flight.since
        if flight.cancelled_at is not None and time.monotonic() - flight.cancelled_at > CANCEL_SECONDS:
            self._lose(flight, FailureKind.CANCELLED, "cancelled; an agent did not answer")
        elif flight.stage is not _Stage.RUNNING and waited > PLACEMENT_SECONDS:
            shape = flight.gang.shape
            self._lose(
                flight,
                FailureKind.LAUNCH_FAILED,
                f"no {shape.num_nodes} x {shape.slots_per_node} {self._unit} within {PLACEMENT_SECONDS:.0f} s",
            )
        elif (index := flight.silence.lost()) is not None:
            node = flight.gang.nodes[index]
            self._nodes.doubt(node, seconds=CUT_OFF_SECONDS)
            self._lose(flight, FailureKind.NODE_LOST, f"node {node} has been silent for {SILENCE_SECONDS:.0f} s", node=node)
        elif flight.stage is _Stage.RUNNING and waited > flight.request.limits.total + OVERTIME_SECONDS:
            self._lose(flight, FailureKind.NODE_LOST, f"an agent was silent {OVERTIME_SECONDS:.0f} s beyond the trial's total limit")

    def _finish(self, flight: _Flight) -> None:
        reports = [flight.reports[i] for i in sorted(flight.reports)]
        failure = first_failure(reports)
        self._end(flight, reports, failure)

    def _lose(self, flight: _Flight, kind: FailureKind, message: str, *, node: str | None = None, detail: str = "") -> None:
        """Give up an attempt whose agents cannot be trusted any more: all of them die, and with them their ranks."""
        if flight.cancelled_at is not None:
            kind, message = FailureKind.CANCELLED, "cancelled"
        failure = Failure(kind=kind, message=message, node=node, log_tail=detail)
        self._end(flight, [flight.reports[i] for i in sorted(flight.reports)], failure)
        self._release(flight.gang, kill=True)

    def _end(self, flight: _Flight, reports: Sequence[NodeReport], failure: Failure | None) -> None:
        if flight.placed_at is None:
            self._hold(flight)  # its slots may have been reserved all the same, while its agents were on their way
        now = time.monotonic()
        flight.gang.used_at = now
        del self._flights[flight.request.trial_id]
        self._events.append(
            Finished(
                trial_id=flight.request.trial_id,
                reports=reports,
                failure=failure,
                gpu_seconds=self._meter.ends(flight.gang, now),
                shared_nodes=flight.shares_nodes if flight.placed_at is not None else None,
            )
        )


def _program(request: TrialRequest) -> str:
    return f"workloads.{request.workload}"
