"""Records how attempts end: in the store, in their cell's search, in the counts. It decides nothing about what comes next."""

from __future__ import annotations

import datetime as dt
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from db.read.rows import TrialRow
from db.store import REFUSED, Store
from db.write.writes import NO_USAGE, AttemptFacts, Ended, Pruned, Recorded
from orchestrator.cluster.contract import Finished, Slots
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.proofs import MemoryProof
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.drift import Run
from orchestrator.core.trial.failure_kinds import (
    HANG_KINDS,
    POLICIES,
    Failure,
    FailureKind,
    Fault,
    event_after,
)
from orchestrator.core.trial.failures import proves_out_of_memory
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.machine_load import of_gang, relative_sd, said_of
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.protocol import Device, Phase
from orchestrator.core.trial.purpose import REPEATS, Purpose
from orchestrator.search.searcher import Failed, Measured, OutOfMemory
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.stop_rules import StopRules
from orchestrator.sweep.verdict import AttemptVerdict, attempt_facts, judge_attempt, relative_excess

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Flight:
    """One attempt under way."""

    run: CellSearch
    trial_id: int
    layout: Layout
    attempt: int
    nodes: tuple[str, ...]
    ticket: int  # of what it holds on the cluster (placement.py)
    since: float
    expected_gpu_seconds: float | None  # that it should hold; None: nothing tells
    purpose: Purpose
    phase: Phase | None = None
    step: int = 0
    stepped: bool = False  # FIRST_STEP is in the store

    @property
    def is_repeat(self) -> bool:
        """True for an attempt of a measured trial, whose state stays as it is."""
        return self.purpose in REPEATS

    @property
    def made_first_step(self) -> bool:
        """Whether it is known to have, and its trial's state says so. A repeat's does not."""
        return not self.is_repeat and self.phase in (Phase.STEADY, Phase.TEARDOWN)

    @property
    def state(self) -> TrialState:
        """The state of its trial in the store, while it runs and is no repeat."""
        return TrialState.RUNNING if self.stepped else TrialState.LAUNCHING


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How one attempt ended, before anybody was told."""

    flight: Flight
    event: Finished
    verdict: AttemptVerdict
    at: dt.datetime  # by the clock that the sweep goes by

    @property
    def outcome(self) -> Measurement | Failure:
        return self.verdict.outcome


class Outcomes:
    """Records the attempts of one call of `run_sweep`, and counts its trials."""

    def __init__(
        self,
        spec: SweepSpec,
        sweep_id: int,
        epoch: int,
        *,
        store: Store,
        slots: Slots,
        code: Fingerprint,
    ) -> None:
        self._spec, self._sweep_id, self._epoch, self._store, self._slots, self._code = (
            spec,
            sweep_id,
            epoch,
            store,
            slots,
            code,
        )
        self.counts: Counter[TrialState] = Counter()  # trials of the sweep in the store
        self.fingerprints: set[str] = set()
        self.peaks = MeasuredPeaks(store.measured_peaks(sweep_id), device_name=slots.device_name)
        self.stop_rules = StopRules(spec.name)
        self._plan = spec.measurement.plan
        self._condemned: list[Pruned] = []  # proven, and not written yet
        self._dominance = f"search.dominance is {spec.dominance}"
        self._is_load_told = False  # since an attempt that no load disturbed

    def take_up(self, run: CellSearch) -> None:
        """Have a cell go on from what earlier calls left of it, and count that."""
        trials = self._take_up(run)
        self.counts.update(trial.state for trial in trials)
        self.fingerprints.update(
            t.fingerprint_digest for t in trials if t.fingerprint_digest is not None
        )
        self._write_condemned()

    def recount(self, trials: Sequence[TrialRow]) -> None:
        """Count anew all trials of the sweep: some wait again."""
        self.counts = Counter(trial.state for trial in trials)

    def launched(self, *, is_new: bool) -> None:
        """A trial that waited, or was not there yet, is being launched."""
        if not is_new:
            self.counts[TrialState.QUEUED] -= 1
        self.counts[TrialState.LAUNCHING] += 1

    def progressed(self, flights: Iterable[Flight]) -> None:
        """Note the first steps of attempts under way, each once, in one commit."""
        stepped = [flight for flight in flights if not flight.stepped and flight.made_first_step]
        self._store.note_first_steps(
            [(flight.trial_id, flight.attempt) for flight in stepped], epoch=self._epoch
        )
        for flight in stepped:
            flight.stepped = True
            self._move(TrialState.LAUNCHING, TrialState.RUNNING)

    def ended(
        self, over: Sequence[tuple[Flight, Finished]], *, now: float, at: dt.datetime
    ) -> list[tuple[str, Mapping[TrialState, int]]]:
        """Write down how attempts ended, whatever became of them, in one commit; then tell their searches.

        `now` is of the sweep's clock, `at` the date that it shows. Returns each in words, with the counts as they stood then.
        """
        endings, events, recorded = self._record(
            [self._judge(flight, event, at) for flight, event in over]
        )
        rows = {
            row.id: row
            for row in self._store.trials_by_id(
                [i for i, event in events.items() if event is TrialEvent.REQUEUED]
            )
        }
        anew = self._measured_with_other_software(endings, recorded)
        words: list[tuple[str, Mapping[TrialState, int]]] = []
        for ending, came_to in zip(endings, recorded, strict=True):
            ending.flight.run.note_held(
                ending.event.gpu_seconds, is_measured=isinstance(ending.outcome, Measurement)
            )
            if isinstance(ending.outcome, Measurement):
                self.stop_rules.note_measured(ending.flight.run.id, now=now)
                said = self._measured(ending, ending.outcome, counts=came_to.counts)
            else:
                trial_id = ending.flight.trial_id
                self.stop_rules.note_failure(
                    ending.outcome, cell_id=ending.flight.run.id, began=ending.flight.since, now=now
                )
                said = self._failed(ending, ending.outcome, events[trial_id], rows.get(trial_id))
            words.append((said, dict(self.counts)))
        self._write_condemned()
        for run in anew.values():
            self._take_up(run)
        self._write_condemned()
        return words

    def _record(
        self, endings: list[_Ending]
    ) -> tuple[list[_Ending], dict[int, TrialEvent], list[Recorded]]:
        """Have the store record them all; what it refuses is a bad result, of that trial alone."""
        events = self._events_of(
            [ending for ending in endings if isinstance(ending.outcome, Failure)]
        )
        try:
            return (
                endings,
                events,
                self._store.record_ends(
                    [_ended(ending, events) for ending in endings], epoch=self._epoch
                ),
            )
        except REFUSED:
            pass  # those that can be recorded are, and may be told again
        recorded = []
        for place, ending in enumerate(endings):
            try:
                recorded += self._store.record_ends([_ended(ending, events)], epoch=self._epoch)
            except REFUSED as exc:
                endings[place] = refused = _refused(ending, exc)
                events |= self._events_of([refused])
                recorded += self._store.record_ends([_ended(refused, events)], epoch=self._epoch)
        return endings, events, recorded

    def take_up_again(self, run: CellSearch) -> None:
        """Have a cell go on from what the store knows by now, after its search began anew or results were withdrawn."""
        self._take_up(run)
        self._write_condemned()

    def _take_up(self, run: CellSearch) -> list[TrialRow]:
        """Have a cell go on from what the store knows of it: all its trials, which are returned as they stood before."""
        trials = self._store.trials(self._sweep_id, cell_id=run.id)
        self._condemn(
            run, run.take_up(trials, self._store.repeats(run.id), self._num_proofs(run, trials))
        )
        run.nothing_fits = run.searcher.nothing_fits()
        self._free(run)
        return trials

    def _num_proofs(self, run: CellSearch, trials: Sequence[TrialRow]) -> Mapping[int, int]:
        """The number of attempts that prove that a trial does not fit its device, by trial that ran out of memory."""
        if not any(trial.state is TrialState.OUT_OF_MEMORY for trial in trials):
            return {}
        on_cpu = self._slots.device is Device.CPU
        failures = self._store.out_of_memories(run.id)
        return {
            trial_id: sum(proves_out_of_memory(one, on_cpu=on_cpu) for one in some)
            for trial_id, some in failures.items()
        }

    def _condemn(self, run: CellSearch, condemned: Collection[Layout]) -> None:
        """Note what out-of-memories prove of other layouts, to be written without launching them."""
        for layout in condemned:
            proofs = [
                (run.ran_out[proof.layout], proof) for proof in run.searcher.proofs_of(layout)
            ]
            why = f"{_needs_as_much(proofs)}; {self._dominance}"
            self._condemned.append(
                Pruned(cell_id=run.id, layout=layout, why=why, condemned_by=proofs[0][0])
            )
        self.counts[TrialState.QUEUED] -= len(run.added & set(condemned))
        run.added -= set(condemned)

    def _free(self, run: CellSearch) -> None:
        """Let layouts be launched again that no out-of-memory rules out any more."""
        freed = run.searcher.take_freed()
        if not freed:
            return
        self._write_condemned()  # some of them may wait there
        num = self._store.free_pruned(run.id, freed, epoch=self._epoch)
        self.counts[TrialState.PRUNED] -= num
        self.counts[TrialState.QUEUED] += num
        run.added |= set(freed)
        if run.stopped is StopReason.EXHAUSTED:
            run.stopped = None
        logger.info(
            "%s: %d layouts are no longer ruled out by memory",
            run.cell.key,
            num,
            extra={"action": "freed"},
        )

    def _write_condemned(self) -> None:
        self.counts[TrialState.PRUNED] += self._store.add_pruned(self._condemned, epoch=self._epoch)
        self._condemned.clear()

    def _judge(self, flight: Flight, event: Finished, at: dt.datetime) -> _Ending:
        cell, layout, device_name = flight.run.cell, flight.layout, self._slots.device_name
        verdict = judge_attempt(
            event,
            cell=cell,
            layout=layout,
            plan=self._plan,
            peaks=self.peaks,
            code=self._code,
            device_name=device_name,
            at=at,
        )
        if isinstance(verdict.outcome, Measurement) and verdict.fingerprint is not None:
            # At once: the next attempt of the same poll is measured by what this one has shown.
            stack = verdict.fingerprint.stack
            self.peaks.note(
                event.reports,
                verdict.outcome,
                precision=layout.precision,
                device_name=stack.device_name,
            )
        return _Ending(flight=flight, event=event, verdict=verdict, at=at)

    def _events_of(self, failed: Sequence[_Ending]) -> dict[int, TrialEvent]:
        """What becomes of the trials whose attempts failed."""
        kinds = {
            ending.flight.trial_id: ending.outcome.kind
            for ending in failed
            if isinstance(ending.outcome, Failure)
        }
        # Of what is never tried again, it does not matter how often it came to pass.
        asked = [
            ending.flight.trial_id
            for ending in failed
            if not ending.flight.is_repeat and POLICIES[kinds[ending.flight.trial_id]].max_retries
        ]
        earlier = self._store.failure_counts(asked)
        events = {}
        for ending in failed:
            flight, kind = ending.flight, kinds[ending.flight.trial_id]
            if flight.is_repeat:
                events[flight.trial_id] = flight.run.confirmation.fail(flight.trial_id, kind)
            else:
                events[flight.trial_id] = event_after(
                    kind, earlier.get(flight.trial_id, Counter()) + Counter([kind])
                )
        return events

    def _measured_with_other_software(
        self, endings: Sequence[_Ending], recorded: Sequence[Recorded]
    ) -> dict[int, CellSearch]:
        """The cells of which trials were measured with something else than those before them: nobody compares the two from now on.

        What such a cell's search knows is all of another fingerprint, so it begins anew from the store, which has this poll's ends too.
        """
        anew = {}
        for ending, came_to in zip(endings, recorded, strict=True):
            run, fingerprint = ending.flight.run, ending.verdict.fingerprint
            if came_to.counts and not ending.flight.is_repeat and fingerprint is not None:
                if run.fingerprint not in (None, fingerprint.digest):
                    anew[run.id] = run
                run.fingerprint = fingerprint.digest
        return anew

    def _measured(self, ending: _Ending, measurement: Measurement, *, counts: bool) -> str:
        flight, fingerprint = ending.flight, ending.verdict.fingerprint
        assert fingerprint is not None, "a measurement without a result"
        self.fingerprints.add(fingerprint.digest)
        run, trial_id, layout = flight.run, flight.trial_id, flight.layout
        load = of_gang(report.load for report in ending.event.reports)
        taken = Run(
            step_seconds=measurement.step_time.median,
            relative_confidence=measurement.step_time.relative_confidence,
            load_sd=relative_sd(load),
            at=ending.at.timestamp(),
            nodes=flight.nodes,
            purpose=flight.purpose,
            thrashing=measurement.thrashing,
        )
        if not flight.is_repeat:
            self._move(flight.state, TrialState.MEASURED)
            run.note_measured(trial_id, layout, taken)
        elif counts:
            run.confirmation.note(trial_id, layout, taken)
        else:
            run.confirmation.end(trial_id)
        if counts:
            peak = measurement.peak_memory_reserved_bytes or measurement.peak_memory_allocated_bytes
            run.searcher.tell(
                layout,
                Measured(
                    value=run.value_of(run.confirmation.seconds_of(trial_id)),
                    peak_memory_bytes=peak,
                ),
            )
            if flight.is_repeat:
                run.correct_search()
            self._free(run)
        mfu = f", MFU {measurement.mfu:.1%}" if measurement.mfu is not None else ""
        spoiled = said_of(load)
        was_told, self._is_load_told = self._is_load_told, spoiled is not None
        disturbed = "" if spoiled is None else " (disturbed)" if was_told else f"; {spoiled}"
        return f"{measurement.tokens_per_second_per_gpu:,.0f} tokens/s/GPU{mfu}{disturbed}"

    def _failed(
        self, ending: _Ending, failure: Failure, event: TrialEvent, row: TrialRow | None
    ) -> str:
        """`row` is the trial's, where it waits again."""
        flight = ending.flight
        if flight.is_repeat:
            return f"measured before; once more it failed, {failure.kind}: {failure.message}"
        run, layout = flight.run, flight.layout
        match event:
            case TrialEvent.OUT_OF_MEMORY:
                self._move(flight.state, TrialState.OUT_OF_MEMORY)
                num_condemned = self._tell_out_of_memory(ending, failure)
                return (
                    f"out of memory{f'; {num_condemned} more cannot fit' if num_condemned else ''}"
                )
            case TrialEvent.REQUEUED:
                self._move(flight.state, TrialState.QUEUED)
                assert row is not None, "it waits, so it is in the store"
                run.wait(row)
                run.needs_own_nodes |= failure.kind is FailureKind.OOM_HOST
                if failure.kind is FailureKind.NODE_LOST:
                    run.suspects.add(flight.trial_id)
                if failure.kind in HANG_KINDS:
                    run.hung_on[flight.trial_id] = frozenset(flight.nodes)
                why = (
                    "cancelled"
                    if failure.kind is FailureKind.CANCELLED
                    else f"{failure.kind}: {failure.message}"
                )
                return f"{why}; waits for another attempt"
            case _:
                self._move(flight.state, TrialState.FAILED)
                run.note_infeasible()
                if POLICIES[failure.kind].fault is not Fault.MACHINE:
                    run.searcher.tell(layout, Failed())
                # Else it says nothing of the layout; in flight for the search, it is not asked for again.
                where = f" (log: {failure.log_path})" if failure.log_path else ""
                return f"failed, {failure.kind}: {failure.message}{where}"

    def _tell_out_of_memory(self, ending: _Ending, failure: Failure) -> int:
        """Tell the search, and note what that proves of others. How many they are."""
        flight, run = ending.flight, ending.flight.run
        run.note_infeasible()
        run.take_back()
        failures = (
            self._store.out_of_memories(run.id, trial_id=flight.trial_id)
            if flight.attempt > 1
            else {flight.trial_id: [failure]}
        )
        on_cpu = self._slots.device is Device.CPU
        num_proofs = sum(
            proves_out_of_memory(one, on_cpu=on_cpu) for one in failures[flight.trial_id]
        )
        excess = relative_excess(
            ending.verdict.peak_memory_bytes, ending.verdict.device_memory_bytes, failure.message
        )
        run.ran_out[flight.layout] = flight.trial_id
        condemned = run.searcher.tell(
            flight.layout, OutOfMemory(excess=excess, num_proofs=num_proofs)
        )
        self._condemn(run, condemned)
        run.nothing_fits = run.searcher.nothing_fits()
        return len(condemned)

    def _move(self, before: TrialState, after: TrialState) -> None:
        self.counts[before] -= 1
        self.counts[after] += 1


def _needs_as_much(proofs: Sequence[tuple[int, MemoryProof]]) -> str:
    """Why a layout cannot run, by the trials that ran out of memory."""
    if len(proofs) > 1:
        (first, one), (second, other) = proofs
        return f"needs at least the memory of trials {first} ({one.layout.short}) and {second} ({other.layout.short}), which ran out of it"
    ((trial_id, proof),) = proofs
    return (
        f"needs at least the memory of trial {trial_id} ({proof.layout.short}), which ran out of it"
    )


def _refused(ending: _Ending, exc: Exception) -> _Ending:
    """The ending without what its ranks wrote, of which the store refuses something."""
    said = str(exc).partition("\n")[0]
    failure = Failure(
        kind=FailureKind.BAD_RESULT,
        message=f"the database refuses how it ended: {type(exc).__name__}: {said}",
    )
    event = replace(ending.event, reports=(), failure=failure)
    facts: AttemptFacts = {
        **attempt_facts(event, (), None, num_gpus=ending.flight.run.cell.num_gpus),
        "measured_at": ending.at,
    }
    verdict = AttemptVerdict(
        outcome=failure, fingerprint=None, facts=facts, gpu=NO_USAGE, memory_by_part=None
    )
    return replace(ending, event=event, verdict=verdict)


def _ended(ending: _Ending, events: Mapping[int, TrialEvent]) -> Ended:
    """As the store is told it."""
    flight = ending.flight
    event = events.get(flight.trial_id, TrialEvent.MEASURED)
    return ending.verdict.ended(
        flight.trial_id, flight.attempt, event=event, stepped=flight.made_first_step
    )
