"""Simulates one attempt of workload synthetic phase by phase: how it ends, and when.

One rank represents the gang. Nothing is started, and no time passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.machines.packing import Shape
from orchestrator.core.pretend.synthetic import (
    log_normal,
    memory,
    noisy_steps,
    out_of_memory_text,
    strikes,
)
from orchestrator.core.problem.hardware import DEVICES, Hardware
from orchestrator.core.sweepfile.synthetic_options import (
    FaultKind,
    SyntheticFault,
    SyntheticOptions,
)
from orchestrator.core.trial.failure_kinds import (
    OUT_OF_MEMORY_KINDS,
    Failure,
    FailureKind,
    MemoryShortage,
)
from orchestrator.core.trial.failures import Evidence, classify
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.limits import NOTHING_SEEN, SeenSteps, limit_seconds, passed_message
from orchestrator.core.trial.node_report import RankOutcome
from orchestrator.core.trial.protocol import (
    LimitName,
    Phase,
    PhaseLimits,
    RankFailure,
    RankResult,
    TrialRequest,
)
from orchestrator.core.trial.stopping import Timing, advance_timing, begin

# The phases take 60 s together without the steps (core/trial/measurement.py: LAUNCH_SECONDS), each
# with a log-normal error.
PHASE_SECONDS: Mapping[Phase, float] = {
    Phase.START: 10.0,
    Phase.RENDEZVOUS: 30.0,
    Phase.FIRST_STEP: 10.0,
    Phase.TEARDOWN: 5.0,
}
CLEAN_UP_SECONDS = 5.0
LAUNCH_SD = 0.2
LAUNCH_SHARE = 0.5  # of a limit at most

# The failure that an injected fault leads to; all others do no harm.
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
# Once it has a result, how a process ends no longer matters; but it may overwrite the result.
_HARM_AFTER_THE_RESULT = frozenset({FaultKind.RUBBISH_RESULT})


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedEnd:
    """The future end of an attempt, and its time."""

    seconds: float
    rank: RankOutcome
    failure: Failure | None


def simulate_attempt(
    request: TrialRequest, options: SyntheticOptions, node: str, shape: Shape
) -> SimulatedEnd:
    """Return the end of an attempt, by its last step, a fault, its memory or a limit."""
    hardware, limits = DEVICES[options.device_name], request.limits
    capacity = options.device_memory_bytes or hardware.memory_bytes
    needs = memory(request.model, request.layout, request.sequence_length)
    harmful = (fault for fault in options.faults if fault.fault in _KINDS)
    faults = [fault for fault in harmful if _strikes_rank(fault, request, shape)]
    name = (request.seed, request.layout.key, request.attempt)
    phases = _launch_seconds(name, limits)
    rank = _Position(request=request, node=node)

    def ends(at: str, needed_bytes: int) -> SimulatedEnd | None:
        """Return the end by a fault or an out-of-memory in this phase; None if there is none."""
        if (fault := next((fault for fault in faults if fault.at == at), None)) is not None:
            return rank.struck(fault)
        return rank.too_large(needed_bytes, capacity) if needed_bytes > capacity else None

    if late := rank.spend(phases[Phase.START]):
        return late
    if request.layout.precision not in hardware.peak_flops:
        return rank.refused(
            f"precision {request.layout.precision} is none that {hardware.name} (device_name) has"
        )
    rank.enter(Phase.RENDEZVOUS)
    if over := ends("init", needs.init) or rank.spend(phases[Phase.RENDEZVOUS]):
        return over
    rank.enter(Phase.FIRST_STEP)
    if over := ends("forward", needs.forward) or ends("step_1", 0):
        return over
    samples: list[float] = []
    timing = begin(request.measurement)
    may_fail = bool(faults) or needs.step_2 > capacity
    for step, seconds in enumerate(noisy_steps(request, options, hardware), 1):
        if step > 1:
            rank.step = step
            if may_fail and (over := ends(f"step_{step}", needs.step_2)):
                return over
        if over := rank.spend(seconds if step > 1 else phases[Phase.FIRST_STEP] + seconds):
            return over
        if step == 1:
            rank.enter(Phase.STEADY)
        samples.append(seconds)
        timing = advance_timing(timing, samples, request.measurement)
        if timing.is_enough:
            break
    rank.phase = Phase.TEARDOWN
    if (fault := next((fault for fault in faults if fault.at == "teardown"), None)) is not None:
        if fault.fault in _HARM_AFTER_THE_RESULT:
            return rank.struck(fault)
        if _KINDS[fault.fault] is FailureKind.HUNG:
            phases[Phase.TEARDOWN] = limits.teardown
    result = _result(
        request,
        hardware,
        needed_bytes=needs.step_2,
        capacity_bytes=capacity,
        samples=samples,
        timing=timing,
        launch_seconds=phases,
    )
    return SimulatedEnd(
        seconds=rank.passed + result.phase_seconds[Phase.TEARDOWN],
        rank=RankOutcome(rank=0, exit_code=0, result=result, phase=Phase.TEARDOWN),
        failure=None,
    )


def _launch_seconds(name: tuple[object, ...], limits: PhaseLimits) -> dict[Phase, float]:
    """Return the phases of a launch without its steps, which alone may pass a limit."""
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


def _result(
    request: TrialRequest,
    hardware: Hardware,
    *,
    needed_bytes: int,
    capacity_bytes: int,
    samples: list[float],
    timing: Timing,
    launch_seconds: Mapping[Phase, float],
) -> RankResult:
    """Return what the rank reports after its last step. `launch_seconds` has no steps in it."""
    warmup, timed = samples[: timing.num_warmup], samples[timing.num_warmup :]
    teardown = min(launch_seconds[Phase.TEARDOWN], request.limits.teardown)
    return RankResult(
        step_seconds=timed,
        warmup_seconds=warmup,
        step_seconds_bound=timing.bound,
        phase_seconds={
            **launch_seconds,
            Phase.FIRST_STEP: launch_seconds[Phase.FIRST_STEP] + warmup[0],
            Phase.STEADY: sum(warmup[1:]) + sum(timed),
            Phase.TEARDOWN: teardown + CLEAN_UP_SECONDS,
        },
        peak_memory_allocated_bytes=needed_bytes,
        peak_memory_reserved_bytes=min(capacity_bytes, int(1.05 * needed_bytes)),
        device_memory_bytes=capacity_bytes,
        allocator_retries=0,
        peak_flops=hardware.peak_flops[request.layout.precision],
        peak_flops_source=f"table: {hardware.name}",
        stack=Stack(device_name=f"synthetic {hardware.name}"),
    )


def _strikes_rank(fault: SyntheticFault, request: TrialRequest, shape: Shape) -> bool:
    """Return whether a fault strikes a rank that exists: some nodes have only their first one."""
    rank = fault.rank or 0
    is_first = rank % shape.slots_per_node == 0
    exists = rank < request.layout.world_size and (is_first or not request.one_rank_per_node)
    return exists and strikes(fault, request, rank)


@dataclass(eq=False, kw_only=True, slots=True)
class _Position:
    """The phase and step that an attempt has reached, and how it would end there."""

    request: TrialRequest
    node: str
    phase: Phase = Phase.START
    step: int = 0  # begun; 0 in the first one
    passed: float = 0.0  # seconds since the start
    since: float = 0.0  # when the phase began
    seen: SeenSteps = NOTHING_SEEN

    def enter(self, phase: Phase) -> None:
        if phase is Phase.STEADY:
            self.seen = SeenSteps(first_seconds=self.passed - self.since)
        self.phase, self.since = phase, self.passed

    def spend(self, seconds: float) -> SimulatedEnd | None:
        """Let the rest of a phase or a step pass. Returns the end if a limit comes first."""
        limits = self.request.limits
        base: float = getattr(limits, self.phase)
        # Observed steps can only raise a limit, so the exact limit is computed only here.
        if seconds > base or self.passed + seconds > limits.total:
            until_limit, name, text = self._limit()
            if seconds > until_limit:
                return self._hangs(0, until_limit, name, text)
        self.passed += seconds
        if self.phase is Phase.STEADY and seconds > (self.seen.slowest_seconds or 0.0):
            self.seen = SeenSteps(first_seconds=self.seen.first_seconds, slowest_seconds=seconds)
        return None

    def struck(self, fault: SyntheticFault) -> SimulatedEnd:
        """Return the end by an injected fault. A hang lasts until a limit."""
        kind, rank = _KINDS[fault.fault], fault.rank or 0
        if kind is FailureKind.HUNG:
            return self._hangs(rank, *self._limit())
        # The phase that the process reports.
        phase = Phase.TEARDOWN if fault.fault is FaultKind.RUBBISH_RESULT else self.phase
        message = f"rank {rank}: {fault.fault} in {phase}, on purpose"
        return self._failed(kind, message, rank=rank, phase=phase)

    def too_large(self, needed_bytes: int, capacity_bytes: int) -> SimulatedEnd:
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
        return self._end(classify(evidence))

    def refused(self, why: str) -> SimulatedEnd:
        message = f"rank 0 refused the layout in {self.phase}: {why}"
        return self._failed(FailureKind.CONFIG_REJECTED, message)

    def _limit(self) -> tuple[float, LimitName, str]:
        """Return the seconds until the next limit, its name, and the text about passing it."""
        request, name = self.request, LimitName(self.phase)
        is_steady = self.phase is Phase.STEADY
        in_phase = 0.0 if is_steady else self.passed - self.since
        of_phase = limit_seconds(request, name, self.seen) - in_phase
        of_total = limit_seconds(request, LimitName.TOTAL, self.seen) - self.passed
        if of_total < of_phase:
            text = passed_message(request, LimitName.TOTAL, self.seen)
            return of_total, LimitName.TOTAL, text
        step = self.step if is_steady else None
        return of_phase, name, passed_message(request, name, self.seen, step=step)

    def _hangs(self, rank: int, seconds: float, name: LimitName, text: str) -> SimulatedEnd:
        self.passed += max(seconds, 0.0)
        evidence = Evidence(
            rank=rank,
            node=self.node,
            timed_out=text,
            passed_total_limit=name is LimitName.TOTAL,
            phase=self.phase,
            step=self.step,
        )
        return self._end(classify(evidence))

    def _failed(
        self,
        kind: FailureKind,
        message: str,
        *,
        rank: int = 0,
        phase: Phase | None = None,
    ) -> SimulatedEnd:
        return self._end(
            Failure(
                kind=kind,
                message=message,
                rank=rank,
                node=self.node,
                phase=phase or self.phase,
                step=self.step,
                memory=MemoryShortage(is_reported=True) if kind in OUT_OF_MEMORY_KINDS else None,
            )
        )

    def _end(self, failure: Failure) -> SimulatedEnd:
        phase, note = Phase(failure.phase or Phase.START), None
        if failure.kind is FailureKind.OOM_GPU:
            note = RankFailure(
                exception="OutOfMemoryError",
                message=failure.message,
                phase=phase,
                at_unix_seconds=0.0,
                out_of_memory=True,
            )
        rank = RankOutcome(rank=failure.rank or 0, exit_code=1, failure=note, phase=phase)
        return SimulatedEnd(seconds=self.passed + CLEAN_UP_SECONDS, rank=rank, failure=failure)
