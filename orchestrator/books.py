"""What became of trials: written into the store, told to their cell's search, and counted. It decides nothing about what comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from db.rows import TrialRow
from db.store import Store
from orchestrator.blame import Blame
from orchestrator.cell_run import CellRun
from orchestrator.core.failures import OUT_OF_MEMORY_KINDS, POLICIES, Failure, FailureKind, Fault, may_retry, proves_out_of_memory
from orchestrator.core.fingerprint import Fingerprint, Stack
from orchestrator.core.layout import Layout
from orchestrator.core.lifecycle import TrialEvent, TrialState
from orchestrator.core.measurement import ImplausibleMeasurement, Measurement
from orchestrator.core.protocol import Device, Phase, RankResult
from orchestrator.core.spec import SweepSpec
from orchestrator.core.winner import Run
from orchestrator.evidence import attempt_facts, failed_memory, gpu_usage, relative_excess, worst_parts
from orchestrator.gang import Finished, Slots
from orchestrator.peaks import Peaks
from orchestrator.provenance import with_stack
from orchestrator.searcher import Failed, Measured, OutOfMemory


@dataclass(eq=False, kw_only=True)
class Flight:
    """One attempt under way."""

    run: CellRun
    trial_id: int
    layout: Layout
    attempt: int
    ticket: int  # of what it holds on the cluster (turns.py)
    since: float
    is_repeat: bool  # of what is measured: its trial's state stays as it is
    phase: Phase | None = None
    step: int = 0
    stepped: bool = False  # FIRST_STEP is in the store


class Books:
    """Of one call of `run_sweep`."""

    def __init__(self, spec: SweepSpec, sweep_id: int, epoch: int, *, store: Store, slots: Slots, code: Fingerprint) -> None:
        self._spec, self._sweep_id, self._epoch, self._store, self._slots, self._code = spec, sweep_id, epoch, store, slots, code
        self.counts: Counter[TrialState] = Counter()  # trials of the sweep in the store
        self.fingerprints: set[str] = set()
        self.gpu_seconds = sum(status.gpu_seconds for status in store.status(sweep_id))  # of earlier calls, what was reaped included
        self.peaks = Peaks(store.measured_peaks(sweep_id), device_name=slots.device_name)
        self.blame = Blame(spec.name)

    def take_up(self, trials: Sequence[TrialRow]) -> None:
        """Count what earlier calls left."""
        self.counts.update(trial.state for trial in trials)
        self.fingerprints.update(t.fingerprint_digest for t in trials if t.fingerprint_digest is not None)

    def launched(self, *, is_new: bool) -> None:
        """A trial that waited, or was not there yet, is being launched."""
        if not is_new:
            self.counts[TrialState.QUEUED] -= 1
        self.counts[TrialState.LAUNCHING] += 1

    def progressed(self, flight: Flight) -> None:
        """Note the first step of an attempt, once."""
        if not flight.stepped and not flight.is_repeat and flight.phase in (Phase.STEADY, Phase.TEARDOWN):
            flight.stepped = True
            self._store.transition(flight.trial_id, TrialEvent.FIRST_STEP, epoch=self._epoch, attempt=flight.attempt)
            self._move(TrialState.LAUNCHING, TrialState.RUNNING)

    def ended(self, flight: Flight, event: Finished) -> str:
        """Write down how an attempt ended, whatever became of it. Returns it in words."""
        self.gpu_seconds += event.gpu_seconds
        failure = event.failure
        results = [outcome.result for report in event.reports for outcome in report.ranks if outcome.result is not None]
        measurement: Measurement | None = None
        if failure is None and not results:
            failure = Failure(kind=FailureKind.BAD_RESULT, message="every rank ended well, and none left a result")
        if failure is None:
            try:
                measurement = self.peaks.measure(
                    event.reports,
                    model=flight.run.cell.model,
                    sequence_length=flight.run.cell.sequence_length,
                    layout=flight.layout,
                    plan=self._spec.measurement.plan,
                )
            except ImplausibleMeasurement as exc:
                failure = Failure(kind=FailureKind.BAD_RESULT, message=str(exc))
        if measurement is not None:
            return self._measured(flight, event, results, measurement)
        assert failure is not None
        return self._failed(flight, event, results, failure)

    def prune(self, run: CellRun, layouts: Sequence[Layout], proof_id: int, proof: Layout) -> None:
        """Write down what an out-of-memory proves of others, without launching them."""
        if layouts:
            why = f"needs at least the memory of trial {proof_id} ({proof.short}), which ran out of it"
            pruned = self._store.add_pruned(run.id, [(layout, why) for layout in layouts], condemned_by=proof_id, epoch=self._epoch)
            self.counts[TrialState.PRUNED] += pruned
            self.counts[TrialState.QUEUED] -= len(run.added & set(layouts))
            run.added -= set(layouts)

    def _measured(self, flight: Flight, event: Finished, results: Sequence[RankResult], measurement: Measurement) -> str:
        fingerprint = with_stack(self._code, self._stack_of(results))
        counts = self._store.record_measurement(
            flight.trial_id,
            flight.attempt,
            epoch=self._epoch,
            measurement=measurement,
            gpu=gpu_usage(event.reports),
            memory_by_part=worst_parts(results),
            **attempt_facts(event, results, fingerprint),
        )
        self.fingerprints.add(fingerprint.digest)
        precision, device_name = flight.layout.precision, fingerprint.stack.device_name
        self.peaks.note(event.reports, measurement, precision=precision, device_name=device_name)
        self.blame.note_measured()
        run, trial_id, layout = flight.run, flight.trial_id, flight.layout
        taken = Run(step_seconds=measurement.step_time.median, relative_confidence=measurement.step_time.relative_confidence)
        if not flight.is_repeat:
            self._move(TrialState.RUNNING if flight.stepped else TrialState.LAUNCHING, TrialState.MEASURED)
            if run.fingerprint in (None, fingerprint.digest):
                run.note_measured(trial_id, layout, taken)
            else:  # numbers of another fingerprint are shown apart, and nobody compares with them from now on
                run.take_up(self._store.trials(self._sweep_id, cell_id=run.id), self._store.repeats(run.id))
            run.fingerprint = fingerprint.digest
        elif counts:
            run.contest.note(trial_id, layout, taken)
        else:
            run.contest.end(trial_id)
        if counts:
            peak = measurement.peak_memory_reserved_bytes or measurement.peak_memory_allocated_bytes
            run.searcher.tell(layout, Measured(value=run.value_of(run.contest.seconds_of(trial_id)), peak_memory_bytes=peak))
        mfu = f", MFU {measurement.mfu:.1%}" if measurement.mfu is not None else ""
        return f"{measurement.tokens_per_second_per_gpu:,.0f} tokens/s/GPU{mfu}"

    def _failed(self, flight: Flight, event: Finished, results: Sequence[RankResult], failure: Failure) -> str:
        outcome = self._outcome_of(flight, failure)
        self.blame.note_failure(failure)
        peak, device = failed_memory(event.reports)
        self._store.record_failure(
            flight.trial_id,
            flight.attempt,
            epoch=self._epoch,
            failure=failure,
            event=outcome,
            peak_memory_bytes=peak,
            device_memory_bytes=device,
            **attempt_facts(event, results, with_stack(self._code, self._stack_of(results)) if results else None),
        )
        if flight.is_repeat:
            return f"measured before; once more it failed, {failure.kind}: {failure.message}"
        before = TrialState.RUNNING if flight.stepped else TrialState.LAUNCHING
        searcher, layout = flight.run.searcher, flight.layout
        match outcome:
            case TrialEvent.OUT_OF_MEMORY:
                self._move(before, TrialState.OUT_OF_MEMORY)
                flight.run.note_infeasible()
                flight.run.take_back()
                proves = proves_out_of_memory(failure, on_cpu=self._slots.device is Device.CPU)
                excess = relative_excess(peak, device, failure.message)
                condemned = searcher.tell(layout, OutOfMemory(excess=excess), proves=proves)
                self.prune(flight.run, condemned, flight.trial_id, layout)
                flight.run.nothing_fits = searcher.nothing_fits()
                return f"out of memory{f'; {len(condemned)} more cannot fit' if condemned else ''}"
            case TrialEvent.REQUEUED:
                self._move(before, TrialState.QUEUED)
                flight.run.wait(self._store.trial(flight.trial_id).trial)
                flight.run.needs_own_nodes |= failure.kind is FailureKind.OOM_HOST
                why = "cancelled" if failure.kind is FailureKind.CANCELLED else f"{failure.kind}: {failure.message}"
                return f"{why}; waits for another attempt"
            case _:
                self._move(before, TrialState.FAILED)
                flight.run.note_infeasible()
                if POLICIES[failure.kind].fault is not Fault.MACHINE:
                    searcher.tell(layout, Failed())
                # Else it says nothing of the layout; in flight for the search, it is not asked for again.
                where = f" (log: {failure.log_path})" if failure.log_path else ""
                return f"failed, {failure.kind}: {failure.message}{where}"

    def _outcome_of(self, flight: Flight, failure: Failure) -> TrialEvent:
        if flight.is_repeat:
            again = flight.run.contest.fail(flight.trial_id, failure.kind)
        elif failure.kind is FailureKind.CANCELLED:
            again = True  # asked to stop: the trial waits for the next call rather than being given up
        else:
            earlier = Counter(self._store.failure_counts(flight.trial_id))
            earlier[failure.kind] += 1
            again = may_retry(failure.kind, earlier)
        if again:
            return TrialEvent.REQUEUED
        return TrialEvent.OUT_OF_MEMORY if failure.kind in OUT_OF_MEMORY_KINDS else TrialEvent.FAILED

    def _stack_of(self, results: Sequence[RankResult]) -> Stack:
        """As the ranks saw it; a foreign program that says nothing of its device ran on the cluster's."""
        stack = results[0].stack
        return stack if stack.device_name is not None else stack.model_copy(update={"device_name": self._slots.device_name})

    def _move(self, before: TrialState, after: TrialState) -> None:
        self.counts[before] -= 1
        self.counts[after] += 1
