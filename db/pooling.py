"""Several measurements of one trial: its numbers are those of the median one, taken whole, so that they belong together."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema

_trial, _attempt, _measurement = schema.trial, schema.attempt, schema.measurement
_COUNT_FIRST = sa.update(_trial).where(_trial.c.id == sa.bindparam("trial_id")).values(num_measurements=1)


def agrees(connection: Connection, trial_id: int, fingerprint_digest: str | None) -> bool:
    """Whether a repeat was measured with what its trial was, and what its cell is measured with now: numbers of two fingerprints have no median."""
    mine = sa.select(_attempt.c.fingerprint_digest).where(_attempt.c.trial_id == trial_id, _attempt.c.pooled)
    cells = sa.select(schema.cell.c.fingerprint_digest).join(_trial, _trial.c.cell_id == schema.cell.c.id).where(_trial.c.id == trial_id)
    return set(connection.execute(sa.union(mine, cells)).scalars()) <= {fingerprint_digest}


def settle(connection: Connection, trial_id: int, *, is_first: bool) -> None:
    """Let the median of the pool stand for the trial; of an even number, the slower of the two in the middle."""
    if is_first:
        connection.execute(_COUNT_FIRST, {"trial_id": trial_id})
        return
    pool = (
        sa.select(_attempt.c.id)
        .join(_measurement, _measurement.c.attempt_id == _attempt.c.id)
        .where(_attempt.c.trial_id == trial_id, _attempt.c.pooled)
        .order_by(_measurement.c.step_seconds_median, _attempt.c.id)
    )
    ids = [int(i) for i in connection.execute(pool).scalars()]
    # One after the other: at most one attempt of a trial may count, and the database sees to that after each statement.
    connection.execute(sa.update(_attempt).where(_attempt.c.id.in_(ids)).values(superseded=True))
    connection.execute(sa.update(_attempt).where(_attempt.c.id == ids[len(ids) // 2]).values(superseded=False))
    connection.execute(sa.update(_trial).where(_trial.c.id == trial_id).values(num_measurements=len(ids)))
