"""The trials of one write: read once under their sweep's lock, moved in memory, written together.

Only this module changes a trial's state, except in new rows and in invalidations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.id_list import ByIds
from db.read import records
from db.types import now
from db.write import event_log, lease
from orchestrator.core.errors import LeaseLost, UsageInvalid
from orchestrator.core.trial.lifecycle import (
    UNDER_WAY,
    IllegalTransition,
    TrialEvent,
    TrialState,
    advance,
)

sweep, trial = schema.sweep, schema.trial

# Statements are built once: building a wide one costs more than running it.
# The sweep is locked before its trials, as in a takeover, so that two of them cannot wait for
# each other. It has its own statement: only the next one sees what this one has waited for.
_LOCK_SWEEPS = ByIds(
    lambda ids: (
        sa.select(sweep.c.id)
        .where(sweep.c.id.in_(sa.select(trial.c.sweep_id).where(trial.c.id.in_(ids))))
        .with_for_update(read=True)
    )
)
_TRIALS = ByIds(
    lambda ids: (
        sa.select(
            trial.c.id,
            trial.c.sweep_id,
            trial.c.cell_id,
            trial.c.state,
            trial.c.num_attempts,
            trial.c.num_measurements,
            sweep.c.owner_epoch,
            sweep.c.owner_token,
        )
        .join(sweep, sweep.c.id == trial.c.sweep_id)
        .where(trial.c.id.in_(ids))
        .order_by(trial.c.id)
        .with_for_update(key_share=True, of=trial)
    )
)
_COMPARE_AND_SET = (
    sa.update(trial)
    .where(
        trial.c.id == sa.bindparam("trial_id"),
        trial.c.state == sa.bindparam("was_state"),
        trial.c.num_attempts == sa.bindparam("was_attempts"),
    )
    .values(updated_at=now())
)
_OF_ATTEMPTS = frozenset({TrialEvent.REPEATED, TrialEvent.MEASURED})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialInBatch:
    """A trial as read, or as changed by this write."""

    id: int
    sweep_id: int
    cell_id: int
    state: TrialState
    num_attempts: int
    num_measurements: int


class Batch:
    """The trials of one write: few statements for any number of them.

    The constructor reads them, `advance` and `log` change them, `write` writes them.
    """

    def __init__(
        self, connection: Connection, change: Change, trial_ids: Iterable[int], epoch: int
    ) -> None:
        """Lock the trials and their sweeps.

        Raises LeaseLost for a stale epoch, UsageInvalid for a missing trial.
        """
        self._connection, self._change, self._epoch = connection, change, epoch
        self._before = _trials_now(connection, sorted(set(trial_ids)), epoch)
        self._now = dict(self._before)
        self._entries: list[records.Columns] = []

    def __getitem__(self, trial_id: int) -> TrialInBatch:
        return self._now[trial_id]

    def advance(
        self,
        trial_id: int,
        event: TrialEvent,
        *,
        begins: int | None = None,
        detail: Mapping[str, Any] | None = None,
        unreported: Sequence[TrialEvent] = (),
        num_measurements: int | None = None,
    ) -> TrialInBatch:
        """Move a trial.

        `begins` is the number of the attempt that this event begins, `unreported` the events that
        must have come before it. Raises IllegalTransition for a move that no state allows.
        """
        was = self._now[trial_id]
        states = [was.state]
        for each in (*unreported, event):
            states.append(advance(states[-1], each))
        is_now = TrialInBatch(
            id=was.id,
            sweep_id=was.sweep_id,
            cell_id=was.cell_id,
            state=states[-1],
            num_attempts=was.num_attempts if begins is None else begins,
            num_measurements=was.num_measurements if num_measurements is None else num_measurements,
        )
        of_attempt = (
            is_now.num_attempts
            if UNDER_WAY & {is_now.state, was.state} or event in _OF_ATTEMPTS
            else None
        )
        for each, (before, after) in zip((*unreported, event), pairwise(states), strict=True):
            its_detail = detail if each is event else None
            self._entries.append(
                event_log.entry(
                    was.sweep_id, trial_id, each, before, after, self._epoch, of_attempt, its_detail
                )
            )
        self._now[trial_id] = is_now
        return is_now

    def log(
        self, trial_id: int, word: str, number: int, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Log an event that moves no trial."""
        was = self._now[trial_id]
        self._entries.append(
            event_log.entry(
                was.sweep_id, trial_id, word, was.state, was.state, self._epoch, number, detail
            )
        )

    def write(self) -> None:
        """Compare and set the states, and log the events.

        Raises IllegalTransition if a trial has changed since it was read.
        """
        moved = [
            (was, self._now[was.id])
            for was in self._before.values()
            if self._now[was.id] is not was
        ]
        if moved:
            values = [
                {
                    "trial_id": was.id,
                    "was_state": was.state,
                    "was_attempts": was.num_attempts,
                    "state": is_now.state,
                    "num_attempts": is_now.num_attempts,
                    "num_measurements": is_now.num_measurements,
                }
                for was, is_now in moved
            ]
            if self._connection.execute(_COMPARE_AND_SET, values).rowcount != len(moved):
                who = ", ".join(f"{was.id} (read as {was.state})" for was, _ in moved[:5])
                raise IllegalTransition(
                    f"a write came too late: not every trial was as it was read. "
                    f"Of {len(moved)}: {who}"
                )
        event_log.append(self._connection, self._change, self._entries)


def _trials_now(
    connection: Connection, trial_ids: Sequence[int], epoch: int
) -> dict[int, TrialInBatch]:
    # SQLite has no locks of rows: a writer locks the file.
    if connection.dialect.name != "sqlite":
        _LOCK_SWEEPS.rows(connection, trial_ids)
    rows = _TRIALS.rows(connection, trial_ids)
    for row in rows:
        if row.owner_epoch != epoch or row.owner_token is None:
            raise LeaseLost(lease.lost(connection, row.sweep_id, epoch))
    found = {
        row.id: records.build(TrialInBatch, row._mapping, state=TrialState(row.state))
        for row in rows
    }
    for trial_id in trial_ids:
        if trial_id not in found:
            raise UsageInvalid(f"there is no trial with id {trial_id}")
    return found
