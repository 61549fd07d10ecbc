"""The statements that read trials with all of their attempts and events: one, or a sweep's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.read.profiles import profiles_by_trial, profiles_of
from db.read.rows import AttemptRow, EventRow, TrialDetail, run_folder
from db.read.sweeps import CELLS, cell_row, cells, event_row
from db.read.trials import trials, trials_by_id
from db.types import AttemptState
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.purpose import Purpose

sweep, cell, trial = schema.sweep, schema.cell, schema.trial
attempt, event = schema.attempt, schema.event
measurement, fingerprint = schema.measurement, schema.fingerprint

_ATTEMPTS = sa.select(
    attempt, *(column.label(f"m_{column.name}") for column in measurement.c)
).outerjoin(measurement, measurement.c.attempt_id == attempt.c.id)


def trial_detail(connection: Connection, trial_id: int) -> TrialDetail:
    found = trials_by_id(connection, [trial_id])
    if not found:
        raise UsageInvalid(f"there is no trial with id {trial_id}; `sweep trials` lists them")
    of_cell = cell_row(
        connection.execute(CELLS.where(cell.c.id == found[0].cell_id)).mappings().one()
    )
    own = _sweep_of(connection, of_cell.sweep_id)
    attempts = _attempts(connection, attempt.c.trial_id == trial_id)
    log = connection.execute(
        sa.select(event).where(event.c.trial_id == trial_id).order_by(event.c.id)
    ).mappings()
    return TrialDetail(
        sweep_name=own.name,
        run_folder=run_folder(own.name, own.run_token),
        cell=of_cell,
        trial=found[0],
        attempts=tuple(attempts.get(trial_id, ())),
        events=tuple(event_row(row) for row in log),
        profiles=profiles_of(connection, trial_id),
    )


def trial_details(connection: Connection, sweep_id: int) -> list[TrialDetail]:
    """Every trial of a sweep as `trial_detail` gives it, oldest first, by a few statements."""
    own = _sweep_of(connection, sweep_id)
    folder = run_folder(own.name, own.run_token)
    of_cells = {row.id: row for row in cells(connection, sweep_id)}
    of_sweep = sa.select(trial.c.id).where(trial.c.sweep_id == sweep_id)
    attempts = _attempts(connection, attempt.c.trial_id.in_(of_sweep))
    log: defaultdict[int, list[EventRow]] = defaultdict(list)
    by_id = sa.select(event).where(event.c.sweep_id == sweep_id).order_by(event.c.id)
    for row in connection.execute(by_id).mappings():
        if row["trial_id"] is not None:
            log[row["trial_id"]].append(event_row(row))
    profiled = profiles_by_trial(connection, sweep_id)
    return [
        TrialDetail(
            sweep_name=own.name,
            run_folder=folder,
            cell=of_cells[found.cell_id],
            trial=found,
            attempts=tuple(attempts.get(found.id, ())),
            events=tuple(log.get(found.id, ())),
            profiles=profiled.get(found.id, ()),
        )
        for found in trials(connection, sweep_id, None)
    ]


def _sweep_of(connection: Connection, sweep_id: int) -> sa.Row[*tuple[Any, ...]]:
    statement = sa.select(sweep.c.name, sweep.c.run_token).where(sweep.c.id == sweep_id)
    return connection.execute(statement).one()


def _attempts(
    connection: Connection, condition: sa.ColumnElement[bool]
) -> Mapping[int, Sequence[AttemptRow]]:
    """The attempts of each trial, oldest first. Few fingerprints belong to many attempts."""
    digests = sa.select(attempt.c.fingerprint_digest).where(condition)
    known = {
        row["digest"]: records.fingerprint_of(row)
        for row in connection.execute(
            sa.select(fingerprint).where(fingerprint.c.digest.in_(digests))
        ).mappings()
    }
    by_trial: defaultdict[int, list[AttemptRow]] = defaultdict(list)
    statement = _ATTEMPTS.where(condition).order_by(attempt.c.trial_id, attempt.c.number)
    for row in connection.execute(statement).mappings():
        by_trial[row["trial_id"]].append(_attempt_row(row, known.get(row["fingerprint_digest"])))
    return by_trial


def _attempt_row(row: sa.RowMapping, software: Fingerprint | None) -> AttemptRow:
    numbers = {name[2:]: value for name, value in row.items() if name.startswith("m_")}
    is_measured = numbers["attempt_id"] is not None
    return records.build(
        AttemptRow,
        row,
        state=AttemptState(row["state"]),
        nodes=None if row["nodes"] is None else tuple(row["nodes"]),
        purpose=None if row["purpose"] is None else Purpose(row["purpose"]),
        phase_seconds=records.phases_of(row),
        fingerprint=software,
        failure=records.failure_of(row),
        measurement=records.measurement_of(numbers) if is_measured else None,
        gpu=records.gpu_usage_of(numbers) if is_measured else None,
        memory_by_part=numbers["memory_by_part"],
        load=records.load_of(row),
    )
