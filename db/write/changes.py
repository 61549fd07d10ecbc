"""The statements that add trials, begin attempts and move trials.

Every function first proves its epoch on the sweep's locked row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.id_list import ByIds
from db.connection.portions import portions
from db.read import records, trials
from db.types import AttemptState, now
from db.write import event_log, lease
from db.write.batch import Batch
from db.write.inserts import INSERTS, without_empty
from db.write.writes import NewAttempt, NewTrial, Pruned
from orchestrator.core.errors import LeaseLost, UsageInvalid
from orchestrator.core.problem.layout import to_columns
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, event_after
from orchestrator.core.trial.lifecycle import (
    INITIAL,
    UNDER_WAY,
    IllegalTransition,
    LogEvent,
    TrialEvent,
    TrialState,
    advance,
)
from orchestrator.core.trial.purpose import Purpose

sweep, cell, trial, attempt = schema.sweep, schema.cell, schema.trial, schema.attempt

# From this many rows on, empty columns are left out: the INSERT is long, and is parsed each time.
# For fewer rows, each set of columns would be one more text to prepare.
MANY = 32

# Statements are built once: building a wide one costs more than running it.
_INSERT_TRIAL = {
    name: insert(trial)
    .values(created_at=now(), updated_at=now())
    .on_conflict_do_nothing(index_elements=["cell_id", "layout_key"])
    .returning(trial.c.id, trial.c.cell_id, trial.c.layout_key)
    for name, insert in INSERTS.items()
}
_OWNERS_OF_CELLS = ByIds(
    lambda ids: (
        sa.select(cell.c.id, cell.c.sweep_id, sweep.c.owner_epoch, sweep.c.owner_token)
        .join(sweep, sweep.c.id == cell.c.sweep_id)
        .where(cell.c.id.in_(ids))
        .with_for_update(read=True, of=sweep)
    )
)
_TRIALS_OF_LAYOUTS = sa.select(trial.c.id, trial.c.layout_key).where(
    trial.c.cell_id == sa.bindparam("cell"),
    trial.c.layout_key.in_(sa.bindparam("keys", expanding=True)),
)
_UPDATE_TRIAL = sa.update(trial).where(trial.c.id == sa.bindparam("trial_id"))
_INSERT_ATTEMPT = sa.insert(attempt).values(started_at=now())
_UPDATE_LATEST = sa.update(attempt).where(
    attempt.c.trial_id == sa.bindparam("of_trial"),
    attempt.c.number == sa.bindparam("of_number"),
    attempt.c.state == AttemptState.RUNNING,
)
_BEGINS = frozenset({TrialEvent.GANG_PLACED, TrialEvent.REPEATED})


def begin(
    connection: Connection, change: Change, begun: Sequence[NewTrial | NewAttempt], epoch: int
) -> list[tuple[int, int]]:
    """Begin all attempts, or raise IllegalTransition; return their trial ids and numbers."""
    additions = {
        place: _Addition(new=one, event=TrialEvent.GANG_PLACED)
        for place, one in enumerate(begun)
        if isinstance(one, NewTrial)
    }
    added = _add(connection, change, list(additions.values()), epoch)
    there = _trial_ids(connection, [one.key for one in additions.values() if one.key not in added])
    # A layout may be named twice: its first place counts.
    first = {one.key: place for place, one in reversed(additions.items()) if one.key in added}
    found: dict[int, tuple[int, int]] = {place: (added[key], 1) for key, place in first.items()}
    attempts = {
        place: NewAttempt(trial_id=(added | there)[additions[place].key], nodes=one.nodes)
        if isinstance(one, NewTrial)
        else one
        for place, one in enumerate(begun)
        if place not in found
    }
    values = [
        _attempt(trial_id, number, epoch, begun[place].nodes, purpose=Purpose.NEW)
        for place, (trial_id, number) in found.items()
    ]
    batch = Batch(connection, change, (one.trial_id for one in attempts.values()), epoch)
    done = event_log.done_before(
        connection, change, [one.trial_id for one in attempts.values()], _BEGINS
    )
    for place, one in attempts.items():
        if one.trial_id not in done:
            number = batch[one.trial_id].num_attempts + 1
            event = TrialEvent.REPEATED if one.is_repeat else TrialEvent.GANG_PLACED
            batch.advance(
                one.trial_id,
                event,
                begins=number,
                detail=None if one.why is None else {"why": _storable(one.why)},
            )
            purpose = Purpose.NEW if number == 1 else one.purpose
            values.append(
                _attempt(
                    one.trial_id,
                    number,
                    epoch,
                    one.nodes,
                    purpose=purpose,
                    shared_nodes=one.shared_nodes,
                )
            )
        found[place] = (
            one.trial_id,
            done[one.trial_id] if one.trial_id in done else batch[one.trial_id].num_attempts,
        )
    batch.write()
    if values:
        connection.execute(_INSERT_ATTEMPT, values)
    return [found[place] for place in range(len(begun))]


def add_pruned(
    connection: Connection, change: Change, condemned: Sequence[Pruned], epoch: int
) -> int:
    additions = [
        _Addition(
            new=NewTrial(cell_id=one.cell_id, layout=one.layout, why=one.why),
            event=TrialEvent.PRUNED,
            detail={"condemned_by": one.condemned_by},
            condemned_by=one.condemned_by,
        )
        for one in condemned
    ]
    added = _add(connection, change, additions, epoch)
    there = _trial_ids(connection, [one.key for one in additions if one.key not in added])
    batch, why = Batch(connection, change, there.values(), epoch), []
    for one in additions:
        trial_id = there.get(one.key)
        if trial_id is not None and batch[trial_id].state is INITIAL:
            batch.advance(trial_id, TrialEvent.PRUNED, detail=one.detail)
            why.append(
                {
                    "trial_id": trial_id,
                    "why": _storable(one.new.why),
                    "condemned_by": one.condemned_by,
                }
            )
    batch.write()
    if why:
        connection.execute(_UPDATE_TRIAL, why)
    return len(added) + len(why)


def note_first_steps(
    connection: Connection, change: Change, attempts: Sequence[tuple[int, int]], epoch: int
) -> None:
    """Move all trials by FIRST_STEP, or raise IllegalTransition.

    Each attempt is a trial id and a number, which must be the trial's latest.
    """
    trial_ids = [trial_id for trial_id, _ in attempts]
    batch = Batch(connection, change, trial_ids, epoch)
    done = event_log.done_before(connection, change, trial_ids, {TrialEvent.FIRST_STEP})
    for trial_id, number in attempts:
        if trial_id in done:
            continue
        latest = batch[trial_id].num_attempts
        if number != latest:
            raise IllegalTransition(
                f"trial {trial_id}: {TrialEvent.FIRST_STEP} of attempt {number}, "
                f"but its latest is {latest}"
            )
        batch.advance(trial_id, TrialEvent.FIRST_STEP)
    batch.write()


def mark_lost(connection: Connection, change: Change, sweep_id: int, epoch: int) -> list[int]:
    """Mark running attempts of earlier epochs as lost; return the ids of trials that wait again.

    A trial that was lost too often fails instead.
    """
    lease.fence(connection, sweep_id, epoch)
    left = (
        sa.select(
            trial.c.id,
            attempt.c.started_at,
            attempt.c.ended_at,
            schema.cell.c.num_gpus,
            schema.sweep.c.name.label("sweep"),
        )
        .join(
            attempt,
            sa.and_(attempt.c.trial_id == trial.c.id, attempt.c.number == trial.c.num_attempts),
        )
        .join(schema.cell, schema.cell.c.id == trial.c.cell_id)
        .join(schema.sweep, schema.sweep.c.id == trial.c.sweep_id)
        .where(
            trial.c.sweep_id == sweep_id,
            attempt.c.state == AttemptState.RUNNING,
            attempt.c.epoch < epoch,
        )
        .order_by(trial.c.id)
    )
    rows = connection.execute(left).fetchall()
    batch = Batch(connection, change, (row.id for row in rows), epoch)
    failed_before = trials.failure_counts(connection, [row.id for row in rows])
    waiting, lost = [], []
    for row in rows:
        standing = batch[row.id]
        event = event_after(_LOST, failed_before[row.id])
        is_repeat = standing.state not in UNDER_WAY
        message = (
            "the orchestrator of this repeat died; found at the next start"
            if is_repeat
            else _lost_message(row.sweep, row.id, event, failed_before[row.id].get(_LOST, 0) + 1)
        )
        failure, detail = (
            Failure(kind=_LOST, message=message),
            {"kind": _LOST.value, "message": message},
        )
        if is_repeat:
            batch.log(row.id, LogEvent.REPEAT_FAILED, standing.num_attempts, detail)
        else:
            batch.advance(row.id, event, detail=detail)
            if event is TrialEvent.REQUEUED:
                waiting.append(int(row.id))
        # `ended_at` was written when the owner was replaced.
        seconds = (row.ended_at - row.started_at).total_seconds()
        values = {
            "state": AttemptState.LOST,
            "gpu_seconds": seconds * row.num_gpus,
            **records.failure_columns(failure),
        }
        lost.append({"of_trial": row.id, "of_number": standing.num_attempts, **values})
    batch.write()
    if lost:
        connection.execute(_UPDATE_LATEST, lost)
    return waiting


_LOST = FailureKind.ORCHESTRATOR_LOST


def _lost_message(sweep: str, trial_id: int, event: TrialEvent, times: int) -> str:
    found = "the orchestrator of this attempt died; found at the next start"
    if event is TrialEvent.REQUEUED:
        return found
    return (
        f"{found}. It was so {times} times while this trial was under way, so it is not tried "
        "again; see whether this layout takes the machine down, then: "
        f"sweep invalidate --sweep {sweep} --where 'trial_id = {trial_id}' --yes"
    )


def _fence_cells(connection: Connection, cell_ids: Set[int], epoch: int) -> dict[int, int]:
    """Lock the sweep of each cell, and return the sweeps. Raises LeaseLost for a stale epoch."""
    rows = _OWNERS_OF_CELLS.rows(connection, sorted(cell_ids))
    found = {int(row.id): int(row.sweep_id) for row in rows}
    for cell_id in cell_ids:
        if cell_id not in found:
            raise UsageInvalid(f"there is no cell with id {cell_id}")
    for row in rows:
        if row.owner_epoch != epoch or row.owner_token is None:
            raise LeaseLost(lease.lost(connection, row.sweep_id, epoch))
    return found


@dataclass(frozen=True, kw_only=True)
class _Addition:
    """A layout that may have no trial yet, and the first event of a new trial."""

    new: NewTrial
    event: TrialEvent
    detail: Mapping[str, Any] | None = None  # of the event
    condemned_by: int | None = None

    @cached_property
    def key(self) -> tuple[int, str]:
        return self.new.cell_id, self.new.layout.key

    @cached_property
    def state(self) -> TrialState:
        return advance(INITIAL, self.event)

    @property
    def num_attempts(self) -> int:
        return int(self.state in UNDER_WAY)

    def columns(self, sweep_id: int) -> records.Columns:
        one = self.new
        return {
            "sweep_id": sweep_id,
            "cell_id": one.cell_id,
            "state": self.state,
            "num_attempts": self.num_attempts,
            "why": _storable(one.why),
            "layout_key": self.key[1],
            **to_columns(one.layout),
            "predicted_tokens_per_second_per_gpu": records.finite(
                one.predicted_tokens_per_second_per_gpu
            ),
            "predicted_memory_bytes": None
            if (memory := records.finite(one.predicted_memory_bytes)) is None
            else int(memory),
            "condemned_by": self.condemned_by,
        }

    def entries(self, sweep_id: int, trial_id: int, epoch: int) -> list[records.Columns]:
        number = self.num_attempts or None
        return [
            event_log.entry(sweep_id, trial_id, LogEvent.ADDED, None, INITIAL, epoch),
            event_log.entry(
                sweep_id, trial_id, self.event, INITIAL, self.state, epoch, number, self.detail
            ),
        ]


def _add(
    connection: Connection, change: Change, additions: Sequence[_Addition], epoch: int
) -> dict[tuple[int, str], int]:
    """Add trials for the layouts that have none; return the new ids by cell and layout.

    After the proof of the epoch this takes two statements for any number.
    """
    if not additions:
        return {}
    sweeps = _fence_cells(connection, {one.new.cell_id for one in additions}, epoch)
    absent = {one.key: one for one in additions}
    values = [one.columns(sweeps[cell_id]) for (cell_id, _), one in absent.items()]
    # Rows are matched by cell and layout: the database promises no order.
    if len(values) >= MANY:
        values = without_empty(values)
    rows = connection.execute(_INSERT_TRIAL[connection.dialect.name], values).fetchall()
    added = {(row.cell_id, row.layout_key): int(row.id) for row in rows}
    entries = [
        entry
        for key, trial_id in added.items()
        for entry in absent[key].entries(sweeps[key[0]], trial_id, epoch)
    ]
    event_log.append(connection, change, entries)
    return added


def _trial_ids(
    connection: Connection, keys: Sequence[tuple[int, str]]
) -> dict[tuple[int, str], int]:
    """The trials of these layouts, by cell and layout."""
    found: dict[tuple[int, str], int] = {}
    for cell_id in dict.fromkeys(cell_id for cell_id, _ in keys):
        # Cell by cell: SQLite uses no index for a list of pairs, and reads all trials instead.
        for some in portions([key for cell, key in keys if cell == cell_id]):
            rows = connection.execute(
                _TRIALS_OF_LAYOUTS, {"cell": cell_id, "keys": some}
            ).fetchall()
            found |= {(cell_id, row.layout_key): int(row.id) for row in rows}
    return found


def _attempt(
    trial_id: int,
    number: int,
    epoch: int,
    nodes: Sequence[str] | None,
    *,
    purpose: Purpose,
    shared_nodes: bool | None = None,
) -> records.Columns:
    return {
        "trial_id": trial_id,
        "number": number,
        "epoch": epoch,
        "state": AttemptState.RUNNING,
        "purpose": purpose,
        "nodes": None if nodes is None else list(nodes),
        "shared_nodes": shared_nodes,
    }


def _storable(text: str | None) -> str | None:
    return None if text is None else records.storable(text)
