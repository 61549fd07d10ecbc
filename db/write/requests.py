"""The statements by which a person asks for a layout, or for a trial to be measured again.

They need no lease: the orchestrator that holds the sweep reads them when it renews its lease.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import sweeps
from db.types import now
from db.write import event_log, invalidation, lease
from db.write.inserts import insert_absent
from orchestrator.core.problem.layout import Layout, to_columns
from orchestrator.core.trial.lifecycle import INITIAL, INVALIDATABLE, LogEvent, TrialState

trial, cell = schema.trial, schema.cell
WHY_ENQUEUED = "asked for: sweep enqueue"


def enqueue(
    connection: Connection, change: Change, cell_id: int, layout: Layout
) -> tuple[int, TrialState, bool]:
    """Add a trial that waits, unless the layout has one.

    Return the trial's id and state, and whether it waits for its first attempt, as asked.
    """
    sweep_id = int(
        connection.execute(sa.select(cell.c.sweep_id).where(cell.c.id == cell_id)).scalar_one()
    )
    values = {
        "sweep_id": sweep_id,
        "cell_id": cell_id,
        "state": INITIAL,
        "num_attempts": 0,
        "why": WHY_ENQUEUED,
        "layout_key": layout.key,
        **to_columns(layout),
    }
    is_new = insert_absent(connection, trial, {**values, "created_at": now(), "updated_at": now()})
    found = connection.execute(
        sa.select(trial.c.id, trial.c.state, trial.c.num_attempts).where(
            trial.c.cell_id == cell_id, trial.c.layout_key == layout.key
        )
    ).one()
    state = TrialState(found.state)
    waits = state is TrialState.QUEUED and not found.num_attempts
    if waits and not event_log.is_done(connection, change):
        epoch = sweeps.owner_epoch(connection, sweep_id)
        added = (
            [event_log.entry(sweep_id, found.id, LogEvent.ADDED, None, INITIAL, epoch)]
            if is_new
            else []
        )
        asked = event_log.entry(sweep_id, found.id, LogEvent.ENQUEUED, INITIAL, INITIAL, epoch)
        event_log.append(connection, change, [*added, asked])
    return int(found.id), state, waits


def ask_to_retry(connection: Connection, change: Change, sweep_id: int, trial_id: int) -> bool:
    """Note that a trial is to be measured again. False: it has not ended."""
    found = connection.execute(
        sa.select(trial.c.state).where(trial.c.id == trial_id, trial.c.sweep_id == sweep_id)
    ).one_or_none()
    if found is None or found.state not in INVALIDATABLE:
        return False
    if not event_log.is_done(connection, change):
        state, epoch = TrialState(found.state), sweeps.owner_epoch(connection, sweep_id)
        asked = event_log.entry(sweep_id, trial_id, LogEvent.RETRY_ASKED, state, state, epoch)
        event_log.append(connection, change, [asked])
    return True


def retry(
    connection: Connection,
    change: Change,
    sweep_id: int,
    trial_ids: Collection[int],
    epoch: int,
) -> set[int]:
    """Let trials wait again that a person asked for, as their owner; return their cells.

    Layouts that they ruled out wait again too.
    """
    lease.fence(connection, sweep_id, epoch)
    both = sorted({*trial_ids, *invalidation.condemned_by(connection, list(trial_ids))})
    if not event_log.is_done(connection, change):
        for some in portions(both):
            invalidation.invalidate_some(
                connection, change, sweep_id, some, {"asked": "sweep retry"}, epoch
            )
    return _cells_of(connection, both)


def _cells_of(connection: Connection, trial_ids: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for some in portions(trial_ids):
        statement = sa.select(trial.c.cell_id).where(trial.c.id.in_(some)).distinct()
        found.update(connection.execute(statement).scalars())
    return found
