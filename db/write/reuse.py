"""Takes trials of another sweep over: their layouts, attempts and measurements, as rows of its own.

They reserved no GPU time in the sweep that reuses them, so they have no GPU-seconds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import records
from db.types import AttemptState, now
from db.write import event_log, lease
from db.write.inserts import INSERTS
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS
from orchestrator.core.trial.lifecycle import INITIAL, LogEvent, TrialEvent, TrialState, advance

sweep, cell, trial = schema.sweep, schema.cell, schema.trial
attempt, measurement = schema.attempt, schema.measurement

# The events that lead a new trial to the state of the one that it is taken from.
_WAYS = {
    TrialState.MEASURED: (TrialEvent.GANG_PLACED, TrialEvent.FIRST_STEP, TrialEvent.MEASURED),
    TrialState.OUT_OF_MEMORY: (TrialEvent.GANG_PLACED, TrialEvent.OUT_OF_MEMORY),
}
_OWN_COLUMNS = frozenset({
    "id", "sweep_id", "cell_id", "why", "num_attempts", "condemned_by", "reused_from", "created_at",
    "updated_at",
})  # fmt: skip


def reuse(
    connection: Connection, change: Change, cell_id: int, trial_ids: Sequence[int], epoch: int
) -> int:
    """Add those of these trials whose layout the cell lacks. Returns how many were added."""
    sweep_id = int(
        connection.execute(sa.select(cell.c.sweep_id).where(cell.c.id == cell_id)).scalar_one()
    )
    lease.fence(connection, sweep_id, epoch)
    num_added = 0
    for some in portions(trial_ids):
        sources = sa.select(trial, sweep.c.name.label("of_sweep")).join(
            sweep, sweep.c.id == trial.c.sweep_id
        )
        for row in connection.execute(sources.where(trial.c.id.in_(some))).mappings().fetchall():
            num_added += _take_over(connection, change, row, sweep_id, cell_id, epoch)
    return num_added


def _take_over(
    connection: Connection,
    change: Change,
    row: sa.RowMapping,
    sweep_id: int,
    cell_id: int,
    epoch: int,
) -> bool:
    """Add one trial with its attempts. False: the cell has a trial of the layout."""
    attempts = _counting_attempts(connection, int(row["id"]))
    values = {
        **{each.name: row[each.name] for each in trial.c if each.name not in _OWN_COLUMNS},
        "sweep_id": sweep_id,
        "cell_id": cell_id,
        "num_attempts": len(attempts),
        "why": f"reused from trial {row['id']} of sweep {row['of_sweep']}",
        "reused_from": row["id"],
        "created_at": now(),
        "updated_at": now(),
    }
    added = connection.execute(
        INSERTS[connection.dialect.name](trial)
        .values(values)
        .on_conflict_do_nothing(index_elements=["cell_id", "layout_key"])
        .returning(trial.c.id)
    ).fetchall()
    if not added:
        return False
    trial_id = int(added[0].id)
    for number, source in enumerate(attempts, start=1):
        copy = {
            **{each.name: source[each.name] for each in attempt.c if each.name != "id"},
            "trial_id": trial_id,
            "number": number,
            "epoch": epoch,
            "gpu_seconds": None,
        }
        attempt_id = connection.scalar(sa.insert(attempt).values(copy).returning(attempt.c.id))
        numbers = connection.execute(
            sa.select(measurement).where(measurement.c.attempt_id == source["id"])
        ).mappings()
        for found in numbers.fetchall():
            connection.execute(sa.insert(measurement).values({**found, "attempt_id": attempt_id}))
        _set_fingerprint(connection, cell_id, source["fingerprint_digest"])
    _log(connection, change, row, sweep_id, trial_id, epoch, len(attempts))
    return True


def _counting_attempts(connection: Connection, trial_id: int) -> Sequence[sa.RowMapping]:
    """The attempts that give a trial its state, the oldest first."""
    ran_out = sa.and_(
        attempt.c.failure_kind.in_(sorted(OUT_OF_MEMORY_KINDS)), sa.not_(attempt.c.superseded)
    )
    counts = sa.and_(attempt.c.state == AttemptState.MEASURED, sa.not_(attempt.c.superseded))
    statement = (
        sa.select(attempt)
        .where(
            attempt.c.trial_id == trial_id,
            sa.or_(attempt.c.pooled, counts, ran_out),
            attempt.c.ended_at.is_not(None),
        )
        .order_by(attempt.c.number)
    )
    return connection.execute(statement).mappings().fetchall()


def _set_fingerprint(connection: Connection, cell_id: int, digest: str | None) -> None:
    """Make what was reused current, in a cell that has measured nothing itself."""
    connection.execute(
        sa.update(cell)
        .where(cell.c.id == cell_id, cell.c.fingerprint_digest.is_(None))
        .values(fingerprint_digest=digest)
    )


def _log(
    connection: Connection,
    change: Change,
    row: sa.RowMapping,
    sweep_id: int,
    trial_id: int,
    epoch: int,
    num_attempts: int,
) -> None:
    detail = {"reused_from": row["id"], "sweep": row["of_sweep"]}
    states, events = [INITIAL], _WAYS[TrialState(row["state"])]
    for event in events:
        states.append(advance(states[-1], event))
    assert states[-1] == row["state"], f"{events} do not lead to {row['state']}"
    entries: list[records.Columns] = [
        event_log.entry(sweep_id, trial_id, LogEvent.ADDED, None, INITIAL, epoch, detail=detail)
    ]
    entries += [
        event_log.entry(sweep_id, trial_id, event, before, after, epoch, num_attempts, detail)
        for event, (before, after) in zip(events, pairwise(states), strict=True)
    ]
    event_log.append(connection, change, entries)
