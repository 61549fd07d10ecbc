"""The loop: asks for layouts, has them run, and records how each ended.

One process decides; SQL remembers. Nothing here knows Ray, a terminal or a file format.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Collection
from dataclasses import replace

from db.read.rows import TrialRow
from orchestrator.core.errors import ClusterUnavailable, StoreUnavailable, UsageInvalid
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_searches import CellSearches
from orchestrator.sweep.dispatch import Dispatch
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.outcomes import Outcomes
from orchestrator.sweep.progress import Stop, StopReason, SweepResult
from orchestrator.sweep.requests import RequestTaker
from orchestrator.sweep.snapshots import Snapshots
from orchestrator.sweep.spool import Spooled
from orchestrator.sweep.winner_profiles import WinnerProfiles, log_profile, log_unpaid

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# If the loop did not run for this long, the process was stopped or the machine slept.
STANDSTILL_SECONDS = 120.0


class Loop:
    """Works on one sweep. opening.py makes one that is ready."""

    def __init__(
        self,
        call: Call,
        *,
        outcomes: Outcomes,
        node_pool: NodePool,
        cell_searches: CellSearches,
        dispatch: Dispatch,
        snapshots: Snapshots,
        winner_profiles: WinnerProfiles,
        requests: RequestTaker,
        began_unix_seconds: float,
    ) -> None:
        self._call, self._store, self._scheduler = call, call.store, call.scheduler
        self._lease, self._spool, self._attempts = call.lease, call.spool, call.attempts
        self._outcomes, self._node_pool, self._cell_searches = outcomes, node_pool, cell_searches
        self._dispatch, self._snapshots = dispatch, snapshots
        self._winner_profiles, self._requests = winner_profiles, requests
        self._began_unix_seconds = began_unix_seconds
        self._requested = Stop.GO_ON
        self._is_cancelling = False
        self._seen_at = began_unix_seconds  # until `run`

    def run(self) -> SweepResult:
        """Work until nothing is left, a budget is spent, or somebody asks to stop."""
        self._seen_at = time.time()
        self._store.while_away(self._wait_for_store)
        try:
            self._await_nodes()
            was_stopped = not self._work()
        except BaseException:
            self._spool_ends()
            self._abandon()
            raise
        result = self._snapshots.result(interrupted=was_stopped)
        if not was_stopped:
            result = replace(result, interrupted=not self._profile_winners(result))
        return result

    def _profile_winners(self, result: SweepResult) -> bool:
        """Profile the winner of each cell, nothing else running; False if somebody stopped it."""
        for trial in self._winner_profiles.to_come(result.tied):
            self._keep_lease()
            if self._asked() is not Stop.GO_ON:
                return False
            budget = self._winner_profiles.passed_by(trial)
            if budget is not None:
                log_unpaid(trial, budget)
            elif not self._profile(trial):
                return False
        return True

    def _profile(self, trial: TrialRow) -> bool:
        """Profile a trial; False if somebody asked to stop before it ended."""
        asked = Stop.GO_ON
        with self._winner_profiles.start(trial) as profile:
            while (found := profile.poll()) is None:
                self._keep_lease()
                asked = self._asked()
                if asked is not Stop.GO_ON:
                    profile.cancel()
        log_profile(found)
        return asked is Stop.GO_ON

    def _await_nodes(self) -> None:
        """Wait until nodes have answered their checks, unless somebody asks to stop."""
        shapes = {search.shape for search in self._call.searches.values()}
        while self._asked() is Stop.GO_ON:
            if self._node_pool.may_begin(shapes, self._scheduler.slots.nodes):
                return
            self._poll(POLL_SECONDS)
            self._snapshots.show(self._requested)
            self._keep_lease()

    def _work(self) -> bool:
        """Work until nothing is left to do; False if somebody asked to stop before."""
        while True:
            self._note_standstill()
            asked = self._asked()
            if asked is Stop.CANCEL and not self._is_cancelling:
                self._is_cancelling = True
                self._cancel_all()
            if asked is Stop.GO_ON:
                self._dispatch.start_what_fits()
                self._dispatch.think_ahead()
                self._snapshots.note_searched()
            if not self._attempts and not (asked is Stop.GO_ON and self._dispatch.waits_for_nodes):
                break
            self._poll(POLL_SECONDS)
            self._record_ends()
            self._snapshots.show(self._requested)
            self._stop_stuck_cells()
            if self._keep_lease():
                self._measure_again(self._requests.take(self._attempts.trials))
            self._measure_again(self._node_pool.refresh(self._attempts.trials))
        self._snapshots.show(self._requested, at_once=True)
        return asked is Stop.GO_ON

    def _asked(self) -> Stop:
        self._requested = max(self._call.stop(), self._requested, self._lease.requested)
        return self._requested

    def _cancel_all(self) -> None:
        for trial_id in list(self._attempts.trials):
            self._scheduler.cancel(trial_id)

    def _abandon(self) -> None:
        """End what runs, since the store or the cluster is gone. The next call starts it again."""
        try:
            self._cancel_all()
        except ClusterUnavailable as exc:  # what is known already says more
            logger.debug("Nothing can be cancelled: %s", exc)

    # -- what the scheduler says -----------------------------------------------------------------

    def _poll(self, seconds: float) -> None:
        for event in self._scheduler.poll(seconds):
            self._attempts.hear(event)
        if self._call.code.may_change:
            self._check_for_edits()

    def _check_for_edits(self) -> None:
        """Check once for all attempts that ended or made their first step since the last check."""
        loaded = [
            attempt
            for attempt in self._attempts.running
            if attempt.code.when_checked is None and attempt.has_loaded
        ]
        if loaded:
            # Those that have ended are about to be judged.
            has_ended = any(attempt.end is not None for attempt in loaded)
            now = self._call.code.checked(at_once=has_ended)
            for attempt in loaded:
                attempt.code = replace(attempt.code, when_checked=now)

    def _record_ends(self) -> None:
        """Record how attempts ended, all of them in one commit."""
        ended = list(self._attempts.ended)
        if not ended:
            return
        for attempt in ended:
            self._dispatch.note_ended(attempt, self._call.searches[attempt.cell_id])
        num_launched = sum(search.launched for search in self._call.searches.values())
        recorded = self._outcomes.record_ends(now=self._call.clock(), at=self._date())
        self._snapshots.note_ended(recorded, num_launched=num_launched)
        for attempt in ended:
            if self._spool is not None and attempt.end is not None:
                self._spool.drop(Spooled(attempt=attempt.number, end=attempt.end))
        for one in recorded:
            attempt, under_way = one.attempt, self._attempts.trials
            assert attempt.end is not None, "only what ended is recorded"
            cells = self._node_pool.ended(
                attempt.trial_id,
                replace(attempt.end, failure=one.failure),
                under_way,
                began=attempt.since,
            )
            self._measure_again(cells)

    def _date(self) -> dt.datetime:
        """Return the time by the sweep's clock. Simulated time has its own dates."""
        seconds = self._began_unix_seconds + self._call.seconds
        return dt.datetime.fromtimestamp(seconds, tz=dt.UTC)

    def _measure_again(self, cells: Collection[int]) -> None:
        """Begin the searches of these cells anew: trials of them wait again.

        A node that they were measured on is slow, or a person asked for it.
        """
        if cells:
            trials = self._store.trials(self._lease.sweep_id)
            self._outcomes.trial_counts.begin_anew(trial.state for trial in trials)
        for search in (search for search in self._call.searches.values() if search.id in cells):
            search.begin_anew(self._cell_searches.plan(search.cell, search.id))
            self._outcomes.take_up_again(search)
            search.search_again()

    def _stop_stuck_cells(self) -> None:
        """Stop the cells that fail again and again while others run.

        Raises UsageInvalid or ClusterUnavailable if it is not their fault.
        """
        stop_rules = self._outcomes.stop_rules
        if not stop_rules.may_stop:
            return
        open_ids = [
            i for i, search in self._call.searches.items() if self._dispatch.is_open(search)
        ]
        searches = {i: self._call.searches[i] for i in open_ids}
        can_check = [i for i, one in searches.items() if one.confirmation.can_check_machine]
        checking = [i for i, one in searches.items() if one.num_repeats]
        try:
            stuck = stop_rules.stuck_cells(open_ids, can_check, checking)
        except (UsageInvalid, ClusterUnavailable):
            # The message counts failures: people have seen each of them before.
            self._snapshots.show(self._requested, at_once=True)
            raise
        for cell_id in stuck:
            search = self._call.searches[cell_id]
            search.stop(StopReason.FAULTS)
            search.take_back()
            logger.warning(
                "%s: stopped: %s. The same command tries it again",
                search.cell.key,
                stop_rules.stuck_message(cell_id),
                extra={"action": "stuck", "cell_id": cell_id},
            )
            stop_rules.forget(cell_id)

    # -- time that passes ------------------------------------------------------------------------

    def _note_standstill(self) -> None:
        """Note if the loop did not run for long: the machine's speed may have changed since."""
        now, before = time.time(), self._seen_at
        self._seen_at = now
        if now - before > STANDSTILL_SECONDS:
            logger.warning(
                "The orchestrator stood still for %.0f s: the machine may have changed meanwhile",
                now - before,
            )
            for search in self._call.searches.values():
                search.note_standstill()

    def _keep_lease(self) -> bool:
        """Renew the lease if it is due; return whether it was."""
        if not self._lease.is_due:
            return False
        # First steps are stored only as often as the lease is renewed: nothing acts on them, and
        # each would cost a commit.
        self._outcomes.record_first_steps()
        self._lease.renew(self._scheduler.leased())
        return True

    def _wait_for_store(self, seconds: float) -> None:
        """Keep ended attempts on disk while the database does not answer.

        What runs goes on; nothing new is started. Raises StoreUnavailable if asked to cancel.
        """
        until = time.monotonic() + seconds
        self._spool_ends()
        self._poll(seconds)
        self._spool_ends()
        if self._call.stop() is Stop.CANCEL:
            raise StoreUnavailable(
                "stopped while the database did not answer."
                " What was measured waits here for the same command"
            )
        time.sleep(max(0.0, until - time.monotonic()))

    def _spool_ends(self) -> None:
        """Write to disk the ends that the store does not have, or not completely."""
        for attempt in self._attempts.ended:
            if attempt.end is not None and self._spool is not None:
                try:
                    spooled = Spooled(
                        attempt=attempt.number,
                        end=attempt.end,
                        at=self._date(),
                        code=attempt.code,
                    )
                    self._spool.keep(spooled)
                except OSError as exc:
                    logger.warning(
                        "Trial %d has ended, and cannot be written down here either: %s",
                        attempt.trial_id,
                        exc,
                    )
