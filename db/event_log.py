"""What happened to each trial, and when: entries are added in the transaction of what they tell, and never changed.

It also remembers which write an entry is of, so that one whose commit went unanswered is not done twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import records, schema
from db.engine import Change
from db.schema import now
from orchestrator.core.lifecycle import TrialState

ADDED = "added"  # the word for a trial's first row
SUPERSEDED = "superseded"  # and for a result that came too late to count
REPEAT_FAILED = "repeat_failed"  # the trial keeps what it has

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


def append(connection: Connection, change: Change, entries: Sequence[records.Columns]) -> None:
    if entries:
        connection.execute(_INSERT, [{**entry, "change_id": change.id} for entry in entries])


def number_of_repeat(connection: Connection, change: Change, trial_id: int) -> int | None:
    """The attempt's number (0: none) in what this same change has logged, when an earlier try of it was committed after all; else None."""
    if not change.is_repeat:
        return None
    statement = sa.select(_table.c.attempt).where(_table.c.trial_id == trial_id, _table.c.change_id == change.id)
    rows = connection.execute(statement).fetchall()
    return max((row.attempt or 0 for row in rows), default=None)  # a change may have logged what is of no attempt as well
