"""The truth of every sweep: `Store` remembers cells, trials, attempts, measurements and what happened, and says who may write.

Each write is one transaction that carries its owner's epoch; a stale owner gets LeaseLost and changes nothing. Reading is in queries.py.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa

from db import migrate, schema
from db.connection import url
from db.connection.engine import Change, Database
from db.read import observations, queries
from db.read.holder import holder_is_gone
from db.read.observations import ObservationRow
from db.read.rows import (
    BenchRow,
    CellRow,
    CellStatus,
    EventRow,
    Holder,
    LinkRow,
    NodeCheckRow,
    PeakRow,
    Repeats,
    ReservedBySweep,
    SessionRow,
    SweepRow,
    TrialDetail,
    TrialRow,
)
from db.sql import readonly, sql_text
from db.sql.bounded_answer import Answer
from db.types import BenchReason, StopRequest, SweepState, now
from db.write import changes, endings, invalidation, lease, link_records, node_records, sessions
from db.write.writes import Ended, NewAttempt, NewTrial, Pruned, Recorded
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.check import Check
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.machines.node_score import NEWEST_RUNS, NodeRun
from orchestrator.core.physics.links import LinkSample
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.reserved_time import Leased

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0  # renewed every few seconds; a dead orchestrator on another host is replaced after this long
# An end of no attempt, or with a value that no column takes: drivers wrap some of what they refuse, and let the rest through as it is.
REFUSED = (UsageInvalid, ValueError, OverflowError, sa.exc.StatementError)


class Store:
    """Open it with `Store.open`; it is safe to use from several threads. Any method may raise StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._token = changes.new_token()

    @classmethod
    def open(
        cls,
        database_url: str | None = None,
        *,
        patience_seconds: float | None = None,
        to_read: bool = False,
    ) -> Self:
        """Open the database of a URL, of SWEEP_DB, or .sweep/sweep.sqlite; an empty one is given its tables.

        `to_read`: nothing will be written, and the right to write is not needed.

        Once it was reached it may stay away for `patience_seconds` (None: a minute) before a call gives up. Raises StoreUnavailable with one line when it cannot be reached or written, or when its schema is not this code's.
        """
        database = Database(
            url.resolve(database_url), patience_seconds=patience_seconds, to_read=to_read
        )
        try:
            migrate.ensure_head(database, to_read=to_read)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def while_away(self, wait: Callable[[float], None]) -> None:
        """What to do for so many seconds between two tries of a database that does not answer, rather than sleep. What it raises ends the call."""
        self._database.wait = wait

    @property
    def url(self) -> str:
        """Where the store is, for people: without password and query."""
        return url.display(self._database.url)

    @property
    def path(self) -> Path | None:
        """The file of a SQLite store; None for a server."""
        return (
            Path(self._database.url.database)
            if self._database.is_sqlite and self._database.url.database
            else None
        )

    # Sweeps and who owns them.

    def ensure_sweep(self, name: str, spec_json: str, conditions: Mapping[str, Any]) -> int:
        """The id of the sweep, made if it is new. `conditions` is what makes numbers comparable, in JSON's types.

        Raises SweepChanged when it has trials of other conditions; the message shows each. Whatever else changed is written by `acquire`:
        only who holds the sweep may say how it goes on.
        """
        wanted = _plain(conditions)

        def work(connection: sa.Connection, change: Change) -> int:
            changes.insert_absent(
                connection,
                schema.sweep,
                {
                    "name": name,
                    "run_token": changes.new_token()[:12],
                    "spec_json": spec_json,
                    "conditions": wanted,
                    "state": SweepState.WAITING,
                    "created_at": now(),
                    "lease_until": now(),
                },
            )
            sweep_id: int = connection.execute(
                sa.select(schema.sweep.c.id).where(schema.sweep.c.name == name)
            ).scalar_one()
            changes.differs_from(connection, sweep_id, wanted)
            return sweep_id

        return self._database.write(work)

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
        """Take the sweep and return the epoch that every write must carry. Raises SweepHeld, naming the holder and the end of its lease.

        `spec_json` is what this owner works on, under these `conditions`; None leaves what the last one said. Raises SweepChanged as
        `ensure_sweep` does. A holder that `holder_is_dead` knows to be gone is replaced at once: after kill -9 the same command goes on.
        """

        def work(connection: sa.Connection, change: Change) -> int:
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
            if conditions is not None and changes.differs_from(
                connection, sweep_id, wanted := _plain(conditions)
            ):
                connection.execute(
                    sa.update(schema.sweep)
                    .where(schema.sweep.c.id == sweep_id)
                    .values(conditions=wanted)
                )
            return epoch

        return self._database.write(work)

    def begin_session(
        self,
        sweep_id: int,
        epoch: int,
        *,
        num_gpus: int,
        leased: Leased,
        price_per_gpu_hour: float | None = None,
    ) -> None:
        """Note that the owner of an epoch works, with so many slots, and what was leased by then. Raises LeaseLost."""

        def work(connection: sa.Connection, change: Change) -> None:
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
        """Extend the lease, say what the session's gangs have held, and return what a person asked of this orchestrator meanwhile. Raises LeaseLost."""

        def work(connection: sa.Connection, change: Change) -> StopRequest | None:
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
        stop_reasons: Sequence[str] = (),
    ) -> None:
        """Give the sweep back, and end the session with all that its gangs held. Raises LeaseLost."""

        def work(connection: sa.Connection, change: Change) -> None:
            lease.release(connection, sweep_id, epoch, state)
            if leased is not None:
                sessions.end(connection, sweep_id, epoch, leased, stop_reasons)

        self._database.write(work)

    def give_back(
        self, before: SweepRow, epoch: int | None, *, leased: Leased | None = None
    ) -> None:
        """Leave a sweep as it was `before` this owner, who launched nothing; delete one that is new and holds nothing.

        Where this owner has launched trials, `release` it as stopped. `epoch` None: `acquire` was interrupted, and may have had its effect.
        Raises LeaseLost.
        """

        def work(connection: sa.Connection, change: Change) -> None:
            held = (
                epoch if epoch is not None else lease.epoch_of(connection, before.id, self._token)
            )
            if held is None:
                return
            lease.fence(connection, before.id, held)
            if changes.has_launched(connection, before.id, held):
                lease.release(connection, before.id, held, SweepState.STOPPED)
            elif before.state is SweepState.WAITING and not changes.has_trials(
                connection, before.id
            ):
                connection.execute(sa.delete(schema.sweep).where(schema.sweep.c.id == before.id))
                return
            else:
                # One that a dead orchestrator left as running has been given back by now.
                state = SweepState.STOPPED if before.state is SweepState.RUNNING else before.state
                lease.release(connection, before.id, held, state)
                values = {"spec_json": before.spec_json, "conditions": dict(before.conditions)}
                connection.execute(
                    sa.update(schema.sweep).where(schema.sweep.c.id == before.id).values(**values)
                )
            if leased is not None:
                sessions.end(connection, before.id, held, leased, ())

        self._database.write(work)

    def request_stop(self, sweep_id: int, request: StopRequest) -> bool:
        """Ask the orchestrator of a sweep to stop, at its next `renew`. False: nobody holds it."""

        def work(connection: sa.Connection, change: Change) -> bool:
            table = schema.sweep
            held = (
                table.c.id == sweep_id,
                table.c.owner_token.is_not(None),
                table.c.lease_until > now(),
            )
            return (
                connection.execute(
                    sa.update(table).where(*held).values(stop_requested=request)
                ).rowcount
                == 1
            )

        return self._database.write(work)

    def reap(self, sweep_id: int, epoch: int) -> list[TrialRow]:
        """Mark attempts that an earlier owner left in flight as lost, let their trials wait again, and return these.

        A trial that was lost more often than its kind of failure is retried has FAILED, and is not among them.
        """

        def work(connection: sa.Connection, change: Change) -> list[TrialRow]:
            return queries.trials_by_id(
                connection, changes.reap(connection, change, sweep_id, epoch)
            )

        return self._database.write(work)

    # Cells and trials.

    def ensure_cell(self, sweep_id: int, cell: Cell, epoch: int) -> int:
        """The id of the cell in the sweep, made if it is new."""
        return self._database.write(
            lambda connection, change: changes.ensure_cell(connection, sweep_id, cell, epoch)
        )

    def begin_trials(
        self, begun: Sequence[NewTrial | NewAttempt], *, epoch: int
    ) -> list[tuple[int, int]]:
        """Begin an attempt of each, of any cells of one sweep, in one commit: the trials' ids and the attempts' numbers, in order.

        A layout whose trial is there and QUEUED is begun as that. Raises IllegalTransition, changing nothing, when one of them cannot
        begin, or is named twice: nothing was launched yet, so nothing is lost with the others.
        """
        return (
            self._database.write(
                lambda connection, change: changes.begin(connection, change, begun, epoch)
            )
            if begun
            else []
        )

    def add_pruned(self, condemned: Sequence[Pruned], *, epoch: int) -> int:
        """Record layouts as PRUNED without a launch; return how many are newly so. Those past QUEUED are left alone."""
        return (
            self._database.write(
                lambda connection, change: changes.add_pruned(connection, change, condemned, epoch)
            )
            if condemned
            else 0
        )

    def free_pruned(self, cell_id: int, layouts: Sequence[Layout], *, epoch: int) -> int:
        """Let PRUNED layouts of a cell wait again, since nothing proves any more that they cannot run; return how many did."""
        return self._database.write(
            lambda connection, change: invalidation.free_pruned(
                connection, change, cell_id, layouts, epoch
            )
        )

    def transition(
        self,
        trial_id: int,
        event: TrialEvent,
        *,
        epoch: int,
        attempt: int | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> TrialState:
        """Move a trial by an event that brings no result (FIRST_STEP, PRUNED ...) and return its new state.

        Raises IllegalTransition, changing nothing, when its state does not take the event or `attempt` is not its latest one.
        """
        if event in (
            TrialEvent.GANG_PLACED,
            TrialEvent.REPEATED,
            TrialEvent.MEASURED,
            TrialEvent.INVALIDATED,
        ):
            raise ValueError(
                f"{event} is written together with what belongs to it: by begin_trials, record_ends, invalidate"
            )
        return self._database.write(
            lambda connection, change: changes.transition(
                connection, change, [(trial_id, attempt)], event, epoch, detail
            )
        )[0]

    def note_first_steps(self, attempts: Sequence[tuple[int, int]], *, epoch: int) -> None:
        """Note that attempts, each given as trial id and number, have made their first step: `transition` of many, in one commit."""
        if attempts:
            event = TrialEvent.FIRST_STEP
            self._database.write(
                lambda connection, change: changes.transition(
                    connection, change, attempts, event, epoch, None
                )
            )

    def invalidate(
        self,
        where: str,
        *,
        sweep: str | None = None,
        holder_is_dead: Callable[[Holder], bool] | None = holder_is_gone,
    ) -> int:
        """Let trials that have ended and match a condition over v_trial wait again, with those that they condemned; return how many.

        Their attempts are kept, superseded. Raises UsageInvalid for a bad condition, SweepHeld while an orchestrator works on one of them.
        """
        found = self._matching("SELECT sweep_id, trial_id FROM matching", where, sweep)
        by_sweep: dict[int, list[int]] = {}
        for sweep_id, trial_id in found.rows:
            by_sweep.setdefault(int(sweep_id), []).append(int(trial_id))
        return self._database.write(
            lambda connection, change: invalidation.invalidate(
                connection, change, by_sweep, where, self._token, holder_is_dead
            )
        )

    def count_repeatable(self, where: str, *, sweep: str | None = None) -> dict[TrialState, int]:
        """How many trials `invalidate` would take, by state. Raises UsageInvalid for a bad condition."""
        ids = "(SELECT trial_id FROM matching)"
        taken = f"SELECT state, count(*) FROM trial WHERE id IN {ids} OR (state = 'pruned' AND condemned_by IN {ids}) GROUP BY state"
        return {
            TrialState(state): int(count)
            for state, count in self._matching(taken, where, sweep).rows
        }

    def _matching(self, statement: str, where: str, sweep: str | None) -> Answer:
        """Ask the read-only engine about `matching`: the rows of v_trial that can be repeated and match a person's condition."""
        sql_text.refuse_loose_ends(where)
        named = f" AND sweep_id = {self.sweep_named(sweep).id}" if sweep is not None else ""
        raw_url = self._database.url.render_as_string(hide_password=False)
        states = ", ".join(f"'{state}'" for state in sorted(invalidation.REPEATABLE))
        matching = f"SELECT sweep_id, trial_id FROM v_trial WHERE (\n{where}\n) AND state IN ({states}){named}"
        return readonly.query(
            raw_url, f"WITH matching AS ({matching}) {statement}", max_rows=10_000_000
        )

    # Attempts and how they end.

    def record_ends(self, ends: Sequence[Ended], *, epoch: int) -> list[Recorded]:
        """Record how attempts of one sweep ended, with their trials' new states, in one commit; what each came to, in order.

        Once this returns the results survive a power cut. An attempt that has ended already, or is not its trial's latest, changes no
        state: what it measured is kept beside what counts. One that cannot be recorded at all (there is no such attempt; a value that
        the database refuses) takes no other with it: all others are recorded, and then its error is raised.
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

    def _record_each(self, ends: Sequence[Ended], epoch: int) -> None:
        """Record those that can be, each in a commit of its own."""
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

    # Nodes.

    def record_node_checks(
        self,
        sweep_id: int | None,
        epoch: int | None,
        facts: Mapping[str, NodeFacts],
        node_checks: Mapping[str, Sequence[Check]],
    ) -> None:
        """Keep what was found when nodes were looked at, for a sweep by its owner, or (None, None) because somebody asked. Raises LeaseLost."""
        self._database.write(
            lambda connection, change: node_records.record_checks(
                connection, sweep_id, epoch, facts, node_checks
            )
        )

    def node_checks(self, sweep_id: int) -> dict[str, NodeCheckRow]:
        """The last look at each node that a sweep had."""
        return self._database.read(
            lambda connection: node_records.newest_checks(connection, sweep_id)
        )

    def node_runs(self, sweep_id: int) -> list[NodeRun]:
        """The newest measurements of a sweep that count, oldest first, as they tell of nodes."""
        return self._database.read(
            lambda connection: node_records.runs(connection, sweep_id, NEWEST_RUNS)
        )

    def node_faults(self, sweep_id: int) -> dict[str, int]:
        """Attempts of a sweep that failed by the machine's fault, by node."""
        return self._database.read(lambda connection: node_records.faults(connection, sweep_id))

    def benches(self, sweep_id: int) -> list[BenchRow]:
        """The nodes of a sweep on which nothing is placed, or was for a while, the oldest bench first."""
        return self._database.read(lambda connection: node_records.benches(connection, sweep_id))

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
        """Have nothing placed on a node any more; False: it is benched already.

        `epoch` is that of the sweep's owner; None: a person asks, and the owner sees it at its next `renew`.
        """
        return self._database.write(
            lambda connection, change: node_records.bench(
                connection,
                change,
                sweep_id,
                node,
                reason=reason,
                is_remeasured=is_remeasured,
                evidence=evidence,
                epoch=epoch,
            )
        )

    def unbench(self, sweep_id: int, node: str) -> bool:
        """Let a node be used again; False: it was not benched."""
        return self._database.write(
            lambda connection, change: node_records.unbench(connection, change, sweep_id, node)
        )

    def remeasure(
        self,
        sweep_id: int,
        epoch: int,
        bad_nodes: Collection[str],
        *,
        except_trials: Collection[int] = (),
    ) -> set[int]:
        """Let trials wait again of which a measurement that counts was taken on one of these nodes; return the ids of their cells."""
        return self._database.write(
            lambda connection, change: node_records.remeasure(
                connection, change, sweep_id, epoch, bad_nodes, except_trials=except_trials
            )
        )

    # Links.

    def record_links(
        self,
        run_token: str,
        samples: Sequence[tuple[LinkSample, int]],
        *,
        backend: str,
        stack: Stack,
        nodes: Sequence[str],
    ) -> None:
        """Keep what one gang of a `sweep netbench` measured: each sample with its number of calls."""
        self._database.write(
            lambda connection, change: link_records.record(
                connection, run_token, samples, backend=backend, stack=stack, nodes=nodes
            )
        )

    def links(self, run_token: str | None = None) -> list[LinkRow]:
        """What was measured of links, oldest first; of one `sweep netbench`, or of all."""
        return self._database.read(lambda connection: link_records.links(connection, run_token))

    # Reading.

    def sweeps(self) -> list[SweepRow]:
        """All sweeps, the newest first."""
        return self._database.read(queries.sweeps)

    def sweep_named(self, name: str) -> SweepRow:
        """Raises UsageInvalid, with the names that exist."""
        return self._database.read(lambda connection: queries.sweep_named(connection, name))

    def cells(self, sweep_id: int) -> list[CellRow]:
        return self._database.read(lambda connection: queries.cells(connection, sweep_id))

    def trials(self, sweep_id: int, cell_id: int | None = None) -> list[TrialRow]:
        """All trials of a sweep, or of one of its cells, oldest first."""
        return self._database.read(lambda connection: queries.trials(connection, sweep_id, cell_id))

    def trial(self, trial_id: int) -> TrialDetail:
        """One trial with its attempts and what happened to it. Raises UsageInvalid when there is none."""
        return self._database.read(lambda connection: queries.trial_detail(connection, trial_id))

    def status(self, sweep_id: int) -> list[CellStatus]:
        """Per cell: how many trials in each state, and the best. What they held is told by `held`."""
        return self._database.read(lambda connection: queries.status(connection, sweep_id))

    def held(self, sweep_id: int) -> ReservedBySweep:
        """What the sweep has held so far, and what that went into."""
        return self._database.read(lambda connection: queries.held(connection, sweep_id))

    def newest_session(self, sweep_id: int) -> SessionRow | None:
        """The last call that got the sweep; None: there was none, or none since sessions are noted."""
        return self._database.read(lambda connection: sessions.newest(connection, sweep_id))

    def best(self, sweep_id: int, top: int = 1) -> dict[int, list[TrialRow]]:
        """The fastest trials of each cell id under its current fingerprint, the fastest first."""
        return self._database.read(lambda connection: queries.best(connection, sweep_id, top))

    def repeats(self, cell_id: int) -> dict[int, Repeats]:
        """The repeats of each measured trial of a cell that was launched again, by trial id."""
        return self._database.read(lambda connection: queries.repeats(connection, cell_id))

    def trials_that_met(self, cell_id: int, kind: FailureKind) -> set[int]:
        """The ids of the trials of a cell of which an attempt failed so, since they were last invalidated."""
        return self._database.read(
            lambda connection: queries.trials_that_met(connection, cell_id, kind)
        )

    def observations(
        self,
        *,
        workload: str | None = None,
        is_relative: Callable[[Mapping[str, Any]], bool] | None = None,
        is_device: Callable[[str, Sequence[str]], bool] | None = None,
        sweep: str | None = None,
    ) -> list[ObservationRow]:
        """What was measured over all sweeps, or one, and what ran out of memory: the newest few thousand, spread evenly over large cells."""
        return self._database.read(
            lambda connection: observations.observations(
                connection,
                workload=workload,
                is_relative=is_relative,
                is_device=is_device,
                sweep_name=sweep,
            )
        )

    def trials_by_id(self, trial_ids: Sequence[int]) -> list[TrialRow]:
        """The trials of these ids, in their order."""
        return (
            self._database.read(lambda connection: queries.trials_by_id(connection, trial_ids))
            if trial_ids
            else []
        )

    def failure_counts(self, trial_ids: Sequence[int]) -> dict[int, Counter[FailureKind]]:
        """By trial how many of its attempts failed, by kind, since it was last invalidated: what `may_retry` asks."""
        return (
            self._database.read(lambda connection: queries.failure_counts(connection, trial_ids))
            if trial_ids
            else {}
        )

    def out_of_memories(
        self, cell_id: int, *, trial_id: int | None = None
    ) -> dict[int, list[Failure]]:
        """By trial of a cell (None: of all) its attempts that ran out of memory, since it was last invalidated."""
        return self._database.read(
            lambda connection: queries.out_of_memories(connection, cell_id, trial_id)
        )

    def measured_peaks(self, sweep_id: int) -> list[PeakRow]:
        """The peaks that MFUs of a sweep rest on where no data sheet tells, each once however many attempts have it."""
        return self._database.read(lambda connection: queries.measured_peaks(connection, sweep_id))

    def events(self, sweep_id: int, *, after_id: int = 0, limit: int = 1000) -> list[EventRow]:
        """What happened in a sweep, oldest first, from one event id on."""
        return self._database.read(
            lambda connection: queries.events(connection, sweep_id, after_id, limit)
        )


def _plain(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """As they are read back."""
    plain: dict[str, Any] = json.loads(json.dumps(conditions, allow_nan=False))
    return plain
