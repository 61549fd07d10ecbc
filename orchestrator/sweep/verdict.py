"""Judges an attempt by the reports of its nodes: a measurement or a failure.

The same function judges an attempt that ends now and one whose end an earlier orchestrator left on
disk. It writes nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from db.write.writes import NO_USAGE, AttemptFacts, Ended, FailedEnd, MeasuredEnd
from orchestrator.cluster.contract import Finished
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.communication import counted, over_nodes
from orchestrator.core.trial.failure_kinds import (
    POLICIES,
    Failure,
    FailureKind,
    Fault,
    MemoryShortage,
)
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.machine_load import of_gang
from orchestrator.core.trial.measurement import (
    ImplausibleMeasurement,
    Measurement,
    with_driver_memory,
)
from orchestrator.core.trial.node_report import GpuUsage, NodeReport
from orchestrator.core.trial.plausibility import judge_groups, judge_run
from orchestrator.core.trial.protocol import MeasurementPlan, Phase, RankResult
from orchestrator.core.trial.reserved_time import step_seconds_within
from orchestrator.core.trial.unchecked import why_unchecked
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.provenance import measured_with

_EDITED = Failure(
    kind=FailureKind.EDITED,
    message="the program was edited after its start, and before the check for edits that follows"
    " its first step, so which code ran is not known",
)
_OF_PROGRAM = (Fault.LAYOUT, Fault.CODE)


@dataclass(frozen=True, kw_only=True)
class AttemptVerdict:
    """The judgement of an attempt."""

    outcome: Measurement | Failure
    # Software and device of the attempt; None: no rank left a result.
    fingerprint: Fingerprint | None
    facts: AttemptFacts
    gpu: GpuUsage
    memory_by_part: Mapping[str, int] | None
    # If a rank ran out of memory: the bytes that it had allocated, and its device's memory.
    peak_memory_bytes: int | None = None
    device_memory_bytes: int | None = None

    def ended(
        self, trial_id: int, attempt: int, *, event: TrialEvent, stepped: bool = False
    ) -> Ended:
        """Return the end of the attempt in the form that the store takes.

        `event`: what happens to the trial if its attempt failed.
        """
        outcome: MeasuredEnd | FailedEnd
        if isinstance(self.outcome, Measurement):
            outcome = MeasuredEnd(
                measurement=self.outcome, gpu=self.gpu, memory_by_part=self.memory_by_part
            )
        else:
            outcome = FailedEnd(
                failure=self.outcome,
                event=event,
                peak_memory_bytes=self.peak_memory_bytes,
                device_memory_bytes=self.device_memory_bytes,
            )
        return Ended(
            trial_id=trial_id, attempt=attempt, outcome=outcome, stepped=stepped, facts=self.facts
        )


def judge_attempt(
    end: Finished,
    *,
    cell: Cell,
    layout: Layout,
    plan: MeasurementPlan,
    peaks: MeasuredPeaks,
    code: Fingerprint,
    device_name: str | None,
    was_edited: bool = False,
    is_repeat: bool = False,
    at: dt.datetime | None = None,
    not_passed: str | None = None,
) -> AttemptVerdict:
    """Judge how an attempt of a layout ended.

    `code` is that at its start; `was_edited`: another one was found when it was checked after the
    first step. `device_name` is the cluster's, for ranks that do not name theirs. A repeat whose
    numbers cannot be true is a bad result: the earlier measurement of its trial still counts. `at`:
    when it ended, by the sweep's clock; None: the store's clock counts. `not_passed`: what varies
    in the sweep and may not reach the program.
    """
    results = end.results
    outcome = _outcome(end, results, cell=cell, layout=layout, plan=plan, peaks=peaks)
    if not_passed is not None and isinstance(outcome, Measurement) and not outcome.implausible:
        reasons = (outcome.unchecked, not_passed)
        outcome = replace(outcome, unchecked="; and ".join(filter(None, reasons)))
    if was_edited and _is_of_program(outcome):
        # It is not known which code gave these numbers.
        outcome, results = _EDITED, ()
    if is_repeat and isinstance(outcome, Measurement) and outcome.implausible is not None:
        outcome = Failure(kind=FailureKind.BAD_RESULT, message=outcome.implausible)
    measurement = outcome if isinstance(outcome, Measurement) else None
    fingerprint = (
        fingerprint_of(end, results, code=code, device_name=device_name) if results else None
    )
    peak, device = failed_memory(end.reports)
    facts = attempt_facts(
        end, results, fingerprint, num_gpus=cell.num_gpus, measurement=measurement
    )
    return AttemptVerdict(
        outcome=outcome,
        fingerprint=fingerprint,
        facts=facts if at is None else {**facts, "measured_at": at},
        gpu=gpu_usage(end.reports),
        memory_by_part=worst_parts(results),
        peak_memory_bytes=peak,
        device_memory_bytes=device,
    )


def judge_refused(
    end: Finished, exc: Exception, *, num_gpus: int, at: dt.datetime
) -> AttemptVerdict:
    """Judge an attempt without what its ranks wrote, since the store refuses a part of it."""
    said = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    failure = Failure(
        kind=FailureKind.BAD_RESULT, message=f"the database refuses how it ended: {said}"
    )
    left = replace(end, reports=(), failure=failure)
    facts = attempt_facts(left, (), None, num_gpus=num_gpus)
    return AttemptVerdict(
        outcome=failure,
        fingerprint=None,
        facts={**facts, "measured_at": at},
        gpu=NO_USAGE,
        memory_by_part=None,
    )


def _is_of_program(outcome: Measurement | Failure) -> bool:
    """Return whether the program decides it; not its machine, and not we who ended it."""
    return isinstance(outcome, Measurement) or POLICIES[outcome.kind].fault in _OF_PROGRAM


def _outcome(
    end: Finished,
    results: Sequence[RankResult],
    *,
    cell: Cell,
    layout: Layout,
    plan: MeasurementPlan,
    peaks: MeasuredPeaks,
) -> Measurement | Failure:
    if end.failure is not None:
        return end.failure
    if not any(result.step_seconds for result in results):
        return Failure(
            kind=FailureKind.BAD_RESULT, message="every rank ended well, and none left a result"
        )
    length, load = cell.sequence_length, of_gang(report.load for report in end.reports)
    try:
        reasons = [
            judge_run(result, layout=layout, sequence_length=length, plan=plan, load=load)
            or judge_groups(result)
            for result in results
        ]
        measurement = peaks.measure(
            end.reports,
            model=cell.model,
            sequence_length=cell.sequence_length,
            layout=layout,
            plan=plan,
        )
    except ImplausibleMeasurement as exc:
        return Failure(kind=FailureKind.BAD_RESULT, message=str(exc))
    reason = next((one for one in reasons if one is not None), None)
    if reason is not None:
        measurement = replace(measurement, implausible=reason, confident=False)
    else:
        unchecked = (why_unchecked(result) for result in results)
        measurement = replace(
            measurement, unchecked=next((one for one in unchecked if one is not None), None)
        )
    return with_driver_memory(measurement, end.reports)


def attempt_facts(
    event: Finished,
    results: Sequence[RankResult],
    fingerprint: Fingerprint | None,
    *,
    num_gpus: int,
    measurement: Measurement | None = None,
) -> AttemptFacts:
    """Return the cost of an attempt. A phase took as long as the slowest rank's."""
    told = [said.phase_seconds for said in results]
    # Ranks of a failed attempt have no result. Their notes have the phases until they failed, else
    # their launchers.
    for outcome in (one for report in event.reports if not results for one in report.ranks):
        noted = outcome.failure.phase_seconds if outcome.failure is not None else {}
        told.append(noted or dict(outcome.phase_seconds))
    phases: dict[Phase, float] = {}
    for each in told:
        for phase, seconds in each.items():
            phases[phase] = max(seconds, phases.get(phase, 0.0))
    teardowns = [
        report.teardown_seconds for report in event.reports if report.teardown_seconds is not None
    ]
    # A rank times its teardown only until it has handed over its result; launchers time the rest.
    if results and teardowns:
        phases[Phase.TEARDOWN] = phases.get(Phase.TEARDOWN, 0.0) + max(teardowns)
    facts = AttemptFacts(
        phases=phases,
        fingerprint=fingerprint,
        shared_nodes=event.shared_nodes,
        gpu_seconds=event.gpu_seconds,
        environment=over_nodes({report.node: report.environment for report in event.reports}),
        processes_killed=sum(report.processes_killed for report in event.reports),
        load=of_gang(report.load for report in event.reports),
        bound_cpus={
            report.node: report.bound_cpus for report in event.reports if report.bound_cpus
        },
    )
    if measurement is not None:
        timed, warmup = step_seconds_within(
            event.gpu_seconds / num_gpus,
            timed=measurement.step_seconds,
            results=results,
            phases=phases,
        )
        facts |= {"timed_seconds": timed, "warmup_seconds": warmup}
    return facts


def fingerprint_of(
    event: Finished, results: Sequence[RankResult], *, code: Fingerprint, device_name: str | None
) -> Fingerprint:
    """Return the fingerprint of an attempt, as its ranks saw it.

    Its launcher adds what a user's program does not report. A device without a name is the
    cluster's.
    """
    # The interface of rank 0's node; another node may name its own otherwise.
    first = event.reports[0]
    told = results[0].stack.model_dump(exclude_none=True)
    stack = first.software.stack.model_copy(update=told)
    if stack.device_name is None:
        stack = stack.model_copy(update={"device_name": device_name})
    return measured_with(
        code,
        stack,
        counted(first.environment, by_launcher=first.set_by_launcher),
        first.software.packages,
    )


def gpu_usage(reports: Sequence[NodeReport]) -> GpuUsage:
    """Return the mean over nodes that could tell, the energy of all, and the slowest clock."""
    told = [report.gpu for report in reports if report.gpu.num_samples]
    energies = [g.energy_joules for g in told if g.energy_joules is not None]
    return GpuUsage(
        busy=_mean([g.busy for g in told]),
        power_watts=_mean([g.power_watts for g in told]),
        energy_joules=sum(energies) if energies and len(energies) == len(reports) else None,
        clock_mhz=_least([g.clock_mhz for g in told]),
        lowest_clock_mhz=_least([g.lowest_clock_mhz for g in told]),
        sm_activity=_mean([g.sm_activity for g in told]),
        tensor_activity=_mean([g.tensor_activity for g in told]),
        dram_activity=_mean([g.dram_activity for g in told]),
        num_samples=sum(g.num_samples for g in told),
        peak_memory_bytes=max(
            (m for report in reports if (m := report.gpu.peak_memory_bytes) is not None),
            default=None,
        ),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _least(values: Sequence[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)


def worst_parts(results: Sequence[RankResult]) -> dict[str, int] | None:
    """Return the parts of the rank that held most, so that they add up."""
    return (
        max(
            (r.memory_bytes_by_part for r in results),
            key=lambda parts: sum(parts.values()),
            default=None,
        )
        or None
    )


def failed_memory(reports: Sequence[NodeReport]) -> tuple[int | None, int | None]:
    """Return the bytes that the rank out of memory had allocated, and its device's."""
    notes = [
        o.failure
        for r in reports
        for o in r.ranks
        if o.failure is not None and o.failure.out_of_memory
    ]
    return (
        (notes[0].peak_memory_allocated_bytes, notes[0].device_memory_bytes)
        if notes
        else (None, None)
    )


def relative_excess(
    peak_bytes: int | None, device_bytes: int | None, memory: MemoryShortage | None
) -> float | None:
    """Return how far over its device a failed run is known to have been, relative.

    That counts the allocation that failed on top of what it then held. None if that is
    less than the device has, since the rest of the allocator's memory is unknown.
    """
    needed = peak_bytes or 0
    if memory is not None and memory.asked_bytes is not None:
        held = peak_bytes if memory.live_bytes is None else memory.live_bytes
        needed = max(needed, held + memory.asked_bytes if held is not None else 0)
        device_bytes = device_bytes or memory.device_bytes
    return needed / device_bytes - 1 if device_bytes and needed > device_bytes else None
