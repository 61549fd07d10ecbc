"""A sweep that is read again and again: each time only what may have changed since the last.

It keeps the rows that it has read, and reads again the trials that new events name. So a reading of
a large sweep costs milliseconds, and the sweep's own writes wait for none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import FAILED_EVENTS, LogEvent
from orchestrator.report.live_bests import LiveBests
from orchestrator.report.ranked_cells import with_best
from orchestrator.report.sweep_status import SweepStatus, read_status

if TYPE_CHECKING:
    from db.read.rows import EventRow, SweepRow, TrialRow
    from db.store_reads import StoreReads

# The GPU time of what is leased changes without an event, when the lease is renewed.
COUNTS_SECONDS = 5.0
# Marks of measurements change without an event too: seldom, so all trials are read again seldom.
TRIALS_SECONDS = 300.0
# With more new events than that, all trials are read again.
MOST_NEW_EVENTS = 1_000
NUM_FAILURES_KEPT = 200
_FAILURE_EVENTS = FAILED_EVENTS | {LogEvent.REPEAT_FAILED}


@dataclass(frozen=True, kw_only=True)
class LiveRows:
    """All rows of a sweep that a display needs, as of one reading."""

    status: SweepStatus
    trials: Mapping[int, TrialRow]  # by id
    failures: Sequence[EventRow]  # the newest first


class LiveSweep:
    """The rows of one sweep, by its name. `read` raises StoreUnavailable and UsageInvalid.

    `cpu_clock`: seconds of CPU time of the thread that reads.
    """

    def __init__(
        self, store: StoreReads, name: str, *, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._store, self._name, self._cpu_clock = store, name, cpu_clock
        self._bests = LiveBests(store, cpu_clock)
        self._rows: LiveRows | None = None
        self._last_event = 0
        self._counts_at = self._trials_at = 0.0

    def read(self, now: float) -> LiveRows:
        """Return the rows as they are now, in seconds of any clock that goes on."""
        row = self._store.sweep_named(self._name)
        before = self._rows
        if before is None or before.status.row.id != row.id:
            return self._read_all(row, now)
        new = self._store.events(row.id, after_id=self._last_event, limit=MOST_NEW_EVENTS)
        if len(new) == MOST_NEW_EVENTS or now - self._trials_at > TRIALS_SECONDS:
            return self._read_all(row, now)
        is_due = now - self._counts_at > COUNTS_SECONDS
        if not new and row == before.status.row and not is_due:
            return self._ranked(before, now)
        changed = sorted({one.trial_id for one in new if one.trial_id is not None})
        trials = {one.id: one for one in self._store.trials_by_id(changed)}
        if new:
            self._last_event = new[-1].id
        self._counts_at = now
        self._bests.note(trials.values())
        self._rows = LiveRows(
            status=read_status(self._store, row),
            trials={**before.trials, **trials} if trials else before.trials,
            failures=_failures([*reversed(new), *before.failures]),
        )
        return self._ranked(self._rows, now)

    def _read_all(self, row: SweepRow, now: float) -> LiveRows:
        # First the events: what changes meanwhile is read again with the next ones.
        newest = self._store.newest_events(row.id, MOST_NEW_EVENTS)
        self._last_event = newest[0].id if newest else 0
        self._counts_at = self._trials_at = now
        if self._rows is None or self._rows.status.row.id != row.id:
            self._bests = LiveBests(self._store, self._cpu_clock)
        self._rows = LiveRows(
            status=read_status(self._store, row),
            trials={one.id: one for one in self._store.trials(row.id)},
            failures=_failures(newest),
        )
        self._bests.note(self._rows.trials.values())
        return self._ranked(self._rows, now)

    def _ranked(self, rows: LiveRows, now: float) -> LiveRows:
        """Return the rows with the best layouts of rankings, and keep them."""
        row = rows.status.row
        if self._bests.has_to_rank(now):
            self._bests.rank(row.id, now)
        found = with_best(rows.status, self._bests.best(rows.trials))
        if found != rows.status:
            rows = replace(rows, status=found)
        self._rows = rows
        return rows


def _failures(events: Sequence[EventRow]) -> list[EventRow]:
    """The events among these that report a failure; requests of people do not."""
    failures = [one for one in events if one.event in _FAILURE_EVENTS and one.detail]
    return failures[:NUM_FAILURES_KEPT]
