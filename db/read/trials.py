"""The statements that read trials, and what their attempts measured or failed of.

Each returns frozen rows of db/read/rows.py, by one or few statements for any number of trials.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.id_list import ByIds
from db.connection.portions import portions
from db.read import records
from db.read.rows import PeakRow, TrialRow
from db.read.still_counts import still_counts
from orchestrator.core.problem.layout import Precision, from_columns
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, Failure, FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import MEASURED_PEAK

cell, trial, attempt = schema.cell, schema.trial, schema.attempt
measurement, fingerprint = schema.measurement, schema.fingerprint


def trials(connection: Connection, sweep_id: int, cell_id: int | None) -> list[TrialRow]:
    statement = _TRIALS.where(trial.c.sweep_id == sweep_id).order_by(trial.c.id)
    if cell_id is not None:
        statement = statement.where(trial.c.cell_id == cell_id)
    return [_trial_row(row) for row in connection.execute(statement).mappings()]


def trials_by_id(connection: Connection, trial_ids: Sequence[int]) -> list[TrialRow]:
    """The trials in the order of the given ids."""
    found: dict[int, TrialRow] = {}
    for some in portions(trial_ids):
        found |= {
            row["id"]: _trial_row(row)
            for row in connection.execute(_TRIALS.where(trial.c.id.in_(some))).mappings()
        }
    return [found[trial_id] for trial_id in trial_ids if trial_id in found]


def best(connection: Connection, sweep_id: int, top: int | None) -> dict[int, list[TrialRow]]:
    """The `top` fastest measured trials of each cell id under the cell's current fingerprint.

    None: all of them. Trials whose numbers cannot be true are left out.
    """
    place = sa.func.row_number().over(
        partition_by=trial.c.cell_id,
        order_by=(measurement.c.tokens_per_second_per_gpu.desc(), trial.c.id),
    )
    ranked = (
        sa.select(trial.c.id, trial.c.cell_id, place.label("place"))
        .join(cell, cell.c.id == trial.c.cell_id)
        .join(attempt, _counts(attempt))
        .join(measurement, measurement.c.attempt_id == attempt.c.id)
        .where(
            trial.c.sweep_id == sweep_id,
            trial.c.state == TrialState.MEASURED,
            measurement.c.implausible.is_(None),
            measurement.c.step_seconds_bound.is_(None),
            _is_current(attempt),
        )
        .subquery()
    )
    statement = sa.select(ranked.c.id).order_by(ranked.c.cell_id, ranked.c.place)
    if top is not None:
        statement = statement.where(ranked.c.place <= top)
    result: dict[int, list[TrialRow]] = {}
    for row in trials_by_id(connection, [int(i) for i in connection.execute(statement).scalars()]):
        result.setdefault(row.cell_id, []).append(row)
    return result


def nodes_of_ended_early(connection: Connection, cell_id: int) -> dict[int, frozenset[str]]:
    """The waiting trials of a cell whose last attempt was ended early, and its nodes."""
    statement = (
        sa.select(trial.c.id, attempt.c.nodes)
        .join(
            attempt,
            sa.and_(attempt.c.trial_id == trial.c.id, attempt.c.number == trial.c.num_attempts),
        )
        .join(measurement, measurement.c.attempt_id == attempt.c.id)
        .where(
            trial.c.cell_id == cell_id,
            trial.c.state == TrialState.QUEUED,
            measurement.c.step_seconds_bound.is_not(None),
        )
    )
    return {row.id: frozenset(row.nodes or ()) for row in connection.execute(statement)}


def repeated_cells(connection: Connection, sweep_id: int | None) -> dict[int, frozenset[int]]:
    """The cells with a trial that was launched again after it was measured, by sweep id."""
    earlier = sa.and_(
        attempt.c.trial_id == trial.c.id, attempt.c.pooled, attempt.c.number < trial.c.num_attempts
    )
    statement = (
        sa.select(trial.c.sweep_id, trial.c.cell_id)
        .distinct()
        .join(attempt, earlier)
        .where(trial.c.state == TrialState.MEASURED, trial.c.num_attempts > 1)
    )
    if sweep_id is not None:
        statement = statement.where(trial.c.sweep_id == sweep_id)
    found: dict[int, set[int]] = {}
    for row in connection.execute(statement):
        found.setdefault(row.sweep_id, set()).add(row.cell_id)
    return {one: frozenset(cells) for one, cells in found.items()}


def trials_that_met(connection: Connection, cell_id: int, kind: FailureKind) -> set[int]:
    met = sa.select(trial.c.id).join(attempt, attempt.c.trial_id == trial.c.id)
    of_kind = (trial.c.cell_id == cell_id, attempt.c.failure_kind == kind, still_counts(attempt))
    return set(connection.execute(met.where(*of_kind).distinct()).scalars())


def failure_counts(
    connection: Connection, trial_ids: Sequence[int]
) -> dict[int, Counter[FailureKind]]:
    """The number of failed attempts of each trial, by kind."""
    found: dict[int, Counter[FailureKind]] = {trial_id: Counter() for trial_id in trial_ids}
    for row in _FAILURE_COUNTS.rows(connection, trial_ids):
        found[row.trial_id][FailureKind(row.failure_kind)] = row.n
    return found


def out_of_memories(
    connection: Connection, cell_id: int, trial_id: int | None
) -> dict[int, list[Failure]]:
    """The out-of-memories of each trial that are not superseded, oldest first."""
    statement = (
        sa.select(attempt)
        .join(trial, trial.c.id == attempt.c.trial_id)
        .where(
            trial.c.cell_id == cell_id,
            attempt.c.failure_kind.in_(OUT_OF_MEMORY_KINDS),
            sa.not_(attempt.c.superseded),
        )
        .order_by(attempt.c.trial_id, attempt.c.number)
    )
    if trial_id is not None:
        statement = statement.where(trial.c.id == trial_id)
    found: dict[int, list[Failure]] = {}
    for row in connection.execute(statement).mappings():
        if (failure := records.failure_of(dict(row))) is not None:
            found.setdefault(row["trial_id"], []).append(failure)
    return found


def measured_peaks(connection: Connection, sweep_id: int) -> list[PeakRow]:
    """The measured peaks that MFUs of the sweep use, each once, without superseded attempts."""
    # DISTINCT needs an order, and JSON has none.
    nodes = sa.cast(attempt.c.nodes, sa.Text)
    statement = (
        sa.select(
            nodes.label("nodes"),
            trial.c.precision,
            fingerprint.c.device_name,
            measurement.c.peak_flops,
            measurement.c.peak_flops_source,
        )
        .distinct()
        .join_from(measurement, attempt, attempt.c.id == measurement.c.attempt_id)
        .join(trial, trial.c.id == attempt.c.trial_id)
        .outerjoin(fingerprint, fingerprint.c.digest == attempt.c.fingerprint_digest)
        .where(
            trial.c.sweep_id == sweep_id,
            still_counts(attempt),
            attempt.c.nodes.is_not(None),
        )
        .where(
            measurement.c.peak_flops.is_not(None),
            measurement.c.peak_flops_source.startswith(MEASURED_PEAK),
        )
    )
    return [
        PeakRow(
            nodes=tuple(json.loads(row.nodes)),
            precision=Precision(row.precision),
            device_name=row.device_name,
            flops=row.peak_flops,
            source=row.peak_flops_source,
        )
        for row in connection.execute(statement)
    ]


def _counts(table: Any) -> sa.ColumnElement[bool]:
    """The condition that joins a trial with the attempt that counts: there is at most one."""
    return sa.and_(
        table.c.trial_id == trial.c.id,
        table.c.state == sa.literal_column("'measured'"),
        sa.not_(table.c.superseded),
    )


def _is_current(table: Any) -> sa.ColumnElement[bool]:
    # coalesce, because each database has another comparison in which NULL equals NULL.
    return sa.func.coalesce(table.c.fingerprint_digest, "") == sa.func.coalesce(
        cell.c.fingerprint_digest, ""
    )


_last = attempt.alias("last")
_counting = attempt.alias("counting")
_HEADLINES = [
    measurement.c[field.name]
    for field in fields(TrialRow)
    if field.name in measurement.c
    and field.name not in ("peak_memory_allocated_bytes", "device_memory_bytes")
]
_TRIALS = (
    sa.select(
        *(column for column in trial.c if column.name not in ("sweep_id", "layout_key")),
        *_HEADLINES,
        sa.func.coalesce(
            measurement.c.peak_memory_allocated_bytes, _last.c.failure_peak_memory_bytes
        ).label("peak_memory_allocated_bytes"),
        sa.func.coalesce(
            measurement.c.device_memory_bytes, _last.c.failure_device_memory_bytes
        ).label("device_memory_bytes"),
        _counting.c.id.label("counting_id"),
        _counting.c.fingerprint_digest,
        sa.func.coalesce(_counting.c.measured_at, _counting.c.ended_at).label("measured_at"),
        _counting.c.nodes,
        _is_current(_counting).label("is_current_fingerprint"),
        _last.c.failure_kind,
        _last.c.failure_message,
        _last.c.failure_memory,
        _last.c.failure_step_part,
        _last.c.gpu_seconds,
        *(_counting.c[name] for name in records.LOAD_COLUMNS),
    )
    .join(cell, cell.c.id == trial.c.cell_id)
    .outerjoin(
        _last,
        # An invalidated failure is no longer the trial's.
        sa.and_(
            _last.c.trial_id == trial.c.id,
            _last.c.number == trial.c.num_attempts,
            still_counts(_last),
        ),
    )
    .outerjoin(_counting, _counts(_counting))
    .outerjoin(measurement, measurement.c.attempt_id == _counting.c.id)
)
_FAILURE_COUNTS = ByIds(
    lambda ids: (
        sa.select(attempt.c.trial_id, attempt.c.failure_kind, sa.func.count().label("n"))
        .where(attempt.c.failure_kind.is_not(None), sa.not_(attempt.c.superseded))
        .where(attempt.c.trial_id.in_(ids))
        .group_by(attempt.c.trial_id, attempt.c.failure_kind)
    )
)


def _trial_row(row: sa.RowMapping) -> TrialRow:
    return records.build(
        TrialRow,
        row,
        layout=from_columns(row),
        state=TrialState(row["state"]),
        is_current_fingerprint=None
        if row["counting_id"] is None
        else bool(row["is_current_fingerprint"]),
        nodes=tuple(row["nodes"] or ()),
        failure_kind=FailureKind(row["failure_kind"]) if row["failure_kind"] else None,
        memory=records.shortage_of(row),
        peak_memory_driver_kind=records.driver_memory_kind_of(row),
        load=records.load_of(row),
    )


def reused_by(connection: Connection, sweep_name: str) -> frozenset[int]:
    """The trials of other sweeps whose measurements a sweep has taken over."""
    statement = (
        sa.select(trial.c.reused_from)
        .join(schema.sweep, schema.sweep.c.id == trial.c.sweep_id)
        .where(schema.sweep.c.name == sweep_name, trial.c.reused_from.is_not(None))
    )
    return frozenset(connection.scalars(statement))


def reusers(connection: Connection, sweep_id: int) -> dict[str, int]:
    """Count the trials that other sweeps have taken over from a sweep, by their names."""
    source = trial.alias("source")
    statement = (
        sa.select(schema.sweep.c.name, sa.func.count())
        .select_from(trial)
        .join(source, source.c.id == trial.c.reused_from)
        .join(schema.sweep, schema.sweep.c.id == trial.c.sweep_id)
        .where(source.c.sweep_id == sweep_id)
        .group_by(schema.sweep.c.name)
        .order_by(schema.sweep.c.name)
    )
    return {name: int(number) for name, number in connection.execute(statement)}


def attempt_spans(
    connection: Connection, cell_id: int
) -> dict[int, tuple[dt.datetime, dt.datetime]]:
    """Start of the first and end of the last attempt that ended, of each trial of a cell."""
    statement = (
        sa.select(
            attempt.c.trial_id, sa.func.min(attempt.c.started_at), sa.func.max(attempt.c.ended_at)
        )
        .join(trial, trial.c.id == attempt.c.trial_id)
        .where(trial.c.cell_id == cell_id, attempt.c.ended_at.is_not(None))
        .group_by(attempt.c.trial_id)
    )
    return {row[0]: (row[1], row[2]) for row in connection.execute(statement)}
