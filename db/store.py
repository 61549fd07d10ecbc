"""The store of every sweep: cells, trials, attempts, measurements, events, and the lease.

Each write is one transaction with its owner's epoch: a stale owner gets LeaseLost, and writes
nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from db.connection.engine import Change, Database
from db.read import trials
from db.read.holder import holder_is_gone
from db.read.rows import Holder, SweepRow, TrialRow
from db.sql import repeatable_trials
from db.store_reads import StoreReads
from db.types import BenchReason, StopRequest, SweepState
from db.write import (
    changes,
    endings,
    invalidation,
    lease,
    node_records,
    profiles,
    requests,
    reuse,
    sessions,
    sweeps,
)
from db.write.writes import (
    Ended,
    NewAttempt,
    NewTrial,
    ProfileEnd,
    Pruned,
    Recorded,
    StoppedCell,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.check import Check
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.physics.link_sample import LinkSample
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.reserved_time import Leased

logger = logging.getLogger(__name__)

# A lease is renewed every few seconds. A dead orchestrator on another host is replaced after this
# long.
LEASE_SECONDS = 30.0
# Errors about one end: no such attempt, or a value that no column takes. Drivers wrap some of them.
REFUSED = (UsageInvalid, ValueError, OverflowError, sa.exc.StatementError)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Store(StoreReads):
    """Reads and writes a store. Open it with `Store.open`; threads may share it."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._token = sweeps.new_token()

    def _write(
        self,
        work: Callable[Concatenate[Connection, Change, _P], _T],
        *args: _P.args,
        **named: _P.kwargs,
    ) -> _T:
        return self._database.write(
            lambda connection, change: work(connection, change, *args, **named)
        )

    # Sweeps and their owners.

    def ensure_sweep(self, name: str, spec_json: str, conditions: Mapping[str, Any]) -> int:
        """The id of the sweep, made if it is new. `conditions` has JSON's types.

        Raises SweepChanged if it was measured under other conditions; the message shows each.
        `acquire` writes everything else that changed, since only the owner may change a sweep.
        """
        return self._write(sweeps.ensure_sweep, name, spec_json, _plain(conditions))

    def acquire(
        self,
        sweep_id: int,
        *,
        host: str,
        pid: int,
        spec_json: str | None = None,
        conditions: Mapping[str, Any] | None = None,
        ttl_seconds: float = LEASE_SECONDS,
        takeover: bool = False,
        holder_is_dead: Callable[[Holder], bool] | None = holder_is_gone,
    ) -> int:
        """Take the sweep and return the epoch that every write must carry.

        `spec_json` and `conditions` are what this owner works on; None keeps the last owner's. A
        holder that `holder_is_dead` knows to be gone is replaced at once, so that the same command
        continues after kill -9. Raises SweepInUse, which names the holder and the end of its lease,
        and SweepChanged as `ensure_sweep` does.
        """

        def work(connection: Connection, change: Change) -> int:
            epoch = lease.acquire(
                connection,
                sweep_id,
                host=host,
                pid=pid,
                token=self._token,
                spec_json=spec_json,
                ttl_seconds=ttl_seconds,
                takeover=takeover,
                holder_is_dead=holder_is_dead,
            )
            if conditions is not None:
                sweeps.set_conditions(connection, sweep_id, _plain(conditions))
            return epoch

        return self._database.write(work)

    def bind_conditions(self, sweep_id: int, conditions: Mapping[str, Any], *, epoch: int) -> int:
        """Give a sweep whose trials have measured nothing the conditions of its owner.

        Attempts under others are kept, superseded, and their trials wait again. Returns how many
        trials had ended. Raises SweepChanged if something was measured meanwhile, LeaseLost.
        """
        return self._write(sweeps.bind, sweep_id, _plain(conditions), epoch)

    def begin_session(
        self,
        sweep_id: int,
        epoch: int,
        *,
        num_gpus: int,
        leased: Leased,
        price_per_gpu_hour: float | None = None,
    ) -> None:
        """Note an owner's number of slots, and what it has leased. Raises LeaseLost."""

        def work(connection: Connection, change: Change) -> None:
            lease.fence(connection, sweep_id, epoch)
            sessions.begin(
                connection,
                sweep_id,
                epoch,
                num_gpus=num_gpus,
                price_per_gpu_hour=price_per_gpu_hour,
                leased=leased,
            )

        self._database.write(work)

    def renew(
        self,
        sweep_id: int,
        epoch: int,
        ttl_seconds: float = LEASE_SECONDS,
        *,
        leased: Leased | None = None,
    ) -> StopRequest | None:
        """Extend the lease, note what is leased, and return what a person asked of this owner.

        Raises LeaseLost.
        """

        def work(connection: Connection, change: Change) -> StopRequest | None:
            request = lease.renew(connection, sweep_id, epoch, ttl_seconds)
            if leased is not None:
                sessions.note(connection, sweep_id, epoch, leased)
            return request

        return self._database.write(work)

    def release(
        self,
        sweep_id: int,
        epoch: int,
        state: SweepState = SweepState.STOPPED,
        *,
        leased: Leased | None = None,
        stopped: Sequence[StoppedCell] = (),
    ) -> None:
        """Release the sweep, and end the session with all that it leased. Raises LeaseLost."""

        def work(connection: Connection, change: Change) -> None:
            lease.release(connection, sweep_id, epoch, state)
            if leased is not None:
                sessions.end(connection, sweep_id, epoch, leased, stopped)

        self._database.write(work)

    def give_back(
        self, before: SweepRow, epoch: int | None, *, leased: Leased | None = None
    ) -> None:
        """Leave a sweep as it was `before` this owner, who launched nothing.

        A sweep that is new and empty is deleted. If this owner has launched trials, the sweep is
        released as stopped. With `epoch` None `acquire` was interrupted, and may have had its
        effect. Raises LeaseLost.
        """
        self._write(sweeps.give_back, before, epoch, self._token, leased)

    def rename(
        self,
        sweep_id: int,
        name: str,
        *,
        holder_is_dead: Callable[[Holder], bool] | None = holder_is_gone,
    ) -> None:
        """Give a sweep another name, also in its file as stored.

        Raises UsageInvalid if another sweep has the name, SweepInUse while an orchestrator works
        on it.
        """
        self._write(sweeps.rename, sweep_id, name, self._token, holder_is_dead)

    def remove(
        self, sweep_id: int, *, holder_is_dead: Callable[[Holder], bool] | None = holder_is_gone
    ) -> None:
        """Delete a sweep with its cells, trials, attempts, events and profiles, in one commit.

        Raises SweepInUse while an orchestrator works on it.
        """
        self._database.write(
            lambda connection, change: sweeps.remove(
                connection, change, sweep_id, self._token, holder_is_dead
            ),
            durable=True,
        )

    def request_stop(self, sweep_id: int, request: StopRequest) -> bool:
        """Ask a sweep's orchestrator to stop at its next `renew`. False: the sweep has none."""
        return self._write(sweeps.request_stop, sweep_id, request)

    def mark_lost(self, sweep_id: int, epoch: int) -> list[TrialRow]:
        """Mark attempts under way of an earlier owner as lost; return the trials that wait again.

        A trial that was lost more often than its kind of failure is retried has FAILED, and is not
        among them.
        """

        def work(connection: Connection, change: Change) -> list[TrialRow]:
            waiting = changes.mark_lost(connection, change, sweep_id, epoch)
            return trials.trials_by_id(connection, waiting)

        return self._database.write(work)

    # Cells and trials.

    def ensure_cell(self, sweep_id: int, cell: Cell, epoch: int) -> int:
        """The id of the cell in the sweep, made if it is new."""
        return self._database.write(
            lambda connection, _: sweeps.ensure_cell(connection, sweep_id, cell, epoch)
        )

    def begin_trials(
        self, begun: Sequence[NewTrial | NewAttempt], *, epoch: int
    ) -> list[tuple[int, int]]:
        """Begin an attempt of each, of any cells of one sweep, in one commit.

        Returns trial ids and attempt numbers, in order. A layout that has a QUEUED trial continues
        it. Raises IllegalTransition, and changes nothing, if one of them cannot begin or is named
        twice: nothing was launched yet, so nothing is lost.
        """
        return self._write(changes.begin, begun, epoch) if begun else []

    def add_pruned(self, condemned: Sequence[Pruned], *, epoch: int) -> int:
        """Record layouts as PRUNED without a launch, unless they are past QUEUED.

        Returns how many are newly pruned.
        """
        return self._write(changes.add_pruned, condemned, epoch) if condemned else 0

    def reuse(self, cell_id: int, trial_ids: Sequence[int], *, epoch: int) -> int:
        """Take trials of other sweeps over into a cell, with their attempts and measurements.

        A layout that has a trial keeps it. Returns how many were added. Raises LeaseLost.
        """
        return self._write(reuse.reuse, cell_id, trial_ids, epoch) if trial_ids else 0

    def free_pruned(self, cell_id: int, layouts: Sequence[Layout], *, epoch: int) -> int:
        """Let PRUNED layouts wait again that no out-of-memory condemns any more.

        Returns how many trials changed.
        """
        return self._write(invalidation.free_pruned, cell_id, layouts, epoch)

    def requeue_ended_early(self, sweep_id: int, trial_ids: Sequence[int], *, epoch: int) -> int:
        """Requeue trials that were ended early; return how many changed."""
        return self._write(invalidation.requeue_ended_early, sweep_id, trial_ids, epoch)

    def note_first_steps(self, attempts: Sequence[tuple[int, int]], *, epoch: int) -> None:
        """Move trials by FIRST_STEP in one commit; each attempt is a trial id and a number.

        Raises IllegalTransition, and changes nothing, if the state of a trial does not take the
        event or an attempt is not the latest of its trial.
        """
        if attempts:
            self._write(changes.note_first_steps, attempts, epoch)

    def invalidate(
        self,
        where: str,
        *,
        sweep: str | None = None,
        holder_is_dead: Callable[[Holder], bool] | None = holder_is_gone,
    ) -> int:
        """Let ended trials that match a condition over v_trial, and those they condemned, wait.

        Their attempts are kept, superseded. Returns how many trials changed. Raises UsageInvalid
        for a bad condition, SweepInUse while an orchestrator works on one of the sweeps.
        """
        by_sweep = repeatable_trials.trials_by_sweep(*self._looked_in(where, sweep))
        return self._write(invalidation.invalidate, by_sweep, where, self._token, holder_is_dead)

    def count_repeatable(self, where: str, *, sweep: str | None = None) -> dict[TrialState, int]:
        """Count the trials that `invalidate` would change, by state. Raises UsageInvalid."""
        return repeatable_trials.num_by_state(*self._looked_in(where, sweep))

    def count_repeatable_by_sweep(self, where: str) -> dict[str, int]:
        """Count the trials that `invalidate` would change in each sweep, by name, the newest first.

        Sweeps without any are left out.
        """
        counts = repeatable_trials.num_by_sweep(*self._looked_in(where, None)[:2])
        return {row.name: counts[row.id] for row in self.sweeps() if row.id in counts}

    def _looked_in(self, where: str, sweep: str | None) -> tuple[str, str, int | None]:
        """Return the store, the condition, and the sweep to look in, for `repeatable_trials`."""
        url = self._database.url.render_as_string(hide_password=False)
        return url, where, self.sweep_named(sweep).id if sweep is not None else None

    # What people ask for while an orchestrator works on the sweep.

    def enqueue(self, cell_id: int, layout: Layout) -> tuple[int, TrialState, bool]:
        """Ask for a layout of a cell: its orchestrator sees it at its next `renew`.

        Returns the trial's id and state, and whether it waits for its first attempt. A layout that
        has had one is not changed.
        """
        return self._write(requests.enqueue, cell_id, layout)

    def ask_to_retry(self, sweep_id: int, trial_id: int) -> bool:
        """Ask a sweep's orchestrator to measure a trial again. False: the trial has not ended."""
        return self._write(requests.ask_to_retry, sweep_id, trial_id)

    def retry(self, sweep_id: int, trial_ids: Collection[int], *, epoch: int) -> set[int]:
        """Let ended trials that a person asked for wait again; return the ids of their cells."""
        return self._write(requests.retry, sweep_id, trial_ids, epoch)

    # How attempts end.

    def record_ends(self, ends: Sequence[Ended], *, epoch: int) -> list[Recorded]:
        """Record how attempts of one sweep ended, and their trials' new states, in one commit.

        Returns a record for each end, in order; from then on the results survive a power cut. An
        attempt that has ended before, or is not its trial's latest, changes no state: its
        measurement is kept as superseded. If an end cannot be recorded at all (there is no such
        attempt, or the database refuses a value), all others are recorded, and then its error is
        raised.
        """
        if not ends:
            return []
        try:
            return self._database.write(
                lambda connection, change: endings.record(connection, change, ends, epoch),
                durable=True,
            )
        except REFUSED:
            if len(ends) > 1:
                self._record_each(ends, epoch)
            raise

    def note_implausible(self, reasons: Mapping[int, str], *, epoch: int) -> None:
        """Mark the measurements of trials as such that cannot be true, each with its reason.

        All trials are of the sweep whose owner has this epoch.
        """
        if reasons:
            self._write(endings.note_implausible, reasons, epoch)

    def _record_each(self, ends: Sequence[Ended], epoch: int) -> None:
        """Record each end in a commit of its own, if it can be recorded."""
        for end in ends:
            try:
                self.record_ends([end], epoch=epoch)
            except REFUSED as exc:
                logger.error(
                    "The end of attempt %d of trial %d cannot be recorded: %s",
                    end.attempt,
                    end.trial_id,
                    exc,
                    extra={"action": "end_refused"},
                )

    # Profiles.

    def begin_profile(self, trial_id: int, *, epoch: int | None = None) -> int:
        """Note that a trial's layout is about to be profiled; return the profile's number.

        `epoch` is that of the sweep's owner; None: a person asks. Raises LeaseLost.
        """
        return self._write(profiles.begin, trial_id, epoch)

    def end_profile(self, ended: ProfileEnd) -> None:
        """Record how a profile ended. It changes no trial and no measurement."""
        self._write(profiles.end, ended)

    # Nodes and links.

    def record_node_checks(
        self,
        sweep_id: int | None,
        epoch: int | None,
        facts: Mapping[str, NodeFacts],
        node_checks: Mapping[str, Sequence[Check]],
    ) -> None:
        """Store checks of nodes: for a sweep by its owner, or (None, None) for a person.

        Raises LeaseLost.
        """
        self._database.write(
            lambda connection, _: node_records.record_checks(
                connection, sweep_id, epoch, facts, node_checks
            )
        )

    def bench(
        self,
        sweep_id: int,
        node: str,
        *,
        reason: BenchReason,
        is_remeasured: bool,
        evidence: Mapping[str, Any] | None = None,
        epoch: int | None = None,
    ) -> bool:
        """Bench a node: nothing is placed on it. False: it is benched already.

        `epoch` is that of the sweep's owner; None: a person asks, and the owner sees it at its next
        `renew`.
        """
        return self._write(
            node_records.bench,
            sweep_id,
            node,
            reason=reason,
            is_remeasured=is_remeasured,
            evidence=evidence,
            epoch=epoch,
        )

    def unbench(self, sweep_id: int, node: str) -> bool:
        """Use a node again. False: it was not benched."""
        return self._write(node_records.unbench, sweep_id, node)

    def remeasure(
        self,
        sweep_id: int,
        epoch: int,
        bad_nodes: Collection[str],
        *,
        except_trials: Collection[int] = (),
    ) -> set[int]:
        """Let trials wait again that have a measurement that counts from one of these nodes.

        Returns the ids of their cells.
        """
        return self._write(
            node_records.remeasure, sweep_id, epoch, bad_nodes, except_trials=except_trials
        )

    def record_links(
        self,
        run_token: str,
        samples: Sequence[tuple[LinkSample, int]],
        *,
        backend: str,
        stack: Stack,
        nodes: Sequence[str],
    ) -> None:
        """Store the samples of one gang of `sweep netbench`, each with its number of calls."""
        self._database.write(
            lambda connection, _: node_records.record_links(
                connection, run_token, samples, backend=backend, stack=stack, nodes=nodes
            )
        )


def _plain(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions as JSON reads them back."""
    plain: dict[str, Any] = json.loads(json.dumps(conditions, allow_nan=False))
    return plain
