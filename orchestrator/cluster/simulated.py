"""A cluster that is simulated on a virtual clock: gangs hold its slots, and nothing runs.

The loop, the search, the packing and the store are the real ones. Ray, launchers and ranks are
replaced by simulated_attempt.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

from orchestrator.cluster.contract import Finished, SchedulerEvent, Slots
from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.simulated_attempt import SimulatedEnd, simulate_attempt
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX
from orchestrator.core.pretend.synthetic import chance
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_values import MAX_NAME
from orchestrator.core.sweepfile.synthetic_options import SyntheticOptions
from orchestrator.core.sweepfile.workload_section import SyntheticWorkload
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.core.trial.reserved_time import Leased

NODE_SLOTS = 8  # unless the file sets it
# Ends that are this close are reported together, as the loop would see them.
TICK_SECONDS = 0.5
# Shorter than the wait of a sweep for a node (measurement.wait_for_nodes).
NODE_AWAY_SECONDS = 600.0
# The time until the loss of a node is noticed: as long as a real agent may leave a call unanswered
# (cluster/ray/unanswered_calls.py).
FOUND_SECONDS = 20.0


def simulated(spec: SweepSpec) -> SweepSpec:
    """Return the sweep with workload synthetic, and a name that shows it is simulated.

    Raises UsageInvalid if options of another workload are axes.
    """
    workload = spec.workload
    if not isinstance(workload, SyntheticWorkload):
        if spec.axes.options:
            raise UsageInvalid(
                f"axes.options: {', '.join(spec.axes.options)} are options of workload"
                f" {workload.name}, and a simulation has none of them;"
                " add axes.options={} to the command"
            )
        device = spec.device if spec.device in DEVICES else SyntheticOptions().device_name
        workload = SyntheticWorkload(name="synthetic", options=SyntheticOptions(device_name=device))
    name = f"{spec.name}{SIMULATED_SUFFIX}"
    if len(name) > MAX_NAME:
        shorter = spec.name[: MAX_NAME - len(SIMULATED_SUFFIX)].rstrip(".-_")
        raise UsageInvalid(
            f"a simulation of sweep {spec.name!r} would be called {name!r}, of {len(name)}"
            f" characters; at most {MAX_NAME} are possible: give it a shorter name, name={shorter}"
        )
    changed = {
        "name": name,
        "device": workload.options.device_name,
        "workload": workload.model_dump(),
    }
    # Rule out the layouts that the real sweep would rule out.
    if spec.dominance is not Dominance.TRUSTED:
        changed["search"] = spec.search.model_dump() | {"dominance": spec.dominance}
    return SweepSpec.model_validate(spec.model_dump() | changed)


@dataclass(eq=False, kw_only=True, slots=True)
class _SimulatedGang:
    request: TrialRequest
    shape: Shape
    nodes: tuple[str, ...]
    began: float
    ends_at: float
    end: SimulatedEnd
    shares_nodes: bool


class SimulatedScheduler:
    """A `Scheduler`; `clock` returns its time in seconds, which passes only in `poll`.

    `node_loss_hours` is the mean time until a node is lost with all that runs on it; None: never.
    `tick_seconds` is how long the end of an attempt may wait to be reported with others.
    """

    def __init__(
        self,
        spec: SweepSpec,
        *,
        num_nodes: int | None = None,
        node_loss_hours: float | None = None,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        assert isinstance(spec.workload.options, SyntheticOptions)
        self._seed, self._loss_hours = spec.search.seed, node_loss_hours
        self._tick_seconds = tick_seconds
        per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else NODE_SLOTS
        count = num_nodes or -(-max(spec.gpus) // per_node)
        self._nodes = {f"node-{number:0{len(str(count))}d}": per_node for number in range(count)}
        self._slots = _slots(self._nodes)
        self._now = 0.0
        self._meter = LeaseMeter(self._now)  # leases end with their attempts
        self._gangs: dict[int, _SimulatedGang] = {}
        self._per_node = per_node
        # Node -> trials that have a part of it.
        self._tenants: dict[str, set[int]] = {node: set() for node in self._nodes}
        # (time, trial, attempt) of ends; entries of lost or cancelled attempts are ignored.
        self._ends: list[tuple[float, int, int]] = []
        self._losses: list[tuple[float, str, int]] = []  # (time, node, number of the loss)
        if node_loss_hours is not None:
            self._losses = [(self._runs_for(node, 0), node, 1) for node in self._nodes]
        self._returns: list[tuple[float, str]] = []
        heapq.heapify(self._losses)

    def clock(self) -> float:
        return self._now

    @property
    def slots(self) -> Slots:
        return self._slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        options = SyntheticOptions.model_validate(request.options)
        end = simulate_attempt(request, options, nodes[0], shape)
        neighbours: set[int] = set()
        if shape.slots_per_node < self._per_node:  # else the gang has whole nodes
            neighbours = {other for node in nodes for other in self._tenants[node]}
            for node in nodes:
                self._tenants[node].add(request.trial_id)
        for other in neighbours:
            self._gangs[other].shares_nodes = True
        gang = _SimulatedGang(
            request=request,
            shape=shape,
            nodes=tuple(nodes),
            began=self._now,
            ends_at=self._now + end.seconds,
            end=end,
            shares_nodes=bool(neighbours),
        )
        self._gangs[request.trial_id] = gang
        self._meter.reserved(gang, num_slots=shape.num_slots, at=self._now)
        self._meter.begins(gang, num_slots=shape.num_slots, at=self._now)
        heapq.heappush(self._ends, (gang.ends_at, request.trial_id, request.attempt))

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        self._drop_stale_ends()
        if not self._gangs:
            self._now += timeout_seconds  # nodes may go and return
            while self._losses and self._losses[0][0] + FOUND_SECONDS <= self._now:
                self._lose_a_node()
            self._nodes_return()
            return []
        if self._losses and self._losses[0][0] + FOUND_SECONDS < self._ends[0][0]:
            return self._lose_a_node()
        self._now = max(self._now, self._ends[0][0])
        self._nodes_return()
        events: list[SchedulerEvent] = []
        while self._ends and self._ends[0][0] <= self._now + self._tick_seconds:
            ends_at, trial_id, _ = heapq.heappop(self._ends)
            self._now = max(self._now, ends_at)
            gang = self._gangs[trial_id]
            events.append(self._finish(gang, gang.end.rank, gang.end.failure, ends_at))
            self._drop_stale_ends()
        return events

    def cancel(self, trial_id: int) -> None:
        gang = self._gangs.get(trial_id)
        if gang is not None:
            failure = Failure(kind=FailureKind.CANCELLED, message="cancelled", node=gang.nodes[0])
            gang.end = SimulatedEnd(seconds=0.0, rank=RankOutcome(rank=0), failure=failure)
            gang.ends_at = self._now
            heapq.heappush(self._ends, (self._now, trial_id, gang.request.attempt))

    def leased(self) -> Leased:
        return self._meter.leased(self._now, total_slots=self._slots.total)

    def close(self) -> None:
        for gang in self._gangs.values():
            self._meter.ends(gang, self._now)
            self._meter.returned(gang, self._now)
        self._gangs.clear()

    def _drop_stale_ends(self) -> None:
        while self._ends:
            ends_at, trial_id, attempt = self._ends[0]
            gang = self._gangs.get(trial_id)
            if gang is not None and (gang.ends_at, gang.request.attempt) == (ends_at, attempt):
                return
            heapq.heappop(self._ends)

    def _finish(
        self, gang: _SimulatedGang, rank: RankOutcome, failure: Failure | None, at: float
    ) -> Finished:
        trial_id = gang.request.trial_id
        del self._gangs[trial_id]
        if gang.shape.slots_per_node < self._per_node:
            for node in gang.nodes:
                self._tenants[node].discard(trial_id)
        reserved = self._meter.ends(gang, at)
        self._meter.returned(gang, at)
        report = NodeReport(
            node=gang.nodes[0], ranks=[rank], failure=failure, seconds=at - gang.began
        )
        return Finished(
            trial_id=trial_id,
            reports=[report],
            failure=failure,
            gpu_seconds=reserved,
            shared_nodes=gang.shares_nodes,
        )

    # -- nodes -----------------------------------------------------------------------------------

    def _lose_a_node(self) -> list[SchedulerEvent]:
        at, node, times = heapq.heappop(self._losses)
        self._now = max(self._now, at + FOUND_SECONDS)
        back = self._now + NODE_AWAY_SECONDS
        heapq.heappush(self._returns, (back, node))
        heapq.heappush(self._losses, (back + self._runs_for(node, times), node, times + 1))
        left = {name: slots for name, slots in self._slots.nodes.items() if name != node}
        self._slots = _slots(left)
        failure = Failure(
            kind=FailureKind.NODE_LOST,
            message=f"lost the agent on node {node}: simulated",
            node=node,
        )
        self._nodes_return()
        lost = [gang for _, gang in sorted(self._gangs.items()) if node in gang.nodes]
        return [self._finish(gang, RankOutcome(rank=0), failure, self._now) for gang in lost]

    def _nodes_return(self) -> None:
        while self._returns and self._returns[0][0] <= self._now:
            _, node = heapq.heappop(self._returns)
            self._slots = _slots({**self._slots.nodes, node: self._nodes[node]})

    def _runs_for(self, node: str, times: int) -> float:
        """Return the seconds until a node is lost: exponential."""
        assert self._loss_hours is not None
        return -log(chance(self._seed, node, times)) * self._loss_hours * 3600


def _slots(nodes: Mapping[str, int]) -> Slots:
    return Slots(device=Device.CUDA, device_name=None, nodes=nodes, how_to_get_more="raise --nodes")
