"""The statements that read about sweeps, their cells, sessions, events and reserved GPU time."""

from __future__ import annotations

import datetime as dt
import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records, remarks, trials
from db.read.holder import live_holder
from db.read.rows import (
    CellRow,
    CellStatus,
    EventRow,
    ReservedBySweep,
    SessionRow,
    SweepRow,
    SweepSummary,
    UnderWayRow,
)
from db.types import AttemptState, StopRequest, SweepState, now
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.reserved_time import ReservedGpuSeconds

sweep, session, cell, model = schema.sweep, schema.session, schema.cell, schema.model
trial, attempt, event = schema.trial, schema.attempt, schema.event
fingerprint = schema.fingerprint

_SWEEPS = sa.select(sweep, now().label("now"))


def sweeps(connection: Connection) -> list[SweepRow]:
    return [_sweep_row(row) for row in connection.execute(_SWEEPS.order_by(sweep.c.id.desc()))]


def summaries(connection: Connection) -> list[SweepSummary]:
    """All sweeps, the newest first, each with its numbers of trials and its best speeds."""
    num_cells = sa.select(cell.c.sweep_id, sa.func.count()).group_by(cell.c.sweep_id)
    cells_of = {row[0]: int(row[1]) for row in connection.execute(num_cells)}
    counting = sa.select(
        trial.c.sweep_id, trial.c.state, sa.func.count(), sa.func.max(trial.c.updated_at)
    ).group_by(trial.c.sweep_id, trial.c.state)
    seen = sa.select(session.c.sweep_id, sa.func.max(session.c.seen_at)).group_by(
        session.c.sweep_id
    )
    states: dict[int, dict[TrialState, int]] = {}
    times: dict[int, list[dt.datetime]] = {}
    for sweep_id, state, number, at in connection.execute(counting):
        states.setdefault(sweep_id, {})[TrialState(state)] = int(number)
        times.setdefault(sweep_id, []).append(at)
    for sweep_id, at in connection.execute(seen):
        times.setdefault(sweep_id, []).append(at)
    speed = "tokens_per_second_per_gpu"
    best = sa.text(
        f"SELECT sweep_id, min({speed}), max({speed}) FROM v_best WHERE is_current"
        " GROUP BY sweep_id"
    )
    bests = {row[0]: (row[1], row[2]) for row in connection.execute(best)}
    return [
        SweepSummary(
            sweep=row,
            num_cells=cells_of.get(row.id, 0),
            num_trials=states.get(row.id, {}),
            slowest_best=bests.get(row.id, (None, None))[0],
            fastest_best=bests.get(row.id, (None, None))[1],
            changed_at=max([row.created_at, *times.get(row.id, ())]),
        )
        for row in sweeps(connection)
    ]


def owner_epoch(connection: Connection, sweep_id: int) -> int:
    """The epoch of the sweep's last owner."""
    of_sweep = sa.select(sweep.c.owner_epoch).where(sweep.c.id == sweep_id)
    return int(connection.execute(of_sweep).scalar_one())


def sweep_named(connection: Connection, name: str) -> SweepRow:
    row = connection.execute(_SWEEPS.where(sweep.c.name == name)).one_or_none()
    if row is not None:
        return _sweep_row(row)
    names = list(connection.scalars(sa.select(sweep.c.name).order_by(sweep.c.id.desc())))
    close = difflib.get_close_matches(name, names, n=1)
    there = f"there are: {', '.join(names[:20]) or 'none yet'}"
    hint = f"did you mean {close[0]!r}?" if close else there
    raise UsageInvalid(f"no sweep is named {name!r}; {hint}")


def fingerprints(connection: Connection, sweep_id: int) -> list[Fingerprint]:
    """The fingerprints under which a sweep was measured, oldest first."""
    of_sweep = (
        sa.select(attempt.c.fingerprint_digest)
        .join(trial, trial.c.id == attempt.c.trial_id)
        .where(trial.c.sweep_id == sweep_id, attempt.c.fingerprint_digest.is_not(None))
    )
    statement = (
        sa.select(fingerprint)
        .where(fingerprint.c.digest.in_(of_sweep))
        .order_by(fingerprint.c.first_seen_at, fingerprint.c.digest)
    )
    return [records.fingerprint_of(row) for row in connection.execute(statement).mappings()]


def newest_session(connection: Connection, sweep_id: int) -> SessionRow | None:
    of_sweep = sa.select(session).where(session.c.sweep_id == sweep_id)
    newest = connection.execute(of_sweep.order_by(session.c.epoch.desc()).limit(1))
    row = newest.mappings().one_or_none()
    return None if row is None else _session_row(row)


def sessions(connection: Connection, sweep_id: int) -> list[SessionRow]:
    of_sweep = sa.select(session).where(session.c.sweep_id == sweep_id)
    ordered = connection.execute(of_sweep.order_by(session.c.epoch)).mappings()
    return [_session_row(row) for row in ordered]


def cells(connection: Connection, sweep_id: int) -> list[CellRow]:
    return [
        cell_row(row)
        for row in connection.execute(
            CELLS.where(cell.c.sweep_id == sweep_id).order_by(cell.c.id)
        ).mappings()
    ]


def status(connection: Connection, sweep_id: int) -> list[CellStatus]:
    counting = (
        sa.select(
            trial.c.cell_id,
            trial.c.state,
            sa.func.count().label("n"),
            # As TrialRow.was_launched has it.
            sa.func.count()
            .filter(trial.c.num_attempts > 0, trial.c.reused_from.is_(None))
            .label("num_launched"),
        )
        .where(trial.c.sweep_id == sweep_id)
        .group_by(trial.c.cell_id, trial.c.state)
    )
    counts: dict[int, dict[TrialState, int]] = {}
    launched = Counter[int]()
    for row in connection.execute(counting):
        counts.setdefault(row.cell_id, {})[TrialState(row.state)] = row.n
        launched[row.cell_id] += row.num_launched
    fastest = trials.best(connection, sweep_id, 1)
    # Only of cells without a best layout, since it reads all their measurements.
    unranked = [
        cell_id
        for cell_id, of_cell in counts.items()
        if of_cell.get(TrialState.MEASURED) and cell_id not in fastest
    ]
    implausible = remarks.num_implausible(connection, unranked)
    return [
        CellStatus(
            cell=row,
            num_trials={state: counts.get(row.id, {}).get(state, 0) for state in TrialState},
            best=next(iter(fastest.get(row.id, ())), None),
            num_launched=launched[row.id],
            num_implausible=implausible.get(row.id),
        )
        for row in cells(connection, sweep_id)
    ]


def under_way(connection: Connection, sweep_id: int) -> list[UnderWayRow]:
    is_running = attempt.c.state == sa.literal_column(f"'{AttemptState.RUNNING}'")
    # A trial that is measured again keeps its state.
    since = sa.case(
        (trial.c.state == TrialState.MEASURED, attempt.c.started_at), else_=trial.c.updated_at
    )
    statement = (
        sa.select(
            trial.c.id.label("trial_id"),
            trial.c.cell_id,
            cell.c.key.label("cell"),
            cell.c.num_gpus,
            trial.c.layout_key.label("layout"),
            trial.c.state,
            attempt.c.number.label("attempt"),
            attempt.c.nodes,
            attempt.c.purpose,
            since.label("since"),
        )
        .join(trial, trial.c.id == attempt.c.trial_id)
        .join(cell, cell.c.id == trial.c.cell_id)
        .where(is_running, trial.c.sweep_id == sweep_id)
        .order_by(trial.c.id)
    )
    return [
        records.build(
            UnderWayRow,
            row,
            state=TrialState(row["state"]),
            nodes=tuple(row["nodes"] or ()),
            purpose=Purpose(row["purpose"]) if row["purpose"] else None,
        )
        for row in connection.execute(statement).mappings()
    ]


def reserved(connection: Connection, sweep_id: int) -> ReservedBySweep:
    statement = sa.text("SELECT * FROM v_gpu_seconds WHERE sweep_id = :sweep_id")
    rows = connection.execute(statement, {"sweep_id": sweep_id}).mappings().all()
    parts = {
        row["cell_id"]: ReservedGpuSeconds(
            **{name: row[f"{name}_gpu_seconds"] or 0.0 for name in ReservedGpuSeconds().parts}
        )
        for row in rows
    }
    return ReservedBySweep(
        total=sum(parts.values(), start=ReservedGpuSeconds()),
        by_cell={cell_id: part for cell_id, part in parts.items() if cell_id is not None},
        capacity=next(
            (row["capacity_gpu_seconds"] for row in rows if row["cell_id"] is None), None
        ),
    )


def events(connection: Connection, sweep_id: int, after_id: int, limit: int) -> list[EventRow]:
    statement = (
        sa.select(event)
        .where(event.c.sweep_id == sweep_id, event.c.id > after_id)
        .order_by(event.c.id)
        .limit(limit)
    )
    return [event_row(row) for row in connection.execute(statement).mappings()]


def events_of_kinds(
    connection: Connection, sweep_id: int, after_id: int, kinds: Sequence[str]
) -> list[EventRow]:
    statement = (
        sa.select(event)
        .where(event.c.sweep_id == sweep_id, event.c.id > after_id, event.c.event.in_(kinds))
        .order_by(event.c.id)
    )
    return [event_row(row) for row in connection.execute(statement).mappings()]


def newest_event_id(connection: Connection, sweep_id: int) -> int:
    newest = sa.select(sa.func.max(event.c.id)).where(event.c.sweep_id == sweep_id)
    return int(connection.execute(newest).scalar_one() or 0)


def newest_events(connection: Connection, sweep_id: int, limit: int) -> list[EventRow]:
    of_sweep = sa.select(event).where(event.c.sweep_id == sweep_id)
    newest = connection.execute(of_sweep.order_by(event.c.id.desc()).limit(limit))
    return [event_row(row) for row in newest.mappings()]


CELLS = sa.select(cell, *(model.c[name] for name in records.MODEL_COLUMNS)).join(
    model, model.c.digest == cell.c.model_digest
)


def _sweep_row(row: sa.Row[Any]) -> SweepRow:
    return records.build(
        SweepRow,
        row._mapping,
        state=SweepState(row.state),
        holder=live_holder(row),
        stop_requested=StopRequest(row.stop_requested) if row.stop_requested else None,
    )


def _session_row(row: sa.RowMapping) -> SessionRow:
    return records.build(SessionRow, row, stop_reasons=tuple(row["stop_reasons"] or ()))


def cell_of(row: records.Row) -> Cell:
    return records.build(Cell, row, model=records.model_of(row, name=row["model_name"]))


def cell_row(row: sa.RowMapping) -> CellRow:
    return records.build(CellRow, row, cell=cell_of(row))


def event_row(row: sa.RowMapping) -> EventRow:
    return records.build(EventRow, row)
