"""A cluster that is not there, on a clock that is not real: gangs hold its slots for as long as workload synthetic says that they would.

The loop, the search, the packing and the store are the real ones; only Ray, launchers and ranks are left out. One rank speaks for a gang.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

from orchestrator.cluster.contract import Finished, SchedulerEvent, Slots
from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.pretend.synthetic import (
    SIMULATED_SUFFIX,
    chance,
    log_normal,
    memory,
    noisy_steps,
    out_of_memory_text,
    strikes,
)
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_values import MAX_NAME
from orchestrator.core.sweepfile.synthetic_options import (
    FaultKind,
    SyntheticFault,
    SyntheticOptions,
)
from orchestrator.core.sweepfile.workload_section import SyntheticWorkload
from orchestrator.core.trial.failure_kinds import (
    OUT_OF_MEMORY_KINDS,
    Failure,
    FailureKind,
    MemoryShortage,
)
from orchestrator.core.trial.failures import Evidence, classify
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.limits import NOTHING_SEEN, SeenSteps, limit_seconds, told_passed
from orchestrator.core.trial.measurement import enough
from orchestrator.core.trial.protocol import (
    Device,
    LimitName,
    NodeReport,
    Phase,
    PhaseLimits,
    RankFailure,
    RankOutcome,
    RankResult,
    TrialRequest,
)
from orchestrator.core.trial.reserved_time import Leased

NODE_SLOTS = 8  # where neither the file nor the caller says
TICK_SECONDS = 0.5  # what ends so close together is told together, as by a loop that looks so often
# Of a trial beside its steps, 60 s together (core/trial/measurement.py: LAUNCH_SECONDS), each with a log-normal error.
PHASE_SECONDS: Mapping[Phase, float] = {
    Phase.START: 10.0,
    Phase.RENDEZVOUS: 30.0,
    Phase.FIRST_STEP: 10.0,
    Phase.TEARDOWN: 5.0,
}
CLEAN_UP_SECONDS = 5.0
LAUNCH_SD = 0.2
LAUNCH_SHARE = 0.5  # of a limit, that a launch takes at most
# Time until a lost node is back: less than a sweep waits for it (measurement.wait_for_nodes).
NODE_AWAY_SECONDS = 600.0
FOUND_SECONDS = 15.0  # that the loss of a node takes to be noticed

# What each fault on purpose comes to; those that are not here do no harm.
_KINDS: Mapping[FaultKind, FailureKind] = {
    FaultKind.OOM: FailureKind.OOM_GPU,
    FaultKind.HOST_OOM: FailureKind.OOM_HOST,
    FaultKind.CONFIG_REJECTED: FailureKind.CONFIG_REJECTED,
    FaultKind.CRASH: FailureKind.USER_ERROR,
    FaultKind.EXIT: FailureKind.USER_ERROR,
    FaultKind.SEGFAULT: FailureKind.SEGFAULT,
    FaultKind.ABORT: FailureKind.SEGFAULT,
    FaultKind.NAN_LOSS: FailureKind.NOT_FINITE,
    FaultKind.PREEMPTED: FailureKind.PREEMPTED,
    FaultKind.XID: FailureKind.XID,
    FaultKind.LOST_RANK: FailureKind.KILLED,
    FaultKind.HANG: FailureKind.HUNG,
    FaultKind.HANG_IN_C: FailureKind.HUNG,
    FaultKind.HANG_IGNORING_SIGNALS: FailureKind.HUNG,
    FaultKind.STOP: FailureKind.HUNG,
    FaultKind.NCCL_ERROR: FailureKind.NCCL,
    FaultKind.PORT_CLASH: FailureKind.PORT_CLASH,
    FaultKind.RUBBISH_RESULT: FailureKind.BAD_RESULT,
    FaultKind.NO_RESULT: FailureKind.BAD_RESULT,
}
# Once the result is handed over, how a process ends does not matter; but what it wrote may still be overwritten.
_HARM_AFTER_THE_RESULT = frozenset({FaultKind.RUBBISH_RESULT})


def simulated(spec: SweepSpec) -> SweepSpec:
    """The sweep as it is simulated: of workload synthetic, under a name of its own, so that nobody takes its numbers for measured ones.

    Raises UsageInvalid where options of another workload are axes.
    """
    workload = spec.workload
    if not isinstance(workload, SyntheticWorkload):
        if spec.axes.options:
            raise UsageInvalid(
                f"axes.options: {', '.join(spec.axes.options)} are options of workload {workload.name}, and a simulation has none of them;"
                " leave them out with axes.options={}"
            )
        device = spec.device if spec.device in DEVICES else SyntheticOptions().device_name
        workload = SyntheticWorkload(name="synthetic", options=SyntheticOptions(device_name=device))
    name = f"{spec.name}{SIMULATED_SUFFIX}"
    if len(name) > MAX_NAME:
        raise UsageInvalid(
            f"a simulation of sweep {spec.name!r} would be called {name!r}, of {len(name)} characters; at most {MAX_NAME} are possible:"
            f" give it a shorter name, name={spec.name[: MAX_NAME - len(SIMULATED_SUFFIX)].rstrip('.-_')}"
        )
    acted = {
        "name": name,
        "device": workload.options.device_name,
        "workload": workload.model_dump(),
    }
    # The simulation rules out what the real program's sweep would.
    if spec.dominance is not Dominance.TRUSTED:
        acted["search"] = spec.search.model_dump() | {"dominance": spec.dominance}
    return SweepSpec.model_validate(spec.model_dump() | acted)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SimulatedEnd:
    """What will have become of an attempt, and after how long."""

    seconds: float
    rank: RankOutcome
    failure: Failure | None


@dataclass(eq=False, kw_only=True, slots=True)
class _SimulatedGang:
    request: TrialRequest
    shape: Shape
    nodes: tuple[str, ...]
    began: float
    ends_at: float
    outcome: _SimulatedEnd
    shares_nodes: bool


class SimulatedScheduler:
    """See `orchestrator.cluster.contract.Scheduler`. `clock` is its time, in seconds: it stands still but for `poll`.

    `node_loss_hours`: how long a node runs, in the mean, until it is lost with all that it runs; None: for ever. `tick_seconds`: how long
    the first of several attempts that end one after the other may wait to be told with the rest.
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
        self._seed, self._loss_hours, self._tick_seconds = (
            spec.search.seed,
            node_loss_hours,
            tick_seconds,
        )
        per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else NODE_SLOTS
        count = num_nodes or -(-max(spec.gpus) // per_node)
        self._nodes = {f"node-{number:0{len(str(count))}d}": per_node for number in range(count)}
        self._slots = self._seen(self._nodes)
        self._now = 0.0
        self._meter = LeaseMeter(self._now)  # a gang is there for its attempt alone
        self._flights: dict[int, _SimulatedGang] = {}
        self._per_node = per_node
        self._tenants: dict[str, set[int]] = {
            node: set() for node in self._nodes
        }  # trials by node, of those that have a part of one
        self._ends: list[
            tuple[float, int, int]
        ] = []  # of flights: when, trial, attempt; those of lost or cancelled ones mean nothing any more
        self._losses = (
            [(self._runs_for(node, 0), node, 1) for node in self._nodes]
            if node_loss_hours is not None
            else []
        )
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
        outcome = _outcome(
            request, SyntheticOptions.model_validate(request.options), nodes[0], shape
        )
        beside: set[int] = set()
        if (
            shape.slots_per_node < self._per_node
        ):  # nobody is beside a gang of whole nodes, however many they are
            beside = {other for node in nodes for other in self._tenants[node]}
            for node in nodes:
                self._tenants[node].add(request.trial_id)
        for other in beside:
            self._flights[other].shares_nodes = True
        flight = _SimulatedGang(
            request=request,
            shape=shape,
            nodes=tuple(nodes),
            began=self._now,
            ends_at=self._now + outcome.seconds,
            outcome=outcome,
            shares_nodes=bool(beside),
        )
        self._flights[request.trial_id] = flight
        self._meter.stands(flight, num_slots=shape.num_slots, at=self._now)
        self._meter.begins(flight, num_slots=shape.num_slots, at=self._now)
        heapq.heappush(self._ends, (flight.ends_at, request.trial_id, request.attempt))

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        self._forget_what_is_over()
        if not self._flights:
            self._now += timeout_seconds  # nobody runs: nodes may go and come back
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
            flight = self._flights[trial_id]
            events.append(
                self._finish(flight, flight.outcome.rank, flight.outcome.failure, ends_at)
            )
            self._forget_what_is_over()
        return events

    def cancel(self, trial_id: int) -> None:
        flight = self._flights.get(trial_id)
        if flight is not None:
            failure = Failure(kind=FailureKind.CANCELLED, message="cancelled", node=flight.nodes[0])
            flight.outcome = _SimulatedEnd(seconds=0.0, rank=RankOutcome(rank=0), failure=failure)
            flight.ends_at = self._now
            heapq.heappush(self._ends, (self._now, trial_id, flight.request.attempt))

    def leased(self) -> Leased:
        return self._meter.leased(self._now, total_slots=self._slots.total)

    def close(self) -> None:
        for flight in self._flights.values():
            self._meter.ends(flight, self._now)
            self._meter.returned(flight, self._now)
        self._flights.clear()

    def _forget_what_is_over(self) -> None:
        while self._ends:
            ends_at, trial_id, attempt = self._ends[0]
            flight = self._flights.get(trial_id)
            if (
                flight is not None
                and flight.request.attempt == attempt
                and flight.ends_at == ends_at
            ):
                return
            heapq.heappop(self._ends)

    def _finish(
        self, flight: _SimulatedGang, rank: RankOutcome, failure: Failure | None, at: float
    ) -> Finished:
        trial_id = flight.request.trial_id
        del self._flights[trial_id]
        if flight.shape.slots_per_node < self._per_node:
            for node in flight.nodes:
                self._tenants[node].discard(trial_id)
        held = self._meter.ends(flight, at)
        self._meter.returned(flight, at)
        return Finished(
            trial_id=trial_id,
            reports=[
                NodeReport(
                    node=flight.nodes[0], ranks=[rank], failure=failure, seconds=at - flight.began
                )
            ],
            failure=failure,
            gpu_seconds=held,
            shared_nodes=flight.shares_nodes,
        )

    # -- nodes ---------------------------------------------------------------------------------------------------------------

    def _lose_a_node(self) -> list[SchedulerEvent]:
        at, node, times = heapq.heappop(self._losses)
        self._now = max(self._now, at + FOUND_SECONDS)
        back = self._now + NODE_AWAY_SECONDS
        heapq.heappush(self._returns, (back, node))
        heapq.heappush(self._losses, (back + self._runs_for(node, times), node, times + 1))
        self._slots = self._seen(
            {name: slots for name, slots in self._slots.nodes.items() if name != node}
        )
        failure = Failure(
            kind=FailureKind.NODE_LOST,
            message=f"lost the agent on node {node}: simulated",
            node=node,
        )
        self._nodes_return()
        lost = [flight for _, flight in sorted(self._flights.items()) if node in flight.nodes]
        return [self._finish(flight, RankOutcome(rank=0), failure, self._now) for flight in lost]

    def _nodes_return(self) -> None:
        while self._returns and self._returns[0][0] <= self._now:
            _, node = heapq.heappop(self._returns)
            self._slots = self._seen({**self._slots.nodes, node: self._nodes[node]})

    def _seen(self, nodes: Mapping[str, int]) -> Slots:
        return Slots(device=Device.CUDA, device_name=None, nodes=nodes)

    def _runs_for(self, node: str, times: int) -> float:
        """Seconds that a node runs until it is lost: exponential."""
        assert self._loss_hours is not None
        return -log(chance(self._seed, node, times)) * self._loss_hours * 3600


def _outcome(
    request: TrialRequest, options: SyntheticOptions, node: str, shape: Shape
) -> _SimulatedEnd:
    """Simulate a rank of workload synthetic phase by phase: how it ends and when, limits included."""
    hardware, limits = DEVICES[options.device_name], request.limits
    capacity = options.device_memory_bytes or hardware.memory_bytes
    needs = memory(request.model, request.layout, request.sequence_length)
    faults = [
        fault for fault in options.faults if fault.fault in _KINDS and _is_of(fault, request, shape)
    ]
    name = (request.seed, request.layout.key, request.attempt)
    phases = _launch_seconds(name, limits)
    place = _StrikePlace(request=request, node=node)

    def ends(at: str, needed_bytes: int) -> _SimulatedEnd | None:
        """The end of the attempt at this place, by a fault or for lack of memory; None: it goes on."""
        if (fault := next((fault for fault in faults if fault.at == at), None)) is not None:
            return place.struck(fault)
        return place.too_large(needed_bytes, capacity) if needed_bytes > capacity else None

    if late := place.spend(phases[Phase.START]):
        return late
    if request.layout.precision not in hardware.peak_flops:
        return place.refused(
            f"precision {request.layout.precision} is none that {hardware.name} (device_name) has"
        )
    place.enter(Phase.RENDEZVOUS)
    if over := ends("init", needs.init) or place.spend(phases[Phase.RENDEZVOUS]):
        return over
    place.enter(Phase.FIRST_STEP)
    if over := ends("forward", needs.forward) or ends("step_1", 0):
        return over
    warmup: list[float] = []
    timed: list[float] = []
    may_fail = bool(faults) or needs.step_2 > capacity
    for step, seconds in enumerate(noisy_steps(request, options, hardware), 1):
        if step > 1:
            place.step = step
            if may_fail and (over := ends(f"step_{step}", needs.step_2)):
                return over
        if over := place.spend(seconds if step > 1 else phases[Phase.FIRST_STEP] + seconds):
            return over
        if step == 1:
            place.enter(Phase.STEADY)
        (warmup if len(warmup) < request.measurement.warmup_steps else timed).append(seconds)
        if enough(timed, request.measurement):
            break
    place.phase = Phase.TEARDOWN
    teardown = phases[Phase.TEARDOWN]
    if (fault := next((fault for fault in faults if fault.at == "teardown"), None)) is not None:
        if fault.fault in _HARM_AFTER_THE_RESULT:
            return place.struck(fault)
        if _KINDS[fault.fault] is FailureKind.HUNG:
            teardown = limits.teardown
    phases[Phase.FIRST_STEP] += warmup[0]
    phases[Phase.STEADY] = sum(warmup[1:]) + sum(timed)
    phases[Phase.TEARDOWN] = min(teardown, limits.teardown) + CLEAN_UP_SECONDS
    result = RankResult(
        step_seconds=timed,
        warmup_seconds=warmup,
        phase_seconds=phases,
        peak_memory_allocated_bytes=needs.step_2,
        peak_memory_reserved_bytes=min(capacity, int(1.05 * needs.step_2)),
        device_memory_bytes=capacity,
        allocator_retries=0,
        peak_flops=hardware.peak_flops[request.layout.precision],
        peak_flops_source=f"table: {hardware.name}",
        stack=Stack(device_name=f"synthetic {hardware.name}"),
    )
    return _SimulatedEnd(
        seconds=place.held + phases[Phase.TEARDOWN],
        rank=RankOutcome(rank=0, exit_code=0, result=result, phase=Phase.TEARDOWN),
        failure=None,
    )


def _launch_seconds(name: tuple[object, ...], limits: PhaseLimits) -> dict[Phase, float]:
    """The phases of a launch without its steps. They are made up, so they never pass a limit: only steps do."""
    phases = {
        phase: min(
            seconds * log_normal(LAUNCH_SD, *name, phase), LAUNCH_SHARE * getattr(limits, phase)
        )
        for phase, seconds in PHASE_SECONDS.items()
    }
    if (together := sum(phases.values())) > LAUNCH_SHARE * limits.total:
        phases = {
            phase: seconds * LAUNCH_SHARE * limits.total / together
            for phase, seconds in phases.items()
        }
    return phases


def _is_of(fault: SyntheticFault, request: TrialRequest, shape: Shape) -> bool:
    """Say whether a fault strikes an existing rank of this attempt: where one rank stands for a node, the others do not exist."""
    rank = fault.rank or 0
    exists = rank < request.layout.world_size and not (
        request.one_rank_per_node and rank % shape.slots_per_node
    )
    return exists and strikes(fault, request, rank)


@dataclass(eq=False, kw_only=True, slots=True)
class _StrikePlace:
    """The place in its phases that an attempt has reached, and how it would end there."""

    request: TrialRequest
    node: str
    phase: Phase = Phase.START
    step: int = 0  # the one that has begun; 0 in the first, as a rank says it
    held: float = 0.0  # seconds since its start
    since: float = 0.0  # when the phase began
    seen: SeenSteps = NOTHING_SEEN

    def enter(self, phase: Phase) -> None:
        if phase is Phase.STEADY:
            self.seen = SeenSteps(first_seconds=self.held - self.since)
        self.phase, self.since = phase, self.held

    def spend(self, seconds: float) -> _SimulatedEnd | None:
        """Let time pass: the rest of a phase, or a step. Returns how the attempt ends where a limit comes first."""
        limits = self.request.limits
        base: float = getattr(limits, self.phase)
        # Seen steps can only raise a limit, so it is computed only here.
        if seconds > base or self.held + seconds > limits.total:
            within, passed = self._limit()
            if seconds > within:
                return self._hangs(0, within, passed)
        self.held += seconds
        if self.phase is Phase.STEADY and seconds > (self.seen.slowest_seconds or 0.0):
            self.seen = SeenSteps(first_seconds=self.seen.first_seconds, slowest_seconds=seconds)
        return None

    def struck(self, fault: SyntheticFault) -> _SimulatedEnd:
        """A fault on purpose strikes. A hang holds its gang until its limit has passed."""
        kind, rank = _KINDS[fault.fault], fault.rank or 0
        if kind is FailureKind.HUNG:
            within, passed = self._limit()
            return self._hangs(rank, within, passed)
        # The phase that its process reports.
        phase = Phase.TEARDOWN if fault.fault is FaultKind.RUBBISH_RESULT else self.phase
        message = f"rank {rank}: {fault.fault} in {phase}, on purpose"
        failure = Failure(
            kind=kind,
            message=message,
            rank=rank,
            node=self.node,
            phase=phase,
            step=self.step,
            memory=MemoryShortage(is_reported=True) if kind in OUT_OF_MEMORY_KINDS else None,
        )
        return self._failed(failure)

    def too_large(self, needed_bytes: int, capacity_bytes: int) -> _SimulatedEnd:
        wanted = needed_bytes - capacity_bytes
        said = out_of_memory_text(
            0, wanted_bytes=wanted, used_bytes=capacity_bytes, capacity_bytes=capacity_bytes
        )
        evidence = Evidence(
            rank=0,
            node=self.node,
            exception="OutOfMemoryError",
            message=said,
            phase=self.phase,
            step=self.step,
        )
        return self._failed(classify(evidence))

    def refused(self, why: str) -> _SimulatedEnd:
        message = f"rank 0 refused the layout in {self.phase}: {why}"
        return self._failed(
            Failure(
                kind=FailureKind.CONFIG_REJECTED,
                message=message,
                rank=0,
                node=self.node,
                phase=self.phase,
                step=0,
            )
        )

    def _limit(self) -> tuple[float, str]:
        """Seconds from now until a limit passes, and what is said of it then."""
        request, name = self.request, LimitName(self.phase)
        of_phase = limit_seconds(request, name, self.seen) - (
            0.0 if self.phase is Phase.STEADY else self.held - self.since
        )
        of_total = limit_seconds(request, LimitName.TOTAL, self.seen) - self.held
        if of_total < of_phase:
            return of_total, told_passed(request, LimitName.TOTAL, self.seen)
        return of_phase, told_passed(
            request, name, self.seen, step=self.step if self.phase is Phase.STEADY else None
        )

    def _hangs(self, rank: int, seconds: float, passed: str) -> _SimulatedEnd:
        self.held += max(seconds, 0.0)
        return self._failed(
            classify(
                Evidence(
                    rank=rank, node=self.node, timed_out=passed, phase=self.phase, step=self.step
                )
            )
        )

    def _failed(self, failure: Failure) -> _SimulatedEnd:
        phase = Phase(failure.phase or Phase.START)
        note = None
        if failure.kind is FailureKind.OOM_GPU:
            note = RankFailure(
                exception="OutOfMemoryError",
                message=failure.message,
                phase=phase,
                at_unix_seconds=0.0,
                out_of_memory=True,
            )
        rank = RankOutcome(rank=failure.rank or 0, exit_code=1, failure=note, phase=phase)
        return _SimulatedEnd(seconds=self.held + CLEAN_UP_SECONDS, rank=rank, failure=failure)
