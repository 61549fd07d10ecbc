"""The statements that read about sweeps, their cells, sessions, events and reserved GPU time."""

from __future__ import annotations

import difflib
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records, trials
from db.read.holder import live_holder
from db.read.rows import (
    CellRow,
    CellStatus,
    EventRow,
    ReservedBySweep,
    SessionRow,
    SweepRow,
)
from db.types import StopRequest, SweepState, now
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.reserved_time import HeldGpuSeconds

sweep, session, cell, model = schema.sweep, schema.session, schema.cell, schema.model
trial, event = schema.trial, schema.event


def sweeps(connection: Connection) -> list[SweepRow]:
    rows = connection.execute(
        sa.select(sweep, now().label("now")).order_by(sweep.c.id.desc())
    ).fetchall()
    return [_sweep_row(row) for row in rows]


def owner_epoch(connection: Connection, sweep_id: int) -> int:
    """The epoch of the sweep's last owner."""
    return int(
        connection.execute(
            sa.select(sweep.c.owner_epoch).where(sweep.c.id == sweep_id)
        ).scalar_one()
    )


def sweep_named(connection: Connection, name: str) -> SweepRow:
    row = connection.execute(
        sa.select(sweep, now().label("now")).where(sweep.c.name == name)
    ).one_or_none()
    if row is not None:
        return _sweep_row(row)
    names = [
        str(other)
        for other in connection.execute(
            sa.select(sweep.c.name).order_by(sweep.c.id.desc())
        ).scalars()
    ]
    close = difflib.get_close_matches(name, names, n=1)
    hint = (
        f"did you mean {close[0]!r}?"
        if close
        else f"there are: {', '.join(names[:20]) or 'none yet'}"
    )
    raise UsageInvalid(f"no sweep is named {name!r}; {hint}")


def newest_session(connection: Connection, sweep_id: int) -> SessionRow | None:
    row = connection.execute(
        sa.select(session)
        .where(session.c.sweep_id == sweep_id)
        .order_by(session.c.epoch.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    return SessionRow(
        epoch=row.epoch,
        host=row.host,
        pid=row.pid,
        started_at=row.started_at,
        seen_at=row.seen_at,
        ended_at=row.ended_at,
        num_gpus=row.num_gpus,
        price_per_gpu_hour=row.price_per_gpu_hour,
        stop_reasons=tuple(row.stop_reasons or ()),
    )


def cells(connection: Connection, sweep_id: int) -> list[CellRow]:
    return [
        cell_row(row)
        for row in connection.execute(
            CELLS.where(cell.c.sweep_id == sweep_id).order_by(cell.c.id)
        ).mappings()
    ]


def status(connection: Connection, sweep_id: int) -> list[CellStatus]:
    counting = (
        sa.select(trial.c.cell_id, trial.c.state, sa.func.count().label("n"))
        .where(trial.c.sweep_id == sweep_id)
        .group_by(trial.c.cell_id, trial.c.state)
    )
    counts: dict[int, dict[TrialState, int]] = {}
    for row in connection.execute(counting):
        counts.setdefault(row.cell_id, {})[TrialState(row.state)] = row.n
    fastest = trials.best(connection, sweep_id, 1)
    return [
        CellStatus(
            cell=row,
            num_trials={state: counts.get(row.id, {}).get(state, 0) for state in TrialState},
            best=next(iter(fastest.get(row.id, ())), None),
        )
        for row in cells(connection, sweep_id)
    ]


def reserved(connection: Connection, sweep_id: int) -> ReservedBySweep:
    rows = (
        connection.execute(
            sa.text("SELECT * FROM v_gpu_seconds WHERE sweep_id = :sweep_id"),
            {"sweep_id": sweep_id},
        )
        .mappings()
        .all()
    )
    parts = {
        row["cell_id"]: HeldGpuSeconds(
            **{name: row[f"{name}_gpu_seconds"] or 0.0 for name in HeldGpuSeconds().parts}
        )
        for row in rows
    }
    return ReservedBySweep(
        total=sum(parts.values(), start=HeldGpuSeconds()),
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


CELLS = sa.select(
    cell, *(column for column in model.c if column.name not in ("digest", "name", "num_parameters"))
).join(model, model.c.digest == cell.c.model_digest)


def _sweep_row(row: Any) -> SweepRow:
    return SweepRow(
        id=row.id,
        name=row.name,
        run_token=row.run_token,
        spec_json=row.spec_json,
        conditions=row.conditions,
        state=SweepState(row.state),
        created_at=row.created_at,
        holder=live_holder(row),
        owner_epoch=row.owner_epoch,
        stop_requested=StopRequest(row.stop_requested) if row.stop_requested else None,
    )


def cell_row(row: sa.RowMapping) -> CellRow:
    value = Cell(
        model=records.model_of(row, name=row["model_name"]),
        num_gpus=row["num_gpus"],
        sequence_length=row["sequence_length"],
        global_batch_size=row["global_batch_size"],
    )
    return CellRow(
        id=row["id"],
        sweep_id=row["sweep_id"],
        cell=value,
        fingerprint_digest=row["fingerprint_digest"],
    )


def event_row(row: sa.RowMapping) -> EventRow:
    names = (
        "id",
        "at",
        "trial_id",
        "attempt",
        "event",
        "from_state",
        "to_state",
        "epoch",
        "detail",
    )
    return EventRow(**{name: row[name] for name in names})
