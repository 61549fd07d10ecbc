"""Writes ends of attempts: a measurement or a failure, and the new state of the trial.

Ends are judged one after the other and written together, by few statements for any number. Only a
cell that gets another fingerprint needs some for each trial whose runs are pooled anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.id_list import ByIds
from db.read import records
from db.types import AttemptState, now
from db.write import pooling, software
from db.write.batch import Batch, TrialInBatch
from db.write.inserts import INSERTS, without_empty
from db.write.newest_code import NewestCode
from db.write.pooling import Pooled
from db.write.writes import AttemptFacts, Ended, FailedEnd, MeasuredEnd, Recorded
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import UNDER_WAY, LogEvent, TrialEvent, TrialState

attempt, cell, measurement, trial = schema.attempt, schema.cell, schema.measurement, schema.trial

# Statements are built once: building a wide one costs more than running it.
_ATTEMPTS = ByIds(
    lambda ids: (
        sa.select(
            attempt.c.trial_id,
            attempt.c.number,
            attempt.c.id,
            attempt.c.state,
            attempt.c.pooled,
            measurement.c.attempt_id.label("measured"),
            cell.c.id.label("cell_id"),
            cell.c.fingerprint_digest,
        )
        .join_from(attempt, trial, trial.c.id == attempt.c.trial_id)
        .join(cell, cell.c.id == trial.c.cell_id)
        .outerjoin(measurement, measurement.c.attempt_id == attempt.c.id)
        .where(attempt.c.trial_id.in_(ids))
    )
)
_UPDATE_LATE = sa.update(attempt).where(attempt.c.id == sa.bindparam("attempt_id"))
_UPDATE_RUNNING = _UPDATE_LATE.values(ended_at=now())
_INSERT_MEASUREMENT = sa.insert(measurement)
_INSERT_FINGERPRINTS = {
    name: insert(schema.fingerprint).values(first_seen_at=now()).on_conflict_do_nothing()
    for name, insert in INSERTS.items()
}
_FACTS = ("gpu_seconds", "timed_seconds", "warmup_seconds", "processes_killed")
_UPDATE_CELL = sa.update(cell).where(cell.c.id == sa.bindparam("cell_id"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredAttempt:
    id: int
    state: AttemptState
    pooled: bool
    is_measured: bool


def record(
    connection: Connection, change: Change, ends: Sequence[Ended], epoch: int
) -> list[Recorded]:
    """Judge all ends, then write them. Returns a record of each, in order."""
    batch = Batch(connection, change, (end.trial_id for end in ends), epoch)
    endings = _Endings(connection, batch, ends)
    for end in ends:
        endings.take(end)
    endings.write()
    return [
        Recorded(
            state=batch[end.trial_id].state,
            counts=endings.counts(end),
            fingerprint=endings.fingerprint(end),
            is_current=endings.is_current(end),
        )
        for end in ends
    ]


def note_implausible(
    connection: Connection, change: Change, reasons: Mapping[int, str], epoch: int
) -> None:
    """Mark what was measured of trials as numbers that cannot be true."""
    Batch(connection, change, reasons, epoch)  # checks the lease
    for trial_id, reason in reasons.items():
        of_trial = sa.select(attempt.c.id).where(attempt.c.trial_id == trial_id, attempt.c.pooled)
        connection.execute(
            sa.update(measurement)
            .where(measurement.c.attempt_id.in_(of_trial))
            .values(implausible=records.storable(reason), confident=False)
        )


class _Endings:
    """The changes by the ends of a batch. Each is judged as if those before it were written."""

    def __init__(self, connection: Connection, batch: Batch, ends: Sequence[Ended]) -> None:
        self._connection, self._batch = connection, batch
        trial_ids = sorted({end.trial_id for end in ends})
        rows = _ATTEMPTS.rows(connection, trial_ids)
        self._attempts = {(row.trial_id, row.number): _attempt(row) for row in rows}
        current = {row.cell_id: row.fingerprint_digest for row in rows}
        # All ends of a write are of the sweep that is leased.
        self._sweep_id = batch[trial_ids[0]].sweep_id if trial_ids else 0
        self._software = software.complete(
            connection,
            self._sweep_id,
            _fingerprints(ends),
            current=set(current.values()),
        )
        digests = _ensure_fingerprints(
            connection, self._software.stored.values(), known=set(current.values())
        )
        self._digests = {ended: digests[stored] for ended, stored in self._software.stored.items()}
        self._was_current = {
            cell_id: self._software.digest_of(digest) for cell_id, digest in current.items()
        }
        self._current = dict(self._was_current)
        repeated = [
            trial_id for trial_id in trial_ids if batch[trial_id].state is TrialState.MEASURED
        ]
        pools = pooling.pools(connection, repeated) if repeated else {}
        self._pools = {
            trial_id: [
                replace(one, fingerprint_digest=self._software.digest_of(one.fingerprint_digest))
                for one in pool
            ]
            for trial_id, pool in pools.items()
        }
        self._settled: dict[int, list[Pooled]] = {}
        # Trials with a repeat that counts instead of their earlier runs.
        self._replaced_pools: set[int] = set()
        self._newest_code = NewestCode(connection, self._software)
        self._updates: dict[tuple[bool, frozenset[str]], list[records.Columns]] = defaultdict(list)
        self._measurements: list[records.Columns] = []

    def take(self, end: Ended) -> None:
        """Judge one end.

        Raises UsageInvalid for a missing attempt.
        """
        key = end.trial_id, end.attempt
        if key not in self._attempts:
            raise UsageInvalid(f"trial {end.trial_id} has no attempt {end.attempt}")
        was = self._attempts[key]
        is_running = (
            was.state is AttemptState.RUNNING
            and end.attempt == self._batch[end.trial_id].num_attempts
        )
        match end.outcome:
            case MeasuredEnd() as outcome:
                self._attempts[key] = self._measured(end, outcome, was, is_running)
            case FailedEnd() as outcome:
                self._attempts[key] = self._failed(end, outcome, was, is_running)

    def counts(self, end: Ended) -> bool:
        """Return whether an end is a measurement that counts, once all are written."""
        is_measured = isinstance(end.outcome, MeasuredEnd)
        return is_measured and self._attempts[end.trial_id, end.attempt].pooled

    def is_current(self, end: Ended) -> bool:
        """Return whether an end has the fingerprint of its cell, once all are written."""
        return bool(self._digest(end) == self._current[self._batch[end.trial_id].cell_id])

    def write(self) -> None:
        self._batch.write()
        software.write(self._connection, self._sweep_id, self._software.replaced)
        for (is_running, _), values in self._updates.items():
            self._connection.execute(_UPDATE_RUNNING if is_running else _UPDATE_LATE, values)
        if self._measurements:
            self._connection.execute(_INSERT_MEASUREMENT, without_empty(self._measurements))
        changed = [
            (cell_id, digest)
            for cell_id, digest in self._current.items()
            if digest != self._was_current[cell_id]
        ]
        if changed:
            self._connection.execute(
                _UPDATE_CELL,
                [{"cell_id": cell_id, "fingerprint_digest": digest} for cell_id, digest in changed],
            )
        pooling.settle(self._connection, self._settled)
        gathered = {self._batch[trial_id].cell_id for trial_id in self._replaced_pools}
        gathered |= {cell_id for cell_id, _ in changed if self._was_current[cell_id] is not None}
        completed = set(self._software.replaced.values())
        gathered |= {cell_id for cell_id, digest in self._current.items() if digest in completed}
        for cell_id in sorted(gathered):
            if (digest := self._current[cell_id]) is not None:
                self._note_pooled(pooling.gather(self._connection, cell_id, digest))

    def _note_pooled(self, pooled: Mapping[int, Set[int]]) -> None:
        """Note which attempts of a trial are pooled, by their ids."""
        for key, one in self._attempts.items():
            if key[0] in pooled:
                self._attempts[key] = replace(one, pooled=one.id in pooled[key[0]])

    def _measured(
        self, end: Ended, outcome: MeasuredEnd, was: _StoredAttempt, is_running: bool
    ) -> _StoredAttempt:
        if was.is_measured:
            # The end was reported twice, or the answer to its commit was lost.
            return was
        trial_now, digest = self._batch[end.trial_id], self._digest(end)
        is_repeat = trial_now.state is TrialState.MEASURED
        counts = is_running and (
            self._counts_again(trial_now, digest) if is_repeat else trial_now.state in UNDER_WAY
        )
        state = AttemptState.MEASURED if is_running else was.state
        if counts:
            pool = self._pools.get(trial_now.id, [])
            step_seconds = outcome.measurement.step_time.median
            # `gather` counts the runs of such a trial, if its cell keeps the fingerprint.
            replaces_pool = trial_now.id in self._replaced_pools
            self._pools[trial_now.id] = pool = [
                *pool,
                Pooled(attempt_id=was.id, step_seconds=step_seconds, fingerprint_digest=digest),
            ]
            self._batch.advance(
                trial_now.id,
                TrialEvent.MEASURED,
                detail={"tokens_per_second_per_gpu": outcome.measurement.tokens_per_second_per_gpu},
                # A short attempt may end before its first step was reported.
                unreported=[TrialEvent.FIRST_STEP]
                if trial_now.state is TrialState.LAUNCHING
                else [],
                num_measurements=None if replaces_pool else len(pool),
            )
            if is_repeat and not replaces_pool:
                self._settled[trial_now.id] = pool
            elif not is_repeat and self._is_newest(end, trial_now.cell_id, was.id):
                self._current[trial_now.cell_id] = digest
        else:
            why = _why_superseded(trial_now.state, was.state if not is_running else None)
            self._batch.log(trial_now.id, LogEvent.SUPERSEDED, end.attempt, {"reason": why})
        # `settle` later picks the attempt whose numbers are the trial's. Until then a repeat is
        # superseded, since at most one attempt of a trial counts at any time.
        is_pooled = counts and trial_now.id not in self._replaced_pools
        trial_columns: records.Columns = {
            "state": state,
            "pooled": is_pooled,
            "superseded": is_repeat or not counts,
        }
        self._update(was, is_running, {**trial_columns, **_attempt_end(end.facts, digest)})
        columns = records.measurement_columns(
            outcome.measurement, outcome.gpu, outcome.memory_by_part
        )
        self._measurements.append({"attempt_id": was.id, **columns})
        if state is AttemptState.MEASURED:
            self._newest_code.note(trial_now.cell_id, digest, was.id)
        return _StoredAttempt(id=was.id, state=state, pooled=is_pooled, is_measured=True)

    def _failed(
        self, end: Ended, outcome: FailedEnd, was: _StoredAttempt, is_running: bool
    ) -> _StoredAttempt:
        trial_now = self._batch[end.trial_id]
        is_repeat = trial_now.state is TrialState.MEASURED
        if not is_running or (trial_now.state not in UNDER_WAY and not is_repeat):
            # The attempt has ended before: this end was reported twice, or too late.
            return was
        failure = outcome.failure
        detail = {"kind": failure.kind.value, "message": records.storable(failure.message)}
        if is_repeat:
            self._batch.log(trial_now.id, LogEvent.REPEAT_FAILED, end.attempt, detail)
        else:
            unreported = (
                [TrialEvent.FIRST_STEP]
                if end.stepped and trial_now.state is TrialState.LAUNCHING
                else []
            )
            self._batch.advance(trial_now.id, outcome.event, detail=detail, unreported=unreported)
        state = AttemptState(outcome.event.value)
        values = {
            "state": state,
            **_attempt_end(end.facts, self._digest(end)),
            **records.failure_columns(failure),
            "failure_peak_memory_bytes": outcome.peak_memory_bytes,
            "failure_device_memory_bytes": outcome.device_memory_bytes,
        }
        self._update(was, is_running, values)
        return _StoredAttempt(
            id=was.id, state=state, pooled=was.pooled, is_measured=was.is_measured
        )

    def _counts_again(self, trial_now: TrialInBatch, digest: str | None) -> bool:
        """Return whether a repeat counts: with the runs of its trial, or instead of them."""
        of_cell = self._current[trial_now.cell_id]
        if pooling.agrees(self._pools[trial_now.id], of_cell, digest):
            return True
        if digest is None or digest != of_cell:
            return False
        # `gather` sets the runs of its trial apart, which have an earlier fingerprint.
        self._pools[trial_now.id] = []
        self._replaced_pools.add(trial_now.id)
        return True

    def _is_newest(self, end: Ended, cell_id: int, attempt_id: int) -> bool:
        """Return whether the cell gets the fingerprint of an end: not if newer code measured it."""
        of_cell, mine = self._current[cell_id], self.fingerprint(end)
        if of_cell is None or mine is None or of_cell == self._digest(end):
            return True
        return self._newest_code.began_last(cell_id, of_cell, attempt_id, mine)

    def _digest(self, end: Ended) -> str | None:
        found = end.facts.get("fingerprint")
        return None if found is None else self._digests[found]

    def fingerprint(self, end: Ended) -> Fingerprint | None:
        """Return the fingerprint of an end as it is stored."""
        found = end.facts.get("fingerprint")
        return None if found is None else self._software.stored[found]

    def _update(self, was: _StoredAttempt, is_running: bool, values: records.Columns) -> None:
        # One statement takes rows of the same columns.
        self._updates[is_running, frozenset(values)].append({"attempt_id": was.id, **values})


def _attempt(row: sa.Row[*tuple[Any, ...]]) -> _StoredAttempt:
    return _StoredAttempt(
        id=row.id,
        state=AttemptState(row.state),
        pooled=row.pooled,
        is_measured=row.measured is not None,
    )


def _fingerprints(ends: Sequence[Ended]) -> list[Fingerprint]:
    found = (end.facts.get("fingerprint") for end in ends)
    return list(dict.fromkeys(one for one in found if one is not None))


def _ensure_fingerprints(
    connection: Connection, fingerprints: Iterable[Fingerprint], *, known: Set[str | None]
) -> dict[Fingerprint, str]:
    """Store the fingerprints that are not `known`, and return the digests of all."""
    digests = {fingerprint: fingerprint.digest for fingerprint in fingerprints}
    new = [
        records.fingerprint_columns(fingerprint)
        for fingerprint, digest in digests.items()
        if digest not in known
    ]
    if new:
        connection.execute(_INSERT_FINGERPRINTS[connection.dialect.name], new)
    return digests


def _attempt_end(facts: AttemptFacts, fingerprint_digest: str | None) -> records.Columns:
    values: records.Columns = {
        **{name: facts.get(name) for name in _FACTS},
        "environment": facts.get("environment") or None,
        "bound_cpus": {node: list(cores) for node, cores in (facts.get("bound_cpus") or {}).items()}
        or None,
        "fingerprint_digest": fingerprint_digest,
        **records.phase_columns(facts.get("phases") or {}),
    }
    if (load := facts.get("load")) is not None:
        values |= records.load_columns(load)
    if (nodes := facts.get("nodes")) is not None:
        values["nodes"] = list(nodes)
    known = {name: facts.get(name) for name in ("shared_nodes", "measured_at")}
    return values | {name: value for name, value in known.items() if value is not None}


def _why_superseded(trial_state: TrialState, ended_as: AttemptState | None) -> str:
    """Say why a measurement does not count; `ended_as`: how its attempt had ended before."""
    if ended_as is not None:
        return f"the attempt had ended before: {ended_as}"
    if trial_state is TrialState.MEASURED:
        return "measured with other code, software or device than the numbers that count"
    return f"the trial had ended before: {trial_state}"
