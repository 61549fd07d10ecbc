"""The statements that add sweeps, cells and trials, and begin attempts, each within a transaction of the store's.

Every function first proves its epoch on the sweep's locked row. How attempts end stands in endings.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from db import event_log, lease, queries, records, schema
from db.batch import Batch
from db.engine import Change
from db.news import NewAttempt, NewTrial, Pruned
from db.portions import portions
from db.schema import AttemptState, now
from orchestrator.core.cell import Cell
from orchestrator.core.errors import LeaseLost, UsageInvalid
from orchestrator.core.failures import Failure, FailureKind, may_retry
from orchestrator.core.lifecycle import IN_FLIGHT, INITIAL, IllegalTransition, TrialEvent, TrialState

trial, attempt = schema.trial, schema.attempt

# Made once, values given when they run: to put a wide statement together costs more than to run it.
_INSERT_TRIAL = sa.insert(trial).values(created_at=now(), updated_at=now()).returning(trial.c.id, trial.c.cell_id, trial.c.layout_key)
_UPDATE_TRIAL = sa.update(trial).where(trial.c.id == sa.bindparam("trial_id"))
_INSERT_ATTEMPT = sa.insert(attempt).values(started_at=now())
_UPDATE_LATEST = sa.update(attempt).where(
    attempt.c.trial_id == sa.bindparam("of_trial"), attempt.c.number == sa.bindparam("of_number"), attempt.c.state == AttemptState.RUNNING
)
_END_LATEST = _UPDATE_LATEST.values(ended_at=now())
_BEGINS = frozenset({TrialEvent.GANG_PLACED, TrialEvent.REPEATED})


def new_token() -> str:
    return uuid.uuid4().hex


def insert_absent(connection: Connection, table: sa.Table, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """Insert the rows whose keys are not there yet; the others are left as they are. How many were inserted."""
    many = [rows] if isinstance(rows, Mapping) else list(rows)
    if not many:
        return 0
    # SQL expressions (the database's clock) cannot be parameters: they are part of the statement.
    fixed = {name: value for name, value in many[0].items() if isinstance(value, sa.ClauseElement)}
    insert = sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)
    values = [{name: value for name, value in row.items() if name not in fixed} for row in many]
    statement = insert.values(**fixed).on_conflict_do_nothing()
    return connection.execute(statement, values, execution_options={"preserve_rowcount": True}).rowcount


def difference(name: str, was: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The message of SweepChanged: each condition that differs, as it was and as it is."""
    lines = [
        f"  {key}: was {was.get(key, 'absent')!r}, is {wanted.get(key, 'absent')!r}"
        for key in sorted(was.keys() | wanted.keys())
        if was.get(key, _ABSENT) != wanted.get(key, _ABSENT)
    ]
    return "\n".join([f"sweep {name!r} was measured under other conditions:", *lines, "Rename the sweep, or restore the spec"])


_ABSENT = object()


def ensure_cell(connection: Connection, sweep_id: int, cell: Cell, epoch: int) -> int:
    lease.fence(connection, sweep_id, epoch)
    table, digest = schema.cell, cell.model.digest
    insert_absent(connection, schema.model, records.model_columns(cell.model))
    identity = {
        "sweep_id": sweep_id,
        "model_digest": digest,
        "num_gpus": cell.num_gpus,
        "sequence_length": cell.sequence_length,
        "global_batch_size": cell.global_batch_size,
    }
    insert_absent(connection, table, {**identity, "key": cell.key, "model_name": cell.model.name})
    return int(connection.execute(sa.select(table.c.id).filter_by(**identity)).scalar_one())


def add_trials(connection: Connection, change: Change, new: Sequence[NewTrial], epoch: int) -> list[int]:
    """The ids of the layouts' trials, in their order; those that are there already are left as they stand."""
    sweeps = _fence_cells(connection, {one.cell_id for one in new}, epoch)
    ids = _trial_ids(connection, new)
    absent = {(one.cell_id, one.layout.key): one for one in new if (one.cell_id, one.layout.key) not in ids}
    if absent:
        values = [
            {
                "sweep_id": sweeps[one.cell_id],
                "cell_id": one.cell_id,
                "state": INITIAL,
                "why": None if one.why is None else records.storable(one.why),
                **records.layout_columns(one.layout),
                "predicted_tokens_per_second_per_gpu": records.finite(one.predicted_tokens_per_second_per_gpu),
                "predicted_memory_bytes": None if (memory := records.finite(one.predicted_memory_bytes)) is None else int(memory),
            }
            for one in absent.values()
        ]
        # Told apart by what they are, not by the order in which the database returns them: it promises none.
        ids |= {(row.cell_id, row.layout_key): int(row.id) for row in connection.execute(_INSERT_TRIAL, values)}
        added = [event_log.entry(sweeps[cell_id], ids[cell_id, key], event_log.ADDED, None, INITIAL, epoch) for cell_id, key in absent]
        event_log.append(connection, change, added)
    return [ids[one.cell_id, one.layout.key] for one in new]


def begin(connection: Connection, change: Change, begun: Sequence[NewTrial | NewAttempt], epoch: int) -> list[tuple[int, int]]:
    """The trial and the number of each new attempt. All of them, or IllegalTransition and none."""
    new = [one for one in begun if isinstance(one, NewTrial)]
    ids = iter(add_trials(connection, change, new, epoch) if new else ())
    attempts = [NewAttempt(trial_id=next(ids), nodes=one.nodes) if isinstance(one, NewTrial) else one for one in begun]
    batch = Batch(connection, change, (one.trial_id for one in attempts), epoch)
    done = event_log.done_before(connection, change, [one.trial_id for one in attempts], _BEGINS)
    values = []
    for one in attempts:
        if one.trial_id in done:
            continue
        nodes = None if one.nodes is None else list(one.nodes)
        said = {"nodes": nodes, "why": None if one.why is None else records.storable(one.why)}
        number = batch[one.trial_id].num_attempts + 1
        detail = {name: value for name, value in said.items() if value is not None} or None
        batch.advance(one.trial_id, TrialEvent.REPEATED if one.is_repeat else TrialEvent.GANG_PLACED, begins=number, detail=detail)
        values.append(
            {
                "trial_id": one.trial_id,
                "number": number,
                "epoch": epoch,
                "state": AttemptState.RUNNING,
                "nodes": nodes,
                "shared_nodes": one.shared_nodes,
            }
        )
    batch.write()
    if values:
        connection.execute(_INSERT_ATTEMPT, values)
    return [(one.trial_id, done[one.trial_id] if one.trial_id in done else batch[one.trial_id].num_attempts) for one in attempts]


def add_pruned(connection: Connection, change: Change, condemned: Sequence[Pruned], epoch: int) -> int:
    new = [NewTrial(cell_id=one.cell_id, layout=one.layout) for one in condemned]
    ids = add_trials(connection, change, new, epoch)
    batch, why = Batch(connection, change, ids, epoch), []
    for trial_id, one in zip(ids, condemned, strict=True):
        if batch[trial_id].state is INITIAL:
            batch.advance(trial_id, TrialEvent.PRUNED, detail={"condemned_by": one.condemned_by})
            why.append({"trial_id": trial_id, "why": records.storable(one.why), "condemned_by": one.condemned_by})
    batch.write()
    if why:
        connection.execute(_UPDATE_TRIAL, why)
    return len(why)


def transition(
    connection: Connection,
    change: Change,
    moves: Sequence[tuple[int, int | None]],
    event: TrialEvent,
    epoch: int,
    detail: Mapping[str, Any] | None,
) -> list[TrialState]:
    """The new state of each trial, given with the attempt that must be its latest, if any. All of them, or IllegalTransition and none."""
    batch = Batch(connection, change, (trial_id for trial_id, _ in moves), epoch)
    done = event_log.done_before(connection, change, [trial_id for trial_id, _ in moves], {event})
    ended = []
    for trial_id, number in moves:
        if trial_id in done:
            continue
        was = batch[trial_id]
        if number is not None and number != was.num_attempts:
            raise IllegalTransition(f"trial {trial_id}: {event} of attempt {number}, but its latest is {was.num_attempts}")
        state = batch.advance(trial_id, event, detail=detail).state
        if was.state in IN_FLIGHT and state not in IN_FLIGHT:
            ended.append({"of_trial": trial_id, "of_number": was.num_attempts, "state": AttemptState(event.value)})
    batch.write()
    if ended:
        connection.execute(_END_LATEST, ended)
    return [batch[trial_id].state for trial_id, _ in moves]


def reap(connection: Connection, change: Change, sweep_id: int, epoch: int) -> list[int]:
    """The ids of the trials that wait again; one that was lost too often has failed. Their attempts are of earlier epochs: nobody can end them."""
    lease.fence(connection, sweep_id, epoch)
    left = (
        sa.select(trial.c.id, attempt.c.started_at, attempt.c.ended_at, schema.cell.c.num_gpus)
        .join(attempt, sa.and_(attempt.c.trial_id == trial.c.id, attempt.c.number == trial.c.num_attempts))
        .join(schema.cell, schema.cell.c.id == trial.c.cell_id)
        .where(trial.c.sweep_id == sweep_id, attempt.c.state == AttemptState.RUNNING, attempt.c.epoch < epoch)
        .order_by(trial.c.id)
    )
    rows = connection.execute(left).fetchall()
    batch = Batch(connection, change, (row.id for row in rows), epoch)
    failed_before = queries.failure_counts(connection, [row.id for row in rows])
    waiting, lost = [], []
    for row in rows:
        standing = batch[row.id]
        times = failed_before[row.id].get(_LOST, 0) + 1
        is_repeat = standing.state not in IN_FLIGHT
        message = "the orchestrator of this repeat died; found at the next start" if is_repeat else _lost_message(row.id, times)
        failure, detail = Failure(kind=_LOST, message=message), {"kind": _LOST.value, "message": message}
        if is_repeat:
            batch.log(row.id, event_log.REPEAT_FAILED, standing.num_attempts, detail)
        elif may_retry(_LOST, {_LOST: times}):
            batch.advance(row.id, TrialEvent.REQUEUED, detail=detail)
            waiting.append(int(row.id))
        else:
            batch.advance(row.id, TrialEvent.FAILED, detail=detail)
        # Its end was noted when its owner was replaced. Not negative: an owner that slept past its lease may have begun after that end.
        held_seconds = max(0.0, (row.ended_at - row.started_at).total_seconds())
        values = {"state": AttemptState.LOST, "gpu_seconds": held_seconds * row.num_gpus, **records.failure_columns(failure)}
        lost.append({"of_trial": row.id, "of_number": standing.num_attempts, **values})
    batch.write()
    if lost:
        connection.execute(_UPDATE_LATEST, lost)
    return waiting


_LOST = FailureKind.ORCHESTRATOR_LOST


def _lost_message(trial_id: int, times: int) -> str:
    found = "the orchestrator of this attempt died; found at the next start"
    if may_retry(_LOST, {_LOST: times}):
        return found
    cure = f"see whether this layout takes the machine down, then: sweep invalidate --where 'trial_id = {trial_id}'"
    return f"{found}. It was so {times} times while this trial was under way, so it is not tried again; {cure}"


def _fence_cells(connection: Connection, cell_ids: Set[int], epoch: int) -> dict[int, int]:
    """The sweep of each cell, its row held. Raises LeaseLost for a stale epoch."""
    sweep, cell = schema.sweep, schema.cell
    statement = sa.select(cell.c.id, cell.c.sweep_id, sweep.c.owner_epoch, sweep.c.owner_token).join(sweep, sweep.c.id == cell.c.sweep_id)
    rows = connection.execute(statement.where(cell.c.id.in_(sorted(cell_ids))).with_for_update(read=True, of=sweep)).fetchall()
    found = {int(row.id): int(row.sweep_id) for row in rows}
    for cell_id in cell_ids:
        if cell_id not in found:
            raise UsageInvalid(f"there is no cell with id {cell_id}")
    for row in rows:
        if row.owner_epoch != epoch or row.owner_token is None:
            raise LeaseLost(lease.lost(connection, row.sweep_id, epoch))
    return found


def _trial_ids(connection: Connection, new: Sequence[NewTrial]) -> dict[tuple[int, str], int]:
    """The trials of these layouts that are there, by cell and layout."""
    statement = sa.select(trial.c.id, trial.c.cell_id, trial.c.layout_key)
    pair = sa.tuple_(trial.c.cell_id, trial.c.layout_key)
    asked = [(one.cell_id, one.layout.key) for one in new]
    rows = [row for some in portions(asked) for row in connection.execute(statement.where(pair.in_(some))).fetchall()]
    return {(row.cell_id, row.layout_key): int(row.id) for row in rows}
