"""The statements that let ended trials wait again, with the trials that they condemned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import records
from db.read.rows import Holder
from db.types import SweepState, now
from db.write import event_log, lease
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.lifecycle import INVALIDATABLE, TrialEvent, TrialState, advance

trial, attempt = schema.trial, schema.attempt


def invalidate(
    connection: Connection,
    change: Change,
    by_sweep: Mapping[int, Sequence[int]],
    where: str,
    token: str,
    holder_is_dead: Callable[[Holder], bool] | None,
) -> int:
    """Take each sweep for this transaction, so that no orchestrator works on it meanwhile."""
    num_changed = 0
    for sweep_id, trial_ids in sorted(by_sweep.items()):
        epoch = lease.acquire_for_transaction(
            connection, sweep_id, token=token, holder_is_dead=holder_is_dead
        )
        freed = condemned_by(connection, trial_ids)
        for some in portions(sorted({*trial_ids, *freed})):
            num_changed += invalidate_some(
                connection, change, sweep_id, some, {"where": records.storable(where)}, epoch
            )
        lease.release(connection, sweep_id, epoch, SweepState.STOPPED)
    return num_changed


def condemned_by(connection: Connection, trial_ids: Sequence[int]) -> list[int]:
    """The pruned trials that these trials prove infeasible: they lose their proof."""
    pruned = sa.select(trial.c.id).where(trial.c.state == TrialState.PRUNED)
    return [
        int(row.id)
        for some in portions(trial_ids)
        for row in connection.execute(pruned.where(trial.c.condemned_by.in_(some))).fetchall()
    ]


def free_pruned(
    connection: Connection, change: Change, cell_id: int, layouts: Sequence[Layout], epoch: int
) -> int:
    """Let PRUNED layouts of a cell wait again; return how many trials changed."""
    sweep_id = int(
        connection.execute(
            sa.select(schema.cell.c.sweep_id).where(schema.cell.c.id == cell_id)
        ).scalar_one()
    )
    lease.fence(connection, sweep_id, epoch)
    if event_log.is_done(connection, change):
        return _num_changed(connection, change)
    found = sa.select(trial.c.id).where(
        trial.c.cell_id == cell_id, trial.c.state == TrialState.PRUNED
    )
    detail = {"freed": "no out-of-memory proves any more that it cannot run"}
    num_changed = 0
    for keys in portions([layout.key for layout in layouts]):
        ids = [int(row.id) for row in connection.execute(found.where(trial.c.layout_key.in_(keys)))]
        num_changed += invalidate_some(connection, change, sweep_id, ids, detail, epoch)
    return num_changed


def requeue_ended_early(
    connection: Connection, change: Change, sweep_id: int, trial_ids: Sequence[int], epoch: int
) -> int:
    """Requeue trials that were ended early; return how many changed."""
    lease.fence(connection, sweep_id, epoch)
    if event_log.is_done(connection, change):
        return _num_changed(connection, change)
    detail = {"ended_early": "the machine may have been slow then; it is measured to its end"}
    return sum(
        invalidate_some(connection, change, sweep_id, some, detail, epoch)
        for some in portions(trial_ids)
    )


def _num_changed(connection: Connection, change: Change) -> int:
    mine = sa.select(sa.func.count()).where(
        schema.event.c.change_id == change.id, schema.event.c.trial_id.is_not(None)
    )
    return int(connection.execute(mine).scalar_one())


def invalidate_some(
    connection: Connection,
    change: Change,
    sweep_id: int,
    some: Sequence[int],
    detail: Mapping[str, Any],
    epoch: int,
) -> int:
    """Invalidate trials of a sweep that this transaction owns; return how many wait again.

    `detail` gives the reason in the log.
    """
    num_changed = 0
    rows = connection.execute(
        sa.select(trial.c.id, trial.c.state).where(trial.c.id.in_(some))
    ).fetchall()
    moves = [(row.id, TrialState(row.state)) for row in rows if row.state in INVALIDATABLE]
    for state in {state for _, state in moves}:
        ids = [trial_id for trial_id, old in moves if old is state]
        waiting = advance(state, TrialEvent.INVALIDATED)
        values: records.Columns = {"state": waiting, "num_measurements": 0, "updated_at": now()}
        if state is TrialState.PRUNED:
            # The trial that proved it too large no longer does.
            values |= {"condemned_by": None, "why": None}
        changed = (
            sa.update(trial).where(trial.c.id.in_(ids), trial.c.state == state).values(**values)
        )
        num_changed += connection.execute(changed).rowcount
        connection.execute(
            sa.update(attempt)
            .where(attempt.c.trial_id.in_(ids))
            .values(superseded=True, pooled=False)
        )
        events = [
            event_log.entry(
                sweep_id, trial_id, TrialEvent.INVALIDATED, state, waiting, epoch, detail=detail
            )
            for trial_id in ids
        ]
        event_log.append(connection, change, events)
    return num_changed
