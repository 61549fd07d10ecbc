"""Rows of the store as flat records for JSON and CSV, named as the SQL columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from orchestrator.core.problem.layout import LAYOUT_COLUMNS, to_columns
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import MachineLoad

# The rows need SQLAlchemy, and formatting them does not.
if TYPE_CHECKING:
    from db.read.rows import (
        AttemptRow,
        CellRow,
        CellStatus,
        EventRow,
        Holder,
        ProfileRow,
        ReservedBySweep,
        SweepRow,
        TrialDetail,
        TrialRow,
    )
    from orchestrator.core.trial.fingerprint import Fingerprint
    from orchestrator.core.trial.reserved_time import ReservedGpuSeconds
    from orchestrator.report.software_change import SoftwareChange

Record = dict[str, Any]

_TRIAL_FIELDS = (
    "num_attempts",
    "num_measurements",
    "why",
    "predicted_tokens_per_second_per_gpu",
    "predicted_memory_bytes",
    "condemned_by",
    "reused_from",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "step_seconds_median",
    "step_seconds_iqr",
    "num_steps",
    "relative_confidence",
    "confident",
    "implausible",
    "unsteady",
    "unchecked",
    "step_seconds_bound",
    "mfu",
    "hfu",
    "peak_memory_allocated_bytes",
    "peak_memory_reserved_bytes",
    "peak_memory_active_bytes",
    "inactive_split_bytes",
    "device_used_bytes",
    "peak_memory_driver_bytes",
    "peak_memory_driver_kind",
    "device_memory_bytes",
    "thrashing",
    "fingerprint_digest",
    "is_current_fingerprint",
    "failure_kind",
    "failure_message",
    "gpu_seconds",
    "extra",
    "created_at",
    "updated_at",
)
_CELL_FIELDS = (
    "cell_id",
    "cell",
    "model",
    "model_digest",
    "num_gpus",
    "sequence_length",
    "global_batch_size",
)
_LAYOUT_FIELDS = ("layout", *(column.name for column in LAYOUT_COLUMNS))
_LOAD_FIELDS = tuple(field.name for field in fields(MachineLoad))
TRIAL_COLUMNS = (
    "trial_id",
    "sweep",
    *_CELL_FIELDS,
    "state",
    *_LAYOUT_FIELDS,
    *_TRIAL_FIELDS,
    *_LOAD_FIELDS,
)


def trial_record(trial: TrialRow, cell: CellRow, sweep: str) -> Record:
    columns = to_columns(trial.layout)
    return {
        "trial_id": trial.id,
        "sweep": sweep,
        **cell_record(cell),
        "state": trial.state,
        "layout": trial.layout.key,
        **{column.name: columns[column.name] for column in LAYOUT_COLUMNS},
        **{name: getattr(trial, name) for name in _TRIAL_FIELDS},
        **{name: getattr(trial.load, name) for name in _LOAD_FIELDS},
    }


def cell_record(row: CellRow) -> Record:
    cell = row.cell
    return {
        "cell_id": row.id,
        "cell": cell.key,
        "model": cell.model.name,
        "model_digest": cell.model.digest,
        "num_gpus": cell.num_gpus,
        "sequence_length": cell.sequence_length,
        "global_batch_size": cell.global_batch_size,
    }


def cell_status_record(status: CellStatus, sweep: str, seconds: ReservedGpuSeconds) -> Record:
    return {
        **cell_record(status.cell),
        "num_trials": {state: status.num_trials[state] for state in TrialState},
        "gpu_seconds": seconds.reserved,
        "gpu_seconds_by_part": seconds.parts,
        "best": trial_record(status.best, status.cell, sweep) if status.best is not None else None,
    }


def change_records(
    by_cell: Mapping[int, Sequence[SoftwareChange]], cells: Iterable[CellRow]
) -> list[Record]:
    """Return the changes of code, software or device within cells, each with its cell's key."""
    keys = {row.id: row.cell.key for row in cells}
    return [
        {"cell": keys[cell_id], **asdict(change)}
        for cell_id, changes in by_cell.items()
        for change in changes
    ]


def reserved_record(reserved: ReservedBySweep, price_per_gpu_hour: float | None) -> Record:
    """The GPU time that a sweep has reserved; in dollars at the price of its last call."""
    dollars = None
    if price_per_gpu_hour is not None:
        dollars = reserved.total.dollars(price_per_gpu_hour)
    return {
        "gpu_seconds": reserved.total.reserved,
        "gpu_seconds_by_part": reserved.total.parts,
        "capacity_gpu_seconds": reserved.capacity,
        "price_per_gpu_hour": price_per_gpu_hour,
        "dollars": dollars,
    }


def sweep_record(row: SweepRow) -> Record:
    return {
        "sweep_id": row.id,
        "sweep": row.name,
        "state": row.state,
        "created_at": row.created_at,
        "holder": row.holder and _holder_record(row.holder),
        "stop_requested": row.stop_requested,
    }


def _holder_record(holder: Holder) -> Record:
    return {name: getattr(holder, name) for name in ("host", "pid", "since", "lease_until")}


def detail_record(detail: TrialDetail) -> Record:
    """A trial with its attempts and events."""
    return {
        "trial": trial_record(detail.trial, detail.cell, detail.sweep_name),
        "attempts": [_attempt_record(row, detail.cell.cell.num_gpus) for row in detail.attempts],
        "events": [_event_record(event) for event in detail.events],
        "profiles": [profile_record(row) for row in detail.profiles],
    }


def profile_record(row: ProfileRow) -> Record:
    """A profile with the split of each rank that is kept."""
    return {
        "profile": row.number,
        "state": row.state,
        "epoch": row.epoch,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "nodes": row.nodes,
        "gpu_seconds": row.gpu_seconds,
        "failure_kind": row.failure_kind,
        "failure_message": row.failure_message,
        "advice": row.advice,
        "memory": [moment.model_dump(mode="json") for moment in row.memory],
        "ranks": [
            {
                "rank": rank,
                "step_seconds": one.step_seconds,
                **one.model_dump(mode="json", exclude={"memory"}),
                "fractions": {part.value: one.share(part) for part in one.parts},
            }
            for rank, one in row.ranks.items()
        ],
    }


def _attempt_record(row: AttemptRow, num_gpus: int) -> Record:
    reserved, fingerprint = row.reserved(num_gpus), row.fingerprint
    return {
        "attempt": row.number,
        "state": row.state,
        "superseded": row.superseded,
        "purpose": row.purpose,
        "epoch": row.epoch,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "measured_at": row.measured_at,
        "nodes": row.nodes,
        "shared_nodes": row.shared_nodes,
        "phase_seconds": row.phase_seconds,
        "gpu_seconds": row.gpu_seconds,
        "gpu_seconds_by_part": reserved.parts if reserved is not None else None,
        "processes_killed": row.processes_killed,
        "environment": row.environment,
        "bound_cpus": row.bound_cpus,
        "load": asdict(row.load) if row.load.is_known else None,
        "fingerprint": fingerprint and _fingerprint_record(fingerprint),
        "failure": asdict(row.failure) if row.failure is not None else None,
        "measurement": asdict(row.measurement) if row.measurement is not None else None,
        "gpu": asdict(row.gpu) if row.gpu is not None else None,
        "memory_by_part": row.memory_by_part,
    }


def _fingerprint_record(fingerprint: Fingerprint) -> Record:
    return {
        "digest": fingerprint.digest,
        **fingerprint.model_dump(),
        "settings": dict(fingerprint.settings),
        "packages": dict(fingerprint.packages),
    }


def _event_record(row: EventRow) -> Record:
    return {
        "event_id": row.id,
        "at": row.at,
        "event": row.event,
        "from_state": row.from_state,
        "to_state": row.to_state,
        "attempt": row.attempt,
        "epoch": row.epoch,
        "detail": row.detail,
    }
