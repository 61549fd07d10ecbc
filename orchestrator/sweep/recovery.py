"""What an earlier orchestrator of this machine had been told and could not write down: from its spool into the store, before anything is given up.

An attempt that has ended in the store meanwhile, or is not its trial's latest, changes nothing there: its result is kept beside what counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from db.read.rows import TrialDetail
from db.store import REFUSED, Store
from orchestrator.core.trial.failure_kinds import Failure, event_after
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.protocol import MeasurementPlan
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.spool import Spool, Spooled
from orchestrator.sweep.verdict import judge_attempt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recovery:
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
        peaks = MeasuredPeaks(
            self.store.measured_peaks(self.sweep_id) if found else (), device_name=self.device_name
        )
        for spooled in found:
            try:
                self._record(spooled, self.store.trial(spooled.end.trial_id), peaks)
            except REFUSED as exc:  # also where there is no such trial or attempt: the store is not the one that it was
                said = str(exc).partition("\n")[0]
                logger.warning(
                    "The store refuses a spooled result, which is set aside as %s: %s",
                    spool.set_aside(spooled),
                    said,
                )
                num_refused += 1
            else:
                spool.drop(spooled)
        return len(found) - num_refused

    def _record(self, spooled: Spooled, detail: TrialDetail, peaks: MeasuredPeaks) -> None:
        end = spooled.end
        verdict = judge_attempt(
            end,
            cell=detail.cell.cell,
            layout=detail.trial.layout,
            plan=self.plan,
            peaks=peaks,
            code=self.code,
            device_name=self.device_name,
        )
        ended = verdict.ended(
            end.trial_id, spooled.attempt, event=_event_of(verdict.outcome, detail)
        )
        self.store.record_ends([ended], epoch=self.epoch)


def _event_of(outcome: Measurement | Failure, detail: TrialDetail) -> TrialEvent:
    if isinstance(outcome, Measurement):
        return TrialEvent.MEASURED
    earlier = Counter(
        attempt.failure.kind
        for attempt in detail.attempts
        if attempt.failure is not None and not attempt.superseded
    )
    return event_after(outcome.kind, earlier + Counter([outcome.kind]))
