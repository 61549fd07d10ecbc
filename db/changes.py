"""The statements that change sweeps, trials and attempts, each within a transaction of the store's.

Every function first proves its epoch on the sweep's locked row. `_advance` is the only writer of a trial's state.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypedDict, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from db import event_log, lease, pooling, queries, records, schema
from db.engine import Change
from db.schema import AttemptState, now
from orchestrator.core.cell import Cell
from orchestrator.core.errors import LeaseLost, UsageInvalid
from orchestrator.core.failures import Failure, FailureKind, may_retry
from orchestrator.core.fingerprint import Fingerprint
from orchestrator.core.layout import Layout
from orchestrator.core.lifecycle import IN_FLIGHT, INITIAL, IllegalTransition, TrialEvent, TrialState, advance
from orchestrator.core.measurement import Measurement
from orchestrator.core.protocol import GpuUsage, Phase

CHUNK = 500  # values in one IN (...): SQLite takes 32,766 in all, and short statements are cached

trial, attempt = schema.trial, schema.attempt

# Made once, values given when they run: to put a wide statement together costs more than to run it.
_INSERT_TRIAL = sa.insert(trial).values(created_at=now(), updated_at=now()).returning(trial.c.id)
_INSERT_ATTEMPT = sa.insert(attempt).values(started_at=now())
_INSERT_MEASUREMENT = sa.insert(schema.measurement)
_UPDATE_ATTEMPT = sa.update(attempt).where(attempt.c.id == sa.bindparam("attempt_id"))
_OF_ATTEMPTS = frozenset({TrialEvent.REPEATED, TrialEvent.MEASURED})
_COMPARE_AND_SET = (
    sa.update(trial)
    .where(
        trial.c.id == sa.bindparam("trial_id"),
        trial.c.state == sa.bindparam("was_state"),
        trial.c.num_attempts == sa.bindparam("was_attempts"),
    )
    .values(updated_at=now())
)
_STANDING = (
    sa.select(
        trial.c.sweep_id, trial.c.cell_id, trial.c.state, trial.c.num_attempts, schema.sweep.c.owner_epoch, schema.sweep.c.owner_token
    )
    .join(schema.sweep, schema.sweep.c.id == trial.c.sweep_id)
    .where(trial.c.id == sa.bindparam("trial_id"))
    .with_for_update(read=True, of=schema.sweep)
)

_T = TypeVar("_T")


class AttemptFacts(TypedDict, total=False):
    """What is known of an attempt however it ended."""

    phases: Mapping[Phase, float]  # seconds in each, worst rank
    fingerprint: Fingerprint | None
    gpu_seconds: float | None  # GPUs held x seconds
    processes_killed: int | None
    nodes: Sequence[str] | None  # None: as given to start_attempt
    shared_nodes: bool | None


@dataclass(frozen=True, slots=True)
class _Standing:
    """A trial as it stands, under the lock that keeps its owner."""

    id: int
    sweep_id: int
    cell_id: int
    state: TrialState
    num_attempts: int


def new_token() -> str:
    return uuid.uuid4().hex


def insert_absent(connection: Connection, table: sa.Table, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows whose keys are not there yet; the others are left as they are."""
    many = [rows] if isinstance(rows, Mapping) else list(rows)
    if not many:
        return
    # SQL expressions (the database's clock) cannot be parameters: they are part of the statement.
    fixed = {name: value for name, value in many[0].items() if isinstance(value, sa.ClauseElement)}
    insert = sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)
    values = [{name: value for name, value in row.items() if name not in fixed} for row in many]
    connection.execute(insert.values(**fixed).on_conflict_do_nothing(), values)


def chunks(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The values in portions for one statement each."""
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))


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


def add_trial(
    connection: Connection,
    change: Change,
    cell_id: int,
    layout: Layout,
    epoch: int,
    why: str | None,
    predicted_tokens_per_second_per_gpu: float | None,
    predicted_memory_bytes: float | None,
) -> int:
    sweep_id = _fence_cell(connection, cell_id, epoch)
    known = sa.select(trial.c.id).where(trial.c.cell_id == cell_id, trial.c.layout_key == layout.key)
    if (row := connection.execute(known).one_or_none()) is not None:
        return int(row.id)
    memory = records.finite(predicted_memory_bytes)
    values = {
        **_new_trial(sweep_id, cell_id, layout, why),
        "predicted_tokens_per_second_per_gpu": records.finite(predicted_tokens_per_second_per_gpu),
        "predicted_memory_bytes": None if memory is None else int(memory),
    }
    trial_id = int(connection.execute(_INSERT_TRIAL, values).scalars().all()[0])
    event_log.append(connection, change, [event_log.entry(sweep_id, trial_id, event_log.ADDED, None, INITIAL, epoch)])
    return trial_id


def begin_trial(
    connection: Connection,
    change: Change,
    cell_id: int,
    layout: Layout,
    epoch: int,
    why: str | None,
    predicted_tokens_per_second_per_gpu: float | None,
    predicted_memory_bytes: float | None,
    nodes: Sequence[str] | None,
) -> tuple[int, int]:
    """Add the trial and start its attempt: one commit for what a new launch writes. The trial's id and the attempt's number."""
    trial_id = add_trial(connection, change, cell_id, layout, epoch, why, predicted_tokens_per_second_per_gpu, predicted_memory_bytes)
    return trial_id, start_attempt(connection, change, trial_id, epoch, nodes, None)


def add_pruned(
    connection: Connection, change: Change, cell_id: int, layouts: Sequence[tuple[Layout, str]], condemned_by: int | None, epoch: int
) -> int:
    sweep_id = _fence_cell(connection, cell_id, epoch)
    pruned = advance(INITIAL, TrialEvent.PRUNED)
    why = {layout.key: (layout, text) for layout, text in layouts}
    before = {row.layout_key: row for row in _trials_of_keys(connection, cell_id, list(why))}
    new = [_new_trial(sweep_id, cell_id, layout, text) for key, (layout, text) in why.items() if key not in before]
    if new:
        insert_absent(connection, trial, [{**row, "created_at": now(), "updated_at": now()} for row in new])
    waiting = [row for row in _trials_of_keys(connection, cell_id, list(why)) if row.state == INITIAL]
    if not waiting:
        return 0
    update = sa.update(trial).where(trial.c.id == sa.bindparam("trial_id"), trial.c.state == INITIAL)
    connection.execute(
        update.values(state=pruned, condemned_by=condemned_by, why=sa.bindparam("text"), updated_at=now()),
        [{"trial_id": row.id, "text": records.storable(why[row.layout_key][1])} for row in waiting],
    )
    added = [event_log.entry(sweep_id, row.id, event_log.ADDED, None, INITIAL, epoch) for row in waiting if row.layout_key not in before]
    detail = {"condemned_by": condemned_by}
    event_log.append(
        connection,
        change,
        [*added, *(event_log.entry(sweep_id, row.id, TrialEvent.PRUNED, INITIAL, pruned, epoch, detail=detail) for row in waiting)],
    )
    return len(waiting)


def start_attempt(
    connection: Connection,
    change: Change,
    trial_id: int,
    epoch: int,
    nodes: Sequence[str] | None,
    shared_nodes: bool | None,
    event: TrialEvent = TrialEvent.GANG_PLACED,
    why: str | None = None,
) -> int:
    standing = _standing(connection, trial_id, epoch)
    if (number := event_log.done_before(connection, change, trial_id, event)) is not None:
        return number
    number = standing.num_attempts + 1
    said = {"nodes": None if nodes is None else list(nodes), "why": None if why is None else records.storable(why)}
    detail = {name: value for name, value in said.items() if value is not None} or None
    standing = _advance(connection, change, standing, event, epoch, number=number, detail=detail)
    values = {
        "trial_id": trial_id,
        "number": number,
        "epoch": epoch,
        "state": AttemptState.RUNNING,
        "nodes": list(nodes) if nodes is not None else None,
        "shared_nodes": shared_nodes,
    }
    connection.execute(_INSERT_ATTEMPT, values)
    return number


def note_nodes(connection: Connection, trial_id: int, number: int, epoch: int, nodes: Sequence[str]) -> None:
    _standing(connection, trial_id, epoch)
    running = (*_attempt_is(trial_id, number), attempt.c.state == AttemptState.RUNNING)
    connection.execute(sa.update(attempt).where(*running).values(nodes=list(nodes)))


def transition(
    connection: Connection,
    change: Change,
    trial_id: int,
    event: TrialEvent,
    epoch: int,
    number: int | None,
    detail: Mapping[str, Any] | None,
) -> TrialState:
    standing = _standing(connection, trial_id, epoch)
    if event_log.done_before(connection, change, trial_id, event) is not None:
        return standing.state
    if number is not None and number != standing.num_attempts:
        raise IllegalTransition(f"trial {trial_id}: {event} of attempt {number}, but its latest is {standing.num_attempts}")
    was_in_flight = standing.state in IN_FLIGHT
    standing = _advance(connection, change, standing, event, epoch, detail=detail)
    if was_in_flight and standing.state not in IN_FLIGHT:
        values = {"state": AttemptState(event.value), "ended_at": now()}
        connection.execute(sa.update(attempt).where(*_attempt_is(trial_id, standing.num_attempts)).values(**values))
    return standing.state


def record_measurement(
    connection: Connection,
    change: Change,
    trial_id: int,
    number: int,
    epoch: int,
    measurement: Measurement,
    gpu: GpuUsage,
    memory_by_part: Mapping[str, int] | None,
    facts: AttemptFacts,
) -> bool:
    standing = _standing(connection, trial_id, epoch)
    row = _attempt(connection, trial_id, number)
    if row.is_measured:
        return bool(row.pooled)  # told twice, or a commit whose answer was lost
    in_time = row.state == AttemptState.RUNNING and number == standing.num_attempts
    digest = _ensure_fingerprint(connection, facts.get("fingerprint"))
    values = _attempt_end(facts, digest)
    is_repeat = standing.state is TrialState.MEASURED
    counts = in_time and (pooling.agrees(connection, trial_id, digest) if is_repeat else standing.state in IN_FLIGHT)
    if counts:
        # Where it was too short for its first step to have been reported by itself, that is noted now.
        unreported = [TrialEvent.FIRST_STEP] if standing.state is TrialState.LAUNCHING else []
        detail = {"tokens_per_second_per_gpu": measurement.tokens_per_second_per_gpu}
        _advance(connection, change, standing, TrialEvent.MEASURED, epoch, detail=detail, unreported=unreported)
        # Of a repeat, the pool says below whether its numbers are the trial's: at most one attempt's are, at any time.
        values |= {"state": AttemptState.MEASURED, "pooled": True, "superseded": is_repeat}
        if not is_repeat:
            cell = schema.cell
            other = (cell.c.id == standing.cell_id, cell.c.fingerprint_digest.is_distinct_from(digest))
            connection.execute(sa.update(cell).where(*other).values(fingerprint_digest=digest))
    else:
        state = standing.state
        event_log.append(
            connection, change, [event_log.entry(standing.sweep_id, trial_id, event_log.SUPERSEDED, state, state, epoch, number)]
        )
        values["superseded"] = True
        if in_time:
            values["state"] = AttemptState.MEASURED
    update = _UPDATE_ATTEMPT.values(ended_at=now()) if in_time else _UPDATE_ATTEMPT
    connection.execute(update, {"attempt_id": row.id, **values})
    connection.execute(_INSERT_MEASUREMENT, {"attempt_id": row.id, **records.measurement_columns(measurement, gpu, memory_by_part)})
    if counts:
        pooling.settle(connection, trial_id, is_first=not is_repeat)
    return counts


def record_failure(
    connection: Connection,
    change: Change,
    trial_id: int,
    number: int,
    epoch: int,
    failure: Failure,
    event: TrialEvent,
    memory: Mapping[str, int | None],
    facts: AttemptFacts,
) -> TrialState:
    standing = _standing(connection, trial_id, epoch)
    row = _attempt(connection, trial_id, number)
    is_repeat = standing.state is TrialState.MEASURED
    if row.state != AttemptState.RUNNING or number != standing.num_attempts or (standing.state not in IN_FLIGHT and not is_repeat):
        return standing.state  # it has ended already: told twice, or too late
    state = AttemptState(event.value)
    detail = {"kind": failure.kind.value, "message": records.storable(failure.message)}
    if is_repeat:
        _log_failed_repeat(connection, change, standing, epoch, detail)
    else:
        standing = _advance(connection, change, standing, event, epoch, detail=detail)
    digest = _ensure_fingerprint(connection, facts.get("fingerprint"))
    values = {"state": state, "ended_at": now(), **_attempt_end(facts, digest), **records.failure_columns(failure), **memory}
    connection.execute(sa.update(attempt).where(attempt.c.id == row.id).values(**values))
    return standing.state


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
    waiting: list[int] = []
    for row in rows:
        standing = _standing(connection, row.id, epoch)
        if standing.state not in IN_FLIGHT:
            failure = Failure(kind=_LOST, message="the orchestrator of this repeat died; found at the next start")
            _log_failed_repeat(connection, change, standing, epoch, {"kind": _LOST.value, "message": failure.message})
            _end_lost(connection, row, standing, failure)
            continue
        times = queries.failure_counts(connection, row.id).get(_LOST, 0) + 1
        failure = Failure(kind=_LOST, message=_lost_message(row.id, times))
        event = TrialEvent.REQUEUED if may_retry(_LOST, {_LOST: times}) else TrialEvent.FAILED
        _advance(connection, change, standing, event, epoch, detail={"kind": _LOST.value, "message": failure.message})
        if event is TrialEvent.REQUEUED:
            waiting.append(int(row.id))
        _end_lost(connection, row, standing, failure)
    return waiting


def _end_lost(connection: Connection, row: sa.Row[*tuple[Any, ...]], standing: _Standing, failure: Failure) -> None:
    # Its end was noted when its owner was replaced. Not negative: an owner that slept past its lease may have begun after that end.
    held_seconds = max(0.0, (row.ended_at - row.started_at).total_seconds())
    values = {"state": AttemptState.LOST, "gpu_seconds": held_seconds * row.num_gpus, **records.failure_columns(failure)}
    connection.execute(sa.update(attempt).where(*_attempt_is(standing.id, standing.num_attempts)).values(**values))


_LOST = FailureKind.ORCHESTRATOR_LOST


def _lost_message(trial_id: int, times: int) -> str:
    found = "the orchestrator of this attempt died; found at the next start"
    if may_retry(_LOST, {_LOST: times}):
        return found
    cure = f"see whether this layout takes the machine down, then: sweep invalidate --where 'trial_id = {trial_id}'"
    return f"{found}. It was so {times} times while this trial was under way, so it is not tried again; {cure}"


def _standing(connection: Connection, trial_id: int, epoch: int) -> _Standing:
    """Read a trial and hold its sweep's row. Raises LeaseLost for a stale epoch."""
    row = connection.execute(_STANDING, {"trial_id": trial_id}).one_or_none()
    if row is None:
        raise UsageInvalid(f"there is no trial with id {trial_id}")
    if row.owner_epoch != epoch or row.owner_token is None:
        raise LeaseLost(lease.lost(connection, row.sweep_id, epoch))
    return _Standing(trial_id, row.sweep_id, row.cell_id, TrialState(row.state), row.num_attempts)


def _advance(
    connection: Connection,
    change: Change,
    standing: _Standing,
    event: TrialEvent,
    epoch: int,
    *,
    number: int | None = None,
    detail: Mapping[str, Any] | None = None,
    unreported: Sequence[TrialEvent] = (),
) -> _Standing:
    """Compare and set the state, and log it. `number`: of the attempt that this event begins; `unreported`: what must have come before it."""
    states = [standing.state]
    for each in (*unreported, event):
        states.append(advance(states[-1], each))
    state = states[-1]
    num_attempts = standing.num_attempts if number is None else number
    values = {"trial_id": standing.id, "was_state": standing.state, "was_attempts": standing.num_attempts}
    if (
        connection.execute(_COMPARE_AND_SET, {**values, "state": state, "num_attempts": num_attempts}).rowcount != 1
    ):  # _standing keeps other owners out, not another thread of this one
        raise IllegalTransition(f"trial {standing.id}: {event} came too late, its state was no longer {standing.state}")
    of_attempt = num_attempts if IN_FLIGHT & {state, standing.state} or event in _OF_ATTEMPTS else None
    entries = [
        event_log.entry(standing.sweep_id, standing.id, each, before, after, epoch, of_attempt, detail if each is event else None)
        for each, (before, after) in zip((*unreported, event), pairwise(states), strict=True)
    ]
    event_log.append(connection, change, entries)
    return replace(standing, state=state, num_attempts=num_attempts)


def _log_failed_repeat(connection: Connection, change: Change, standing: _Standing, epoch: int, detail: Mapping[str, Any]) -> None:
    state, number = standing.state, standing.num_attempts
    entry = event_log.entry(standing.sweep_id, standing.id, event_log.REPEAT_FAILED, state, state, epoch, number, detail)
    event_log.append(connection, change, [entry])


def _fence_cell(connection: Connection, cell_id: int, epoch: int) -> int:
    """The sweep of a cell, its row held. Raises LeaseLost for a stale epoch."""
    sweep, cell = schema.sweep, schema.cell
    statement = sa.select(sweep.c.id, sweep.c.owner_epoch, sweep.c.owner_token).join(cell, cell.c.sweep_id == sweep.c.id)
    row = connection.execute(statement.where(cell.c.id == cell_id).with_for_update(read=True, of=sweep)).one_or_none()
    if row is None:
        raise UsageInvalid(f"there is no cell with id {cell_id}")
    if row.owner_epoch != epoch or row.owner_token is None:
        raise LeaseLost(lease.lost(connection, row.id, epoch))
    return int(row.id)


def _new_trial(sweep_id: int, cell_id: int, layout: Layout, why: str | None) -> records.Columns:
    text = None if why is None else records.storable(why)
    return {"sweep_id": sweep_id, "cell_id": cell_id, "state": INITIAL, "why": text, **records.layout_columns(layout)}


def _trials_of_keys(connection: Connection, cell_id: int, keys: Sequence[str]) -> list[sa.Row[*tuple[Any, ...]]]:
    columns = sa.select(trial.c.id, trial.c.layout_key, trial.c.state).where(trial.c.cell_id == cell_id)
    return [row for some in chunks(keys) for row in connection.execute(columns.where(trial.c.layout_key.in_(some))).fetchall()]


def _attempt(connection: Connection, trial_id: int, number: int) -> sa.Row[*tuple[Any, ...]]:
    is_measured = sa.exists().where(schema.measurement.c.attempt_id == attempt.c.id).label("is_measured")
    statement = sa.select(attempt.c.id, attempt.c.state, attempt.c.pooled, is_measured).where(*_attempt_is(trial_id, number))
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise UsageInvalid(f"trial {trial_id} has no attempt {number}")
    return row


def _attempt_is(trial_id: int, number: int) -> tuple[sa.ColumnElement[bool], ...]:
    return attempt.c.trial_id == trial_id, attempt.c.number == number


def _attempt_end(facts: AttemptFacts, fingerprint_digest: str | None) -> records.Columns:
    values: records.Columns = {
        "gpu_seconds": facts.get("gpu_seconds"),
        "processes_killed": facts.get("processes_killed"),
        "fingerprint_digest": fingerprint_digest,
        **records.phase_columns(facts.get("phases") or {}),
    }
    if (nodes := facts.get("nodes")) is not None:
        values["nodes"] = list(nodes)
    if (shared := facts.get("shared_nodes")) is not None:
        values["shared_nodes"] = shared
    return values


def _ensure_fingerprint(connection: Connection, fingerprint: Fingerprint | None) -> str | None:
    if fingerprint is None:
        return None
    insert_absent(connection, schema.fingerprint, {**records.fingerprint_columns(fingerprint), "first_seen_at": now()})
    return fingerprint.digest
