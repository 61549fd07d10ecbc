"""Requests of people to a running sweep: layouts to measure, and trials to measure again.

The requests are entries of the event log; the call that holds the sweep reads those that are new.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from orchestrator.core.trial.lifecycle import REQUESTS, LogEvent, TrialEvent, TrialState
from orchestrator.sweep.call import Call

logger = logging.getLogger(__name__)

# PostgreSQL numbers events before their commit, so one may appear among those that were read.
LATE_EVENTS = 1_000
_KINDS = (*REQUESTS, TrialEvent.INVALIDATED)


class RequestTaker:
    """The requests to one call of `run_sweep`."""

    def __init__(self, call: Call) -> None:
        self._call, self._store = call, call.store
        self._seen = 0  # the last event that was read
        self._handled: set[int] = set()  # events
        # Trials to measure again once nothing of them runs.
        self._retries: set[int] = set()

    def take(self, under_way: Collection[int]) -> set[int]:
        """Read new requests; return the cells whose trials wait because of them.

        A trial of which something is `under_way` is measured again after that.
        """
        sweep_id = self._call.sweep_id
        newest = self._store.newest_event_id(sweep_id)
        after = max(self._seen - LATE_EVENTS, 0)
        enqueued: set[int] = set()
        for event in self._store.events_of_kinds(sweep_id, _KINDS, after_id=after):
            if event.id in self._handled or event.trial_id is None:
                continue
            self._handled.add(event.id)
            if event.event == LogEvent.ENQUEUED:
                enqueued.add(event.trial_id)
            elif event.event == LogEvent.RETRY_ASKED:
                self._retries.add(event.trial_id)
            else:  # it waits again already
                self._retries.discard(event.trial_id)
        self._seen = newest
        return self._enqueue(enqueued) | self._retry(under_way)

    def _enqueue(self, trial_ids: set[int]) -> set[int]:
        waiting = [
            one
            for one in self._store.trials_by_id(sorted(trial_ids))
            if one.state is TrialState.QUEUED and not one.num_attempts
        ]
        for one in waiting:
            self._call.enqueued.add(one.id)
            logger.info(
                "Trial %d was asked for: %s",
                one.id,
                one.layout.short,
                extra={"action": "enqueued", "trial_id": one.id},
            )
        return {one.cell_id for one in waiting}

    def _retry(self, under_way: Collection[int]) -> set[int]:
        ready = self._retries.difference(under_way)
        if not ready:
            return set()
        self._retries -= ready
        logger.info(
            "Trials %s are measured again, as asked",
            ", ".join(map(str, sorted(ready))),
            extra={"action": "retried"},
        )
        return self._store.retry(self._call.sweep_id, ready, epoch=self._call.epoch)
