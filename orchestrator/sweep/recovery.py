"""Writes into the store what an earlier orchestrator of this machine could not: its spool.

If an attempt has ended in the store meanwhile, or is not its trial's latest, nothing changes there:
its result is kept in addition to the one that counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from db.read.rows import TrialDetail
from db.store import REFUSED, Store
from orchestrator.core.trial.failure_kinds import Failure, event_after, event_after_repeat
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.protocol import MeasurementPlan
from orchestrator.core.trial.purpose import REPEATS
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.spool import Spool, Spooled
from orchestrator.sweep.verdict import judge_attempt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """`epoch`: of the sweep's present owner. `device_name`: for ranks that do not name theirs.

    `not_passed`: what varies and may not reach the program.
    """

    store: Store
    sweep_id: int
    epoch: int
    plan: MeasurementPlan
    code: Fingerprint
    device_name: str | None
    not_passed: str | None = None

    def take_up(self, spool: Spool) -> int:
        """Store all ends of a spool, and return their number; refused ones are set aside."""
        found, num_refused = list(spool.left()), 0
        peaks = MeasuredPeaks(
            self.store.measured_peaks(self.sweep_id) if found else (), device_name=self.device_name
        )
        for spooled in found:
            try:
                self._record(spooled, self.store.trial(spooled.end.trial_id), peaks)
            # Also raised if there is no such trial or attempt: it is another store than before.
            except REFUSED as exc:
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
            code=spooled.code.at_start or self.code,
            was_edited=spooled.code.was_edited,
            device_name=self.device_name,
            is_repeat=any(
                one.number == spooled.attempt and one.purpose in REPEATS for one in detail.attempts
            ),
            at=spooled.at,
            not_passed=self.not_passed,
        )
        event = _event_of(verdict.outcome, detail, spooled.attempt)
        ended = verdict.ended(end.trial_id, spooled.attempt, event=event)
        self.store.record_ends([ended], epoch=self.epoch)


def _event_of(outcome: Measurement | Failure, detail: TrialDetail, number: int) -> TrialEvent:
    """Return the event of its trial. A repeat counts with repeats, any other attempt with all."""
    if isinstance(outcome, Measurement):
        return TrialEvent.MEASURED
    repeats = {one.number for one in detail.attempts if one.purpose in REPEATS}
    earlier = Counter(
        one.failure.kind
        for one in detail.attempts
        if one.failure is not None
        and not one.superseded
        and (number not in repeats or one.number in repeats)
    )
    rule = event_after_repeat if number in repeats else event_after
    return rule(outcome.kind, earlier)
