"""What an earlier orchestrator of this machine had been told and could not write down: from its spool into the store, before anything is given up.

An attempt that has ended in the store meanwhile, or is not its trial's latest, changes nothing there: its result is kept beside what counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from db.read.rows import TrialDetail
from db.store import REFUSED, Store
from orchestrator.core.trial.failures import OUT_OF_MEMORY_KINDS, Failure, FailureKind, may_retry
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.measurement import ImplausibleMeasurement, Measurement
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult
from orchestrator.sweep.measured_peaks import Peaks
from orchestrator.sweep.spool import Spool, Spooled
from orchestrator.sweep.verdict import attempt_facts, failed_memory, fingerprint_of, gpu_usage, worst_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Salvage:
    """Under the epoch of who holds the sweep now; `device_name` is the cluster's, for ranks that do not name theirs."""

    store: Store
    sweep_id: int
    epoch: int
    plan: MeasurementPlan
    code: Fingerprint
    device_name: str | None

    def take_up(self, spool: Spool) -> int:
        """Write down all that lies in a spool; how many ends that were. What the store refuses is set aside, and said."""
        found, num_refused = list(spool.left()), 0
        peaks = Peaks(self.store.measured_peaks(self.sweep_id) if found else (), device_name=self.device_name)
        for spooled in found:
            try:
                self._record(spooled, self.store.trial(spooled.end.trial_id), peaks)
            except REFUSED as exc:  # also where there is no such trial or attempt: the store is not the one that it was
                said = str(exc).partition("\n")[0]
                logger.warning("The store refuses a spooled result, which is set aside as %s: %s", spool.set_aside(spooled), said)
                num_refused += 1
            else:
                spool.drop(spooled)
        return len(found) - num_refused

    def _record(self, spooled: Spooled, detail: TrialDetail, peaks: Peaks) -> None:
        end = spooled.end
        results = [outcome.result for report in end.reports for outcome in report.ranks if outcome.result is not None]
        fingerprint = fingerprint_of(end, results, code=self.code, device_name=self.device_name) if results else None
        outcome = self._outcome(spooled, detail, results, peaks)
        measurement = outcome if isinstance(outcome, Measurement) else None
        facts = attempt_facts(end, results, fingerprint, num_gpus=detail.cell.cell.num_gpus, measurement=measurement)
        trial_id, attempt, epoch = end.trial_id, spooled.attempt, self.epoch
        if isinstance(outcome, Measurement):
            gpu, parts = gpu_usage(end.reports), worst_parts(results)
            self.store.record_measurement(trial_id, attempt, epoch=epoch, measurement=outcome, gpu=gpu, memory_by_part=parts, **facts)
            return
        peak, device = failed_memory(end.reports)
        self.store.record_failure(
            trial_id,
            attempt,
            epoch=epoch,
            failure=outcome,
            event=_event_of(outcome, detail),
            peak_memory_bytes=peak,
            device_memory_bytes=device,
            **facts,
        )

    def _outcome(self, spooled: Spooled, detail: TrialDetail, results: list[RankResult], peaks: Peaks) -> Measurement | Failure:
        end, cell = spooled.end, detail.cell.cell
        if end.failure is not None:
            return end.failure
        if not results:
            return Failure(kind=FailureKind.BAD_RESULT, message="every rank ended well, and none left a result")
        layout = detail.trial.layout
        try:
            return peaks.measure(end.reports, model=cell.model, sequence_length=cell.sequence_length, layout=layout, plan=self.plan)
        except ImplausibleMeasurement as exc:
            return Failure(kind=FailureKind.BAD_RESULT, message=str(exc))


def _event_of(failure: Failure, detail: TrialDetail) -> TrialEvent:
    earlier = Counter(attempt.failure.kind for attempt in detail.attempts if attempt.failure is not None and not attempt.superseded)
    if failure.kind is FailureKind.CANCELLED or may_retry(failure.kind, earlier + Counter([failure.kind])):
        return TrialEvent.REQUEUED
    return TrialEvent.OUT_OF_MEMORY if failure.kind in OUT_OF_MEMORY_KINDS else TrialEvent.FAILED
