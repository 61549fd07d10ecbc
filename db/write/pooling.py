"""The pool of measurements of a trial: the trial has the numbers of the median one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.portions import portions

_attempt, _measurement = schema.attempt, schema.measurement
_LET_COUNT = (
    sa.update(_attempt).where(_attempt.c.id == sa.bindparam("attempt_id")).values(superseded=False)
)


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


def settle(connection: Connection, settled: Mapping[int, Sequence[Pooled]]) -> None:
    """Let only the median of each pool count; of an even number, the slower of the middle two."""
    # By two statements: the database checks after each that at most one attempt of a trial counts.
    for some in portions(list(settled)):
        connection.execute(
            sa.update(_attempt)
            .where(_attempt.c.trial_id.in_(some), _attempt.c.pooled)
            .values(superseded=True)
        )
    if settled:
        connection.execute(
            _LET_COUNT, [{"attempt_id": _median(pool).attempt_id} for pool in settled.values()]
        )


def _median(pool: Sequence[Pooled]) -> Pooled:
    return sorted(pool, key=lambda one: (one.step_seconds, one.attempt_id))[len(pool) // 2]
