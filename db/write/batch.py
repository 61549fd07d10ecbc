"""The trials of one write: read once under the lock that keeps their owner, moved in memory, and written together however many they are.

It is the only writer of a trial's state, but for new rows and for what a person invalidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    IN_FLIGHT,
    IllegalTransition,
    TrialEvent,
    TrialState,
    advance,
)

sweep, trial = schema.sweep, schema.trial

# Made once, values given when they run: to put a wide statement together costs more than to run it.
# The sweep before its trials, as whoever takes it over does: in the other order two of them could wait for each other. And by a statement of
# its own: only the next one sees what it has waited for.
_HOLD_SWEEPS = ByIds(
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
class Standing:
    """A trial as it stands."""

    id: int
    sweep_id: int
    cell_id: int
    state: TrialState
    num_attempts: int
    num_measurements: int


class Batch:
    """Read with the constructor, moved by `advance` and `log`, written by `write`: a few statements for any number of trials."""

    def __init__(
        self, connection: Connection, change: Change, trial_ids: Iterable[int], epoch: int
    ) -> None:
        """Hold the sweeps of the trials, and the trials. Raises LeaseLost for a stale epoch, UsageInvalid for a trial that is not there."""
        self._connection, self._change, self._epoch = connection, change, epoch
        self._before = _standings(connection, sorted(set(trial_ids)), epoch)
        self._now = dict(self._before)
        self._entries: list[records.Columns] = []

    def __getitem__(self, trial_id: int) -> Standing:
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
    ) -> Standing:
        """Move a trial. `begins`: the number of the attempt that this event begins; `unreported`: what must have come before it.

        Raises IllegalTransition for a move that the table of states lacks.
        """
        was = self._now[trial_id]
        states = [was.state]
        for each in (*unreported, event):
            states.append(advance(states[-1], each))
        is_now = replace(
            was,
            state=states[-1],
            num_attempts=was.num_attempts if begins is None else begins,
            num_measurements=was.num_measurements if num_measurements is None else num_measurements,
        )
        of_attempt = (
            is_now.num_attempts
            if IN_FLIGHT & {is_now.state, was.state} or event in _OF_ATTEMPTS
            else None
        )
        for each, (before, after) in zip((*unreported, event), pairwise(states), strict=True):
            said = detail if each is event else None
            self._entries.append(
                event_log.entry(
                    was.sweep_id, trial_id, each, before, after, self._epoch, of_attempt, said
                )
            )
        self._now[trial_id] = is_now
        return is_now

    def log(
        self, trial_id: int, word: str, number: int, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Note what moves no trial."""
        was = self._now[trial_id]
        self._entries.append(
            event_log.entry(
                was.sweep_id, trial_id, word, was.state, was.state, self._epoch, number, detail
            )
        )

    def write(self) -> None:
        """Compare and set the states, and log what happened. Raises IllegalTransition when a trial is no longer as it was read."""
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
                    f"a write came too late: not every trial was as it was read. Of {len(moved)}: {who}"
                )
        event_log.append(self._connection, self._change, self._entries)


def _standings(connection: Connection, trial_ids: Sequence[int], epoch: int) -> dict[int, Standing]:
    if (
        connection.dialect.name != "sqlite"
    ):  # which knows no locks of rows: whoever writes has the file
        _HOLD_SWEEPS.rows(connection, trial_ids)
    rows = _TRIALS.rows(connection, trial_ids)
    for row in rows:
        if row.owner_epoch != epoch or row.owner_token is None:
            raise LeaseLost(lease.lost(connection, row.sweep_id, epoch))
    found = {
        row.id: Standing(
            id=row.id,
            sweep_id=row.sweep_id,
            cell_id=row.cell_id,
            state=TrialState(row.state),
            num_attempts=row.num_attempts,
            num_measurements=row.num_measurements,
        )
        for row in rows
    }
    for trial_id in trial_ids:
        if trial_id not in found:
            raise UsageInvalid(f"there is no trial with id {trial_id}")
    return found
