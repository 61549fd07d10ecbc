"""Records how attempts end: in the store, in the search of their cell, in the counts.

It decides nothing about what comes next.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from db.read.rows import TrialRow
from db.store import REFUSED
from db.write.writes import Ended, Recorded
from orchestrator.core.trial.cell_plausibility import ToldLayout
from orchestrator.core.trial.failure_kinds import (
    POLICIES,
    Failure,
    FailureKind,
    event_after,
)
from orchestrator.core.trial.fingerprint import Fingerprint, changes
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.machine_load import MachineLoad, disturbance_text, relative_sd
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.merit import OtherMerits, headroom
from orchestrator.core.trial.peak_memory import allocator_peak, taken_peak
from orchestrator.core.trial.run import Run
from orchestrator.sweep.attempts import Attempt
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.ruled_out import RuledOut
from orchestrator.sweep.stop_rules import StopRules
from orchestrator.sweep.trial_counts import TrialCounts
from orchestrator.sweep.verdict import (
    AttemptVerdict,
    judge_attempt,
    judge_refused,
)

logger = logging.getLogger(__name__)

_Judged = tuple[Attempt, AttemptVerdict]


@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """An attempt whose end is in the store, and how the sweep was then."""

    attempt: Attempt
    outcome: str  # in words
    failure: Failure | None
    counts: Mapping[TrialState, int]
    num_running: int


class Outcomes:
    """Records the attempts of one call of `run_sweep`, and counts its trials."""

    def __init__(self, call: Call, peaks: MeasuredPeaks) -> None:
        self._call, self._store, self._epoch = call, call.store, call.epoch
        self._attempts, self._slots, self._peaks = call.attempts, call.scheduler.slots, peaks
        self._plan = call.spec.measurement.plan(call.scheduler.slots.device)
        self.trial_counts = TrialCounts(call.attempts)
        self._ruled_out = RuledOut(call, self.trial_counts)
        self.fingerprints: set[str] = set()
        self.stop_rules = StopRules(call.spec.name)
        # True if the load was already reported since the last undisturbed attempt.
        self._is_load_told = False

    def take_up(self, search: CellSearch) -> None:
        """Continue a cell from the results of earlier calls, and count its trials."""
        trials = self._take_up(search)
        self.trial_counts.add_all(trial.state for trial in trials)
        digests = (trial.fingerprint_digest for trial in trials)
        self.fingerprints.update(digest for digest in digests if digest is not None)
        self._ruled_out.write()

    def take_up_again(self, search: CellSearch) -> None:
        """Continue a cell from the stored results, since its search began anew."""
        self._take_up(search)
        self._ruled_out.write()

    def requeue_ended_early(
        self, search: CellSearch, trials: Mapping[int, Collection[str]]
    ) -> None:
        """Requeue trials that were ended early and could be the fastest.

        `trials`: by id, the nodes to avoid. Call it after the search has begun anew.
        """
        sweep_id = self._call.sweep_id
        num = self._store.requeue_ended_early(sweep_id, list(trials), epoch=self._epoch)
        self.trial_counts.move(num, TrialState.MEASURED, TrialState.QUEUED)
        self.take_up_again(search)
        for trial_id, nodes in trials.items():
            search.avoid(trial_id, nodes)
            logger.info(
                "Trial %d is measured again, to its end: the machine may have been slow when it"
                " was ended early",
                trial_id,
                extra={"action": "requeued_ended_early", "trial_id": trial_id},
            )

    def record_first_steps(self) -> None:
        """Record which attempts have made their first step, in one commit."""
        stepped = [
            attempt
            for attempt in self._attempts.running
            if attempt.made_first_step and not attempt.is_first_step_stored
        ]
        self._store.note_first_steps(
            [(attempt.trial_id, attempt.number) for attempt in stepped], epoch=self._epoch
        )
        for attempt in stepped:
            self._attempts.note_first_step_stored(attempt)

    def record_ends(self, *, now: float, at: dt.datetime) -> list[RecordedAttempt]:
        """Record all attempts of the ledger that ended, in one commit; then tell their searches.

        `now` is of the sweep's clock, `at` the date that it shows.
        """
        judged = [(attempt, self._judge(attempt, at)) for attempt in self._attempts.ended]
        events, stored = self._store_ends(judged, at)
        requeued = [i for i, event in events.items() if event is TrialEvent.REQUEUED]
        rows = {row.id: row for row in self._store.trials_by_id(requeued)}
        changed = self._to_read_again(judged, stored)
        recorded = []
        for (attempt, verdict), in_store in zip(judged, stored, strict=True):
            outcome, search = verdict.outcome, self._call.searches[attempt.cell_id]
            self._attempts.close(attempt, now=now)
            is_measured = isinstance(outcome, Measurement)
            gpu_seconds = verdict.facts.get("gpu_seconds") or 0.0
            search.note_reserved(gpu_seconds, is_measured=is_measured)
            if isinstance(outcome, Measurement):
                if outcome.implausible is None:
                    self.stop_rules.note_measured(search.id, now=now)
                else:
                    self.stop_rules.note_implausible(outcome.implausible, search.id, now=now)
                words = self._measured(search, attempt, verdict, outcome, in_store, at)
            else:
                trial_id = attempt.trial_id
                self.stop_rules.note_failure(
                    outcome,
                    cell_id=search.id,
                    began=attempt.since,
                    now=now,
                    num_nodes=len(attempt.nodes),
                    is_repeat=attempt.is_repeat,
                )
                event, row = events[trial_id], rows.get(trial_id)
                words = self._failed(search, attempt, verdict, outcome, event, row)
            recorded.append(
                RecordedAttempt(
                    attempt=attempt,
                    outcome=words,
                    failure=outcome if isinstance(outcome, Failure) else None,
                    counts=self.trial_counts.now,
                    num_running=len(self._attempts.running),
                )
            )
        self._ruled_out.write()
        changed |= self._implausible_cells(judged)
        for search in changed.values():
            self._take_up(search)
        self._ruled_out.write()
        return recorded

    def _store_ends(
        self, judged: list[_Judged], at: dt.datetime
    ) -> tuple[dict[int, TrialEvent], list[Recorded]]:
        """Record all. An end that the store refuses becomes a bad result, in `judged` too."""
        events = self._events_of(judged)
        try:
            ends = [_ended(one, events) for one in judged]
            return events, self._store.record_ends(ends, epoch=self._epoch)
        except REFUSED:
            # Record them one by one below: one that is recorded twice counts once.
            pass
        recorded = []
        for place, one in enumerate(judged):
            try:
                recorded += self._store.record_ends([_ended(one, events)], epoch=self._epoch)
            except REFUSED as exc:
                attempt = one[0]
                assert attempt.end is not None, "only what ended is judged"
                num_gpus = attempt.cell.num_gpus
                refused = attempt, judge_refused(attempt.end, exc, num_gpus=num_gpus, at=at)
                judged[place] = refused
                events |= self._events_of([refused])
                recorded += self._store.record_ends([_ended(refused, events)], epoch=self._epoch)
        return events, recorded

    def _take_up(self, search: CellSearch) -> list[TrialRow]:
        """Continue a cell from all its stored trials. Return them as they were before."""
        trials = self._store.trials(self._call.sweep_id, cell_id=search.id)
        repeats = self._store.repeats(search.id)
        num_proofs = self._ruled_out.num_proofs(search, trials)
        condemned = search.take_up(trials, repeats, num_proofs, self._call.enqueued)
        self._ruled_out.condemn(search, condemned)
        self._ruled_out.free(search)
        return trials

    def _judge(self, attempt: Attempt, at: dt.datetime) -> AttemptVerdict:
        event, layout = attempt.end, attempt.layout
        assert event is not None, "only what ended is judged"
        verdict = judge_attempt(
            event,
            cell=attempt.cell,
            layout=layout,
            plan=self._plan,
            peaks=self._peaks,
            code=attempt.code.at_start or self._call.code.now,
            was_edited=attempt.code.was_edited,
            device_name=self._slots.device_name,
            is_repeat=attempt.is_repeat,
            at=at,
            not_passed=self._call.not_passed,
        )
        if isinstance(verdict.outcome, Measurement) and verdict.fingerprint is not None:
            # Note the peak now: the next attempt of this poll is judged with it.
            device_name = verdict.fingerprint.stack.device_name
            self._peaks.note(
                event.reports, verdict.outcome, precision=layout.precision, device_name=device_name
            )
        return verdict

    def _events_of(self, judged: Sequence[_Judged]) -> dict[int, TrialEvent]:
        """Decide the new states of trials whose attempts failed."""
        kinds, repeats = {}, {}
        for attempt, verdict in judged:
            if isinstance(verdict.outcome, Failure):
                kinds[attempt.trial_id] = verdict.outcome.kind
                if attempt.is_repeat:
                    repeats[attempt.trial_id] = self._call.searches[attempt.cell_id]
        # Earlier failures matter only for kinds that are retried.
        retried = [i for i in kinds.keys() - repeats.keys() if POLICIES[kinds[i]].max_retries]
        earlier = self._store.failure_counts(retried)
        events = {}
        for trial_id, kind in kinds.items():
            if trial_id in repeats:
                events[trial_id] = repeats[trial_id].confirmation.event_after(trial_id, kind)
            else:
                events[trial_id] = event_after(kind, earlier.get(trial_id, {}))
        return events

    def _to_read_again(
        self, judged: Sequence[_Judged], recorded: Sequence[Recorded]
    ) -> dict[int, CellSearch]:
        """Return the cells whose search begins anew from the store, which has this poll's ends.

        Numbers that were measured with two fingerprints are not compared: after a measurement with
        another one than those before it, a cell's search knows nothing of it. Nor does it know a
        trial whose repeat is its first run with the newest fingerprint.
        """
        changed = {}
        for (attempt, _), stored in zip(judged, recorded, strict=True):
            if not stored.counts or stored.fingerprint is None:
                continue
            search = self._call.searches[attempt.cell_id]
            if attempt.is_repeat:
                is_changed = not search.confirmation.has(attempt.trial_id)
            elif not stored.is_current:
                # It began before an edit and ended after it.
                is_changed = True
            else:
                before = search.note_fingerprint(stored.fingerprint.digest)
                is_changed = before is not None and self._is_other_software(
                    search, before, stored.fingerprint
                )
            if is_changed:
                changed[search.id] = search
        return changed

    def _is_other_software(self, search: CellSearch, before: str, now: Fingerprint) -> bool:
        """Warn of other software; return False if the two are the same by now."""
        known = {one.digest: one for one in self._store.fingerprints(self._call.sweep_id)}
        if before not in known:
            # The store has completed it, as in db/write/software.py.
            self.fingerprints.discard(before)
            return False
        what = changes(known[before], now)
        logger.warning(
            "%s is measured with other code, software or devices than before%s: its earlier numbers"
            " are kept apart",
            search.cell.key,
            f" ({what})" if what else "",
            extra={"action": "fingerprint_changed"},
        )
        return True

    def _implausible_cells(self, judged: Sequence[_Judged]) -> dict[int, CellSearch]:
        """Return the cells in which what the user's program told of several layouts cannot be true.

        It is written into the store, from which their searches go on.
        """
        if self._call.spec.workload.name != "command":
            return {}
        cells = {one.cell_id for one, verdict in judged if isinstance(verdict.outcome, Measurement)}
        found = {}
        for search in (self._call.searches[cell_id] for cell_id in sorted(cells)):
            reasons = search.told.newly_implausible()
            if reasons:
                self._store.note_implausible(reasons, epoch=self._epoch)
                text = next(iter(reasons.values()))
                logger.warning("%s: %s", search.cell.key, text, extra={"action": "implausible"})
                found[search.id] = search
        return found

    def _measured(
        self,
        search: CellSearch,
        attempt: Attempt,
        verdict: AttemptVerdict,
        measurement: Measurement,
        in_store: Recorded,
        at: dt.datetime,
    ) -> str:
        fingerprint, load = in_store.fingerprint, verdict.facts.get("load")
        assert fingerprint is not None, "a measurement without a result"
        assert load is not None, "a measurement without a report"
        if in_store.counts:
            self.fingerprints.add(fingerprint.digest)
        trial_id, layout, is_repeat = attempt.trial_id, attempt.layout, attempt.is_repeat
        peak = allocator_peak(measurement)
        joules = verdict.gpu.joules_per_token(measurement.tokens_per_second_per_gpu)
        if measurement.implausible is not None:
            # A repeat with such numbers is a bad result.
            assert not is_repeat, "the verdict refuses it"
            self.trial_counts.add(TrialState.MEASURED)
            told = ToldLayout(layout=layout, seconds=measurement.step_time.median)
            search.note_implausible(trial_id, told, peak_memory_bytes=peak)
            self._ruled_out.free(search)
            return f"measured, but its numbers cannot be true: {measurement.implausible}"
        if measurement.step_seconds_bound is not None and not is_repeat:
            return self._ended_early(search, attempt, measurement, load, at)
        if is_repeat and not search.confirmation.has(trial_id):
            if not in_store.counts:
                return "measured again, with other code or software than its trial: kept apart"
            return self._speed_text(measurement, load)
        run = Run(
            step_seconds=measurement.step_time.median,
            relative_confidence=measurement.step_time.relative_confidence,
            load_sd=relative_sd(load),
            at=at.timestamp(),
            nodes=attempt.nodes,
            purpose=attempt.purpose,
            thrashing=measurement.thrashing,
        )
        if is_repeat:
            search.note_repeated(trial_id, layout, run, counts=in_store.counts)
            if not in_store.counts:
                text = self._speed_text(measurement, load)
                return f"{text}; with other code or software than its trial: kept apart"
        else:
            self.trial_counts.add(TrialState.MEASURED)
            free = _headroom(measurement, search.searcher.memory_limit_bytes)
            others = OtherMerits(headroom=free, joules_per_token=joules)
            search.note_measured(trial_id, layout, run, others)
        if in_store.counts:
            search.tell_measured(
                trial_id,
                layout,
                peak_memory_bytes=peak,
                is_repeat=is_repeat,
                joules_per_token=joules,
            )
            self._ruled_out.free(search)
        return self._speed_text(measurement, load)

    def _ended_early(
        self,
        search: CellSearch,
        attempt: Attempt,
        measurement: Measurement,
        load: MachineLoad,
        at: dt.datetime,
    ) -> str:
        bound = measurement.step_seconds_bound
        assert bound is not None, "a trial that was ended early has a bound"
        self.trial_counts.add(TrialState.MEASURED)
        told = ToldLayout(layout=attempt.layout, seconds=measurement.step_time.median)
        fastest = Run(
            step_seconds=bound,
            load_sd=relative_sd(load),
            at=at.timestamp(),
            nodes=attempt.nodes,
            purpose=attempt.purpose,
        )
        peak = allocator_peak(measurement)
        search.note_ended_early(attempt.trial_id, told, fastest, peak_memory_bytes=peak)
        self._ruled_out.free(search)
        return f"ended early: a step takes {bound:.3g} s at least, too long to be the best"

    def _speed_text(self, measurement: Measurement, load: MachineLoad) -> str:
        mfu = f", MFU {measurement.mfu:.1%}" if measurement.mfu is not None else ""
        spoiled = disturbance_text(load)
        # The details are told once, until an attempt is not disturbed.
        was_told, self._is_load_told = self._is_load_told, spoiled is not None
        disturbed = "" if spoiled is None else " (disturbed)" if was_told else f"; {spoiled}"
        return f"{measurement.tokens_per_second_per_gpu:,.0f} tokens/s/GPU{mfu}{disturbed}"

    def _failed(
        self,
        search: CellSearch,
        attempt: Attempt,
        verdict: AttemptVerdict,
        failure: Failure,
        event: TrialEvent,
        row: TrialRow | None,
    ) -> str:
        """`row` is the trial's, if it waits again."""
        if attempt.is_repeat:
            search.note_repeat_failed(attempt.trial_id, failure.kind)
            is_cancelled = failure.kind is FailureKind.CANCELLED
            how = "cancelled" if is_cancelled else f"failed, {failure.kind}"
            return f"repeat {how}: {failure.message}; the earlier result still counts"
        match event:
            case TrialEvent.OUT_OF_MEMORY:
                self.trial_counts.add(TrialState.OUT_OF_MEMORY)
                num_condemned = self._ruled_out.note_out_of_memory(
                    search, attempt, verdict, failure
                )
                others = f"; {num_condemned} more cannot fit" if num_condemned else ""
                return f"out of memory{others}"
            case TrialEvent.REQUEUED:
                self.trial_counts.add(TrialState.QUEUED)
                assert row is not None, "it waits, so it is in the store"
                search.note_requeued(row, failure.kind, attempt.nodes)
                why = failure.message
                if failure.kind is not FailureKind.CANCELLED:
                    why = f"{failure.kind}: {failure.message}"
                return f"{why}; waits for another attempt"
            case _:
                self.trial_counts.add(TrialState.FAILED)
                search.note_failed(attempt.layout, POLICIES[failure.kind].fault)
                log = f" (log: {failure.log_path})" if failure.log_path else ""
                return f"failed, {failure.kind}: {failure.message}{log}"


def _headroom(measurement: Measurement, device_memory_bytes: float | None) -> float | None:
    """Return the share of its device's memory that a layout left free; None if it is unknown."""
    taken = taken_peak(measurement)
    return headroom(taken, measurement.device_memory_bytes or device_memory_bytes)


def _ended(judged: _Judged, events: Mapping[int, TrialEvent]) -> Ended:
    """Return the end in the form that the store takes."""
    attempt, verdict = judged
    event = events.get(attempt.trial_id, TrialEvent.MEASURED)
    return verdict.ended(
        attempt.trial_id, attempt.number, event=event, stepped=attempt.made_first_step
    )
