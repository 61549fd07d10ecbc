"""The pool of measurements of a trial: the trial has the numbers of the median one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.portions import portions
from db.types import AttemptState, now
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState

_attempt, _measurement = schema.attempt, schema.measurement
_event, _trial = schema.event, schema.trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooled:
    """One of a trial's measurements that count together."""

    attempt_id: int
    step_seconds: float
    fingerprint_digest: str | None


def pools(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[Pooled]]:
    """The measurements of each trial that count together."""
    statement = (
        sa.select(
            _attempt.c.trial_id,
            _attempt.c.id,
            _attempt.c.fingerprint_digest,
            _measurement.c.step_seconds_median,
        )
        .join(_measurement, _measurement.c.attempt_id == _attempt.c.id)
        .where(_attempt.c.pooled)
    )
    found: dict[int, list[Pooled]] = {trial_id: [] for trial_id in trial_ids}
    for some in portions(trial_ids):
        for row in connection.execute(statement.where(_attempt.c.trial_id.in_(some))).fetchall():
            one = Pooled(
                attempt_id=row.id,
                step_seconds=row.step_seconds_median,
                fingerprint_digest=row.fingerprint_digest,
            )
            found[row.trial_id].append(one)
    return found


def agrees(pool: Sequence[Pooled], of_cell: str | None, fingerprint_digest: str | None) -> bool:
    """Return whether a repeat has the fingerprint of its pool and of its cell.

    Numbers of two fingerprints have no median.
    """
    return {of_cell, *(one.fingerprint_digest for one in pool)} == {fingerprint_digest}


def gather(
    connection: Connection, cell_id: int, fingerprint_digest: str
) -> dict[int, frozenset[int]]:
    """Pool the runs that measured trials of a cell have with its newest fingerprint.

    Return the pooled attempts of each trial for which these are others than before, by id.

    A repeat that ended while its cell had another fingerprint was kept apart. It counts once its
    cell has its fingerprint; the runs that counted until then are kept apart from it.
    """
    trial_ids = _apart(connection, cell_id, fingerprint_digest)
    pools = _since_invalidated(connection, trial_ids, fingerprint_digest)
    for some in portions(list(pools)):
        connection.execute(
            sa.update(_attempt)
            .where(_attempt.c.trial_id.in_(some), _attempt.c.state == AttemptState.MEASURED)
            .values(superseded=True, pooled=False)
        )
    medians = [_median(pool).attempt_id for pool in pools.values()]
    _update_attempts(connection, medians, pooled=True, superseded=False)
    others = {one.attempt_id for pool in pools.values() for one in pool} - set(medians)
    _update_attempts(connection, sorted(others), pooled=True)
    by_number = defaultdict[int, list[int]](list)
    for trial_id, pool in pools.items():
        by_number[len(pool)].append(trial_id)
    for number, ids in by_number.items():
        for some in portions(ids):
            connection.execute(
                sa.update(_trial)
                .where(_trial.c.id.in_(some))
                .values(num_measurements=number, updated_at=now())
            )
    return {trial_id: frozenset(one.attempt_id for one in pool) for trial_id, pool in pools.items()}


def _apart(connection: Connection, cell_id: int, fingerprint_digest: str) -> Sequence[int]:
    """The measured trials with a run of this fingerprint that is not pooled."""
    statement = (
        sa.select(_trial.c.id)
        .distinct()
        .join(_attempt, _attempt.c.trial_id == _trial.c.id)
        .where(
            _trial.c.cell_id == cell_id,
            _trial.c.state == TrialState.MEASURED,
            _attempt.c.state == AttemptState.MEASURED,
            _attempt.c.fingerprint_digest == fingerprint_digest,
            sa.not_(_attempt.c.pooled),
        )
        .order_by(_trial.c.id)
    )
    return connection.execute(statement).scalars().all()


def _since_invalidated(
    connection: Connection, trial_ids: Sequence[int], fingerprint_digest: str
) -> dict[int, list[Pooled]]:
    """The runs of each trial with this fingerprint since the trial was last invalidated.

    Trials without such a run are left out.
    """
    runs = (
        sa.select(
            _attempt.c.trial_id,
            _attempt.c.number,
            _attempt.c.id,
            _measurement.c.step_seconds_median,
        )
        .join(_measurement, _measurement.c.attempt_id == _attempt.c.id)
        .where(
            _attempt.c.state == AttemptState.MEASURED,
            _attempt.c.fingerprint_digest == fingerprint_digest,
        )
        .order_by(_attempt.c.id)
    )
    found = defaultdict[int, list[Pooled]](list)
    for some in portions(trial_ids):
        last = _last_invalidated(connection, some)
        for row in connection.execute(runs.where(_attempt.c.trial_id.in_(some))):
            if row.number > last.get(row.trial_id, 0):
                found[row.trial_id].append(
                    Pooled(
                        attempt_id=row.id,
                        step_seconds=row.step_seconds_median,
                        fingerprint_digest=fingerprint_digest,
                    )
                )
    return dict(found)


def _last_invalidated(connection: Connection, trial_ids: Sequence[int]) -> dict[int, int]:
    """The last attempt of each trial that was invalidated, by its number."""
    invalidated = (
        sa.select(_event.c.trial_id, sa.func.max(_event.c.id).label("id"))
        .where(_event.c.trial_id.in_(trial_ids), _event.c.event == TrialEvent.INVALIDATED)
        .group_by(_event.c.trial_id)
        .subquery()
    )
    statement = (
        sa.select(_event.c.trial_id, sa.func.max(_event.c.attempt).label("number"))
        .join(invalidated, invalidated.c.trial_id == _event.c.trial_id)
        .where(_event.c.id < invalidated.c.id, _event.c.attempt.is_not(None))
        .group_by(_event.c.trial_id)
    )
    return {row.trial_id: row.number for row in connection.execute(statement)}


def settle(connection: Connection, settled: Mapping[int, Sequence[Pooled]]) -> None:
    """Let only the median of each pool count; of an even number, the slower of the middle two."""
    # By two statements: the database checks after each that at most one attempt of a trial counts.
    for some in portions(list(settled)):
        connection.execute(
            sa.update(_attempt)
            .where(_attempt.c.trial_id.in_(some), _attempt.c.pooled)
            .values(superseded=True)
        )
    medians = [_median(pool).attempt_id for pool in settled.values()]
    _update_attempts(connection, medians, superseded=False)


def _update_attempts(connection: Connection, ids: Sequence[int], **values: bool) -> None:
    for some in portions(ids):
        connection.execute(sa.update(_attempt).where(_attempt.c.id.in_(some)).values(values))


def _median(pool: Sequence[Pooled]) -> Pooled:
    return sorted(pool, key=lambda one: (one.step_seconds, one.attempt_id))[len(pool) // 2]
