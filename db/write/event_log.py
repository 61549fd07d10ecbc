"""The log of what happened: entries are added in the transaction of their event, never changed.

An entry also names its write, so that a write whose commit went unanswered is not done twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import records
from db.types import now
from orchestrator.core.trial.lifecycle import TrialState

_table = schema.event
_INSERT = sa.insert(_table).values(at=now())


def entry(
    sweep_id: int,
    trial_id: int,
    event: str,
    from_state: TrialState | None,
    to_state: TrialState,
    epoch: int,
    number: int | None = None,
    detail: Mapping[str, Any] | None = None,
) -> records.Columns:
    return {
        "sweep_id": sweep_id,
        "trial_id": trial_id,
        "attempt": number,
        "event": event,
        "from_state": from_state,
        "to_state": to_state,
        "epoch": epoch,
        "detail": None if detail is None else dict(detail),
    }


def node_entry(sweep_id: int, event: str, epoch: int, detail: Mapping[str, Any]) -> records.Columns:
    """An entry about the node that `detail` names."""
    place = {"trial_id": None, "attempt": None, "from_state": None, "to_state": None}
    return {"sweep_id": sweep_id, "event": event, "epoch": epoch, "detail": dict(detail), **place}


def append(connection: Connection, change: Change, entries: Sequence[records.Columns]) -> None:
    if entries:
        connection.execute(_INSERT, [{**entry, "change_id": change.id} for entry in entries])


def is_done(connection: Connection, change: Change) -> bool:
    """Return whether an earlier try of this same change was committed after all."""
    if not change.is_retry:
        return False
    mine = sa.select(_table.c.id).where(_table.c.change_id == change.id)
    return connection.scalar(mine.limit(1)) is not None


def done_before(
    connection: Connection, change: Change, trial_ids: Sequence[int], events: Set[str]
) -> dict[int, int]:
    """The trials for which an earlier try of this change has logged one of these events.

    Each has the number of its attempt, or 0 for none.
    """
    if not change.is_retry:
        return {}
    statement = sa.select(_table.c.trial_id, sa.func.coalesce(_table.c.attempt, 0).label("number"))
    mine = statement.where(_table.c.change_id == change.id, _table.c.event.in_(sorted(events)))
    rows = [
        row
        for some in portions(trial_ids)
        for row in connection.execute(mine.where(_table.c.trial_id.in_(some))).fetchall()
    ]
    return {row.trial_id: row.number for row in rows}
