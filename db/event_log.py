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


def done_before(connection: Connection, change: Change, trial_id: int, event: str) -> int | None:
    """The attempt's number (0: of none) with which this same change has logged an event, when an earlier try of it was committed after all; else None."""
    if not change.is_retry:
        return None
    mine = (_table.c.trial_id == trial_id, _table.c.change_id == change.id, _table.c.event == event)
    number = connection.execute(sa.select(sa.func.coalesce(_table.c.attempt, 0)).where(*mine)).scalars().first()
    return None if number is None else int(number)
