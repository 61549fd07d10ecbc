"""The statements that read one trial with all of its attempts and events."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.read.profiles import profiles_of
from db.read.rows import AttemptRow, TrialDetail, run_folder
from db.read.sweeps import CELLS, cell_row, event_row
from db.read.trials import trials_by_id
from db.types import AttemptState
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.purpose import Purpose

sweep, cell, attempt, event = schema.sweep, schema.cell, schema.attempt, schema.event
measurement, fingerprint = schema.measurement, schema.fingerprint

_ATTEMPTS = (
    sa.select(
        attempt,
        *(column.label(f"m_{column.name}") for column in measurement.c),
        *(column.label(f"f_{column.name}") for column in fingerprint.c),
    )
    .outerjoin(measurement, measurement.c.attempt_id == attempt.c.id)
    .outerjoin(fingerprint, fingerprint.c.digest == attempt.c.fingerprint_digest)
)


def trial_detail(connection: Connection, trial_id: int) -> TrialDetail:
    found = trials_by_id(connection, [trial_id])
    if not found:
        raise UsageInvalid(f"there is no trial with id {trial_id}; `sweep trials` lists them")
    of_cell = cell_row(
        connection.execute(CELLS.where(cell.c.id == found[0].cell_id)).mappings().one()
    )
    own = connection.execute(
        sa.select(sweep.c.name, sweep.c.run_token).where(sweep.c.id == of_cell.sweep_id)
    ).one()
    attempts = connection.execute(
        _ATTEMPTS.where(attempt.c.trial_id == trial_id).order_by(attempt.c.number)
    ).mappings()
    log = connection.execute(
        sa.select(event).where(event.c.trial_id == trial_id).order_by(event.c.id)
    ).mappings()
    return TrialDetail(
        sweep_name=own.name,
        run_folder=run_folder(own.name, own.run_token),
        cell=of_cell,
        trial=found[0],
        attempts=tuple(_attempt_row(row) for row in attempts),
        events=tuple(event_row(row) for row in log),
        profiles=profiles_of(connection, trial_id),
    )


def _attempt_row(row: sa.RowMapping) -> AttemptRow:
    numbers = {name[2:]: value for name, value in row.items() if name.startswith("m_")}
    stack = {name[2:]: value for name, value in row.items() if name.startswith("f_")}
    is_measured = numbers["attempt_id"] is not None
    return records.build(
        AttemptRow,
        row,
        state=AttemptState(row["state"]),
        nodes=None if row["nodes"] is None else tuple(row["nodes"]),
        purpose=None if row["purpose"] is None else Purpose(row["purpose"]),
        phase_seconds=records.phases_of(row),
        fingerprint=records.fingerprint_of(stack) if stack["digest"] is not None else None,
        failure=records.failure_of(row),
        measurement=records.measurement_of(numbers) if is_measured else None,
        gpu=records.gpu_usage_of(numbers) if is_measured else None,
        memory_by_part=numbers["memory_by_part"],
        load=records.load_of(row),
    )
