"""The data that predictions are calibrated on: measured trials, and those out of device memory.

Invalidated attempts are left out. One statement reads the rows, for any number of trials.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.read.sweeps import cell_of
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, from_columns
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialState

sweep, cell, model, trial = schema.sweep, schema.cell, schema.model, schema.trial
attempt, measurement, fingerprint = schema.attempt, schema.measurement, schema.fingerprint

Number = TypeVar("Number", int, float)

# Rows of one cell, spread evenly over its trials: more of them add little.
ROWS_PER_CELL = 200
# The newest rows are read; fitting this many takes about a second.
MAX_ROWS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSweep:
    """A sweep that has observations, and their conditions."""

    id: int
    name: str
    conditions: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationRow:
    """One trial that was measured or ran out of memory. Unknown is None."""

    trial_id: int
    sweep: MeasuredSweep
    cell_id: int
    cell: Cell
    layout: Layout
    out_of_memory: bool
    step_seconds: float | None
    # Reserved by the allocator if that is known, else allocated.
    peak_memory_bytes: int | None
    is_peak_reserved: bool | None
    device_memory_bytes: int | None
    thrashing: bool | None
    # An out-of-memory may leave no fingerprint: it has the device of its cell's newest measurement.
    device_name: str | None
    torch: str | None
    cuda: str | None
    driver: str | None
    peak_flops: float | None
    peak_flops_source: str | None
    num_nodes: int | None
    num_steps: int | None  # timed
    # From the gang's placement to its end.
    reserved_seconds: float | None
    # The part of it in steps after the first.
    steady_seconds: float | None


def observations(
    connection: Connection,
    *,
    workload: str | None = None,
    is_relative: Callable[[Mapping[str, Any]], bool] | None = None,
    is_device: Callable[[str, Sequence[str]], bool] | None = None,
    sweep_name: str | None = None,
    per_cell: int = ROWS_PER_CELL,
    most: int = MAX_ROWS,
) -> list[ObservationRow]:
    """The newest `most` observations, oldest first; at most `per_cell` of a cell, spread evenly.

    `is_relative` selects sweeps by their conditions. `is_device` selects devices by the driver's
    name and the sources of their peaks; observations without a device are kept. Both select before
    rows are counted, so that other sweeps take no place.
    """
    selected = sa.select(sweep.c.id, sweep.c.name, sweep.c.conditions)
    if sweep_name is not None:
        selected = selected.where(sweep.c.name == sweep_name)
    sweeps = {
        row["id"]: records.build(MeasuredSweep, row)
        for row in connection.execute(selected).mappings()
    }
    wanted = [
        id
        for id, found in sweeps.items()
        if (workload is None or found.conditions.get("workload") == workload)
        and (is_relative is None or is_relative(found.conditions))
    ]
    if not wanted:
        return []
    names = (
        None
        if is_device is None
        else [name for name, sources in _devices(connection).items() if is_device(name, sources)]
    )
    rows = connection.execute(_statement(wanted, names, per_cell, most)).mappings().all()
    cells: dict[int, Cell] = {}
    return [_row(row, sweeps, cells) for row in reversed(rows)]


def _devices(connection: Connection) -> dict[str, list[str]]:
    """Every device of the store by its driver's name, with the sources of its peaks."""
    of_attempts = (
        sa.select(fingerprint.c.device_name, measurement.c.peak_flops_source)
        .outerjoin(attempt, attempt.c.fingerprint_digest == fingerprint.c.digest)
        .outerjoin(measurement, measurement.c.attempt_id == attempt.c.id)
        .where(fingerprint.c.device_name.is_not(None))
        .distinct()
    )
    found: dict[str, list[str]] = {}
    for name, source in connection.execute(of_attempts):
        found.setdefault(name, []).extend([source] if source is not None else [])
    return found


def _numbered(sweep_ids: Sequence[int], names: Sequence[str] | None) -> sa.Select[Any]:
    """Select attempts that show memory or time, numbered within their cells.

    Narrow columns: of 100,000 trials only the kept ones are read as whole rows.
    """
    counting, last = attempt.alias("counting"), attempt.alias("last")
    out_of_memory = sa.and_(
        trial.c.state == TrialState.OUT_OF_MEMORY, last.c.failure_kind == FailureKind.OOM_GPU
    )
    digest = sa.func.coalesce(
        counting.c.fingerprint_digest, last.c.fingerprint_digest, cell.c.fingerprint_digest
    )
    place = sa.func.row_number().over(partition_by=trial.c.cell_id, order_by=trial.c.id)
    numbered = (
        sa.select(
            trial.c.id,
            counting.c.id.label("counting_id"),
            last.c.id.label("last_id"),
            digest.label("digest"),
            place.label("place"),
            sa.func.count().over(partition_by=trial.c.cell_id).label("size"),
        )
        .join(cell, cell.c.id == trial.c.cell_id)
        .outerjoin(
            counting,
            sa.and_(
                counting.c.trial_id == trial.c.id,
                counting.c.state == sa.literal_column("'measured'"),
                sa.not_(counting.c.superseded),
            ),
        )
        .outerjoin(
            last,
            sa.and_(
                last.c.trial_id == trial.c.id,
                last.c.number == trial.c.num_attempts,
                sa.not_(last.c.superseded),
            ),
        )
        .outerjoin(fingerprint, fingerprint.c.digest == digest)
        # One that was reused counts once, where it was measured.
        .where(trial.c.reused_from.is_(None))
        .where(trial.c.sweep_id.in_(sweep_ids), sa.or_(counting.c.id.is_not(None), out_of_memory))
    )
    if names is not None:
        numbered = numbered.where(
            sa.or_(fingerprint.c.device_name.in_(names), fingerprint.c.device_name.is_(None))
        )
    return numbered


def _statement(
    sweep_ids: Sequence[int], names: Sequence[str] | None, per_cell: int, most: int
) -> sa.Select[Any]:
    """Select whole rows of the newest cells: `per_cell` of each, evenly over its trials."""
    kept = _numbered(sweep_ids, names).subquery("kept")
    # The first row that reaches each of `per_cell` even marks: for three marks in ten rows the
    # 4th, 7th and 10th.
    even = kept.c.place * per_cell // kept.c.size != (kept.c.place - 1) * per_cell // kept.c.size
    own, failed = attempt.alias("own"), attempt.alias("failed")
    return (
        sa.select(
            trial.c.id.label("trial_id"),
            trial.c.sweep_id,
            trial.c.cell_id,
            *(trial.c[name] for name in records.LAYOUT_COLUMNS),
            cell.c.model_name,
            cell.c.num_gpus,
            cell.c.sequence_length,
            cell.c.global_batch_size,
            *(model.c[name] for name in records.MODEL_COLUMNS),
            measurement.c.attempt_id,
            # A time that cannot be true teaches nothing; the memory does.
            sa.case((measurement.c.implausible.is_(None), measurement.c.step_seconds_median)).label(
                "step_seconds_median"
            ),
            measurement.c.num_steps,
            measurement.c.peak_memory_reserved_bytes,
            measurement.c.peak_memory_allocated_bytes,
            sa.func.coalesce(
                measurement.c.device_memory_bytes, failed.c.failure_device_memory_bytes
            ).label("device_memory_bytes"),
            measurement.c.thrashing,
            measurement.c.peak_flops,
            measurement.c.peak_flops_source,
            fingerprint.c.device_name,
            fingerprint.c.torch,
            fingerprint.c.cuda,
            fingerprint.c.driver,
            sa.cast(sa.func.coalesce(own.c.nodes, failed.c.nodes), sa.Text).label("nodes"),
            sa.func.coalesce(own.c.gpu_seconds, failed.c.gpu_seconds).label("gpu_seconds"),
            own.c.steady_seconds,
        )
        .select_from(kept)
        .join(trial, trial.c.id == kept.c.id)
        .join(cell, cell.c.id == trial.c.cell_id)
        .join(model, model.c.digest == cell.c.model_digest)
        .outerjoin(own, own.c.id == kept.c.counting_id)
        .outerjoin(measurement, measurement.c.attempt_id == own.c.id)
        .outerjoin(failed, failed.c.id == kept.c.last_id)
        .outerjoin(fingerprint, fingerprint.c.digest == kept.c.digest)
        .where(sa.or_(kept.c.size <= per_cell, even))
        .order_by(trial.c.id.desc())
        .limit(most)
    )


def _row(
    row: sa.RowMapping, sweeps: Mapping[int, MeasuredSweep], cells: dict[int, Cell]
) -> ObservationRow:
    of_cell = cells.get(row["cell_id"])
    if of_cell is None:
        of_cell = cells[row["cell_id"]] = cell_of(row)
    reserved = _read(row["peak_memory_reserved_bytes"])
    allocated = _read(row["peak_memory_allocated_bytes"])
    nodes = json.loads(row["nodes"]) if row["nodes"] else None
    seconds = row["gpu_seconds"]
    return records.build(
        ObservationRow,
        row,
        sweep=sweeps[row["sweep_id"]],
        cell=of_cell,
        layout=from_columns(row),
        out_of_memory=row["attempt_id"] is None,
        step_seconds=_read(row["step_seconds_median"]),
        peak_memory_bytes=reserved if reserved is not None else allocated,
        is_peak_reserved=None if reserved is None and allocated is None else reserved is not None,
        device_memory_bytes=_read(row["device_memory_bytes"]),
        peak_flops=_read(row["peak_flops"]),
        num_nodes=len(nodes) if nodes else None,
        reserved_seconds=None if seconds is None else seconds / row["num_gpus"],
    )


def _read(value: Number | None) -> Number | None:
    """The value if it is positive and finite, else None.

    A counter that a device lacks reads 0, whose logarithm would spoil a whole fit.
    """
    return value if value is not None and isfinite(value) and value > 0 else None
