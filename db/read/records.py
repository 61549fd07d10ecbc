"""Values of the core as columns, and back. Text from programs is made storable here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import RowMapping

from db import schema
from orchestrator.core.problem import layout as layouts
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.measurement import Measurement, StepTime
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import DriverMemoryKind, Phase
from orchestrator.core.trial.step_part import StepPart

_T = TypeVar("_T")
Columns = dict[str, Any]
Row = Mapping[str, Any] | RowMapping

MODEL_COLUMNS = tuple(
    column.name
    for column in schema.model.c
    if column.name not in ("digest", "name", "num_parameters")
)
_MEASURED = tuple(
    field.name
    for field in fields(Measurement)
    if field.name in schema.measurement.c and field.name != "step_seconds"
)
LOAD_COLUMNS = tuple(field.name for field in fields(MachineLoad))
# Columns of a measurement by the field of GpuUsage that they hold.
GPU_COLUMNS = {
    "gpu_busy": "busy",
    "gpu_power_watts": "power_watts",
    "gpu_energy_joules": "energy_joules",
    "gpu_clock_mhz": "clock_mhz",
    "gpu_lowest_clock_mhz": "lowest_clock_mhz",
    "sm_activity": "sm_activity",
    "tensor_activity": "tensor_activity",
    "dram_activity": "dram_activity",
}
_TELLING = (
    "cpu_cores",
    "foreign_gpu_processes",
    "gpu_clock_ratio",
    "gpu_throttled_fraction",
    "gpu_temperature_celsius",
)
_PHASE_COLUMNS = {phase: f"{phase.value}_seconds" for phase in Phase}
_NO_PHASES: Columns = dict.fromkeys(_PHASE_COLUMNS.values())
# Fields of a fingerprint that are names with values.
_PAIRS = ("settings", "packages")
LAYOUT_COLUMNS = tuple(column.name for column in layouts.LAYOUT_COLUMNS)


@cache
def _names(kind: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in given)


def build(kind: Callable[..., _T], row: Row, **given: Any) -> _T:
    """A dataclass whose fields are columns of the row, but for the `given` ones."""
    return kind(**{name: row[name] for name in _names(kind, tuple(given))}, **given)


def cell_identity(sweep_id: int, cell: Cell) -> Columns:
    """The columns that name one cell of a sweep."""
    return {
        "sweep_id": sweep_id,
        "model_digest": cell.model.digest,
        "num_gpus": cell.num_gpus,
        "sequence_length": cell.sequence_length,
        "global_batch_size": cell.global_batch_size,
    }


def model_columns(model: ModelShape) -> Columns:
    return {column.name: getattr(model, column.name) for column in schema.model.c}


def model_of(row: Row, *, name: str) -> ModelShape:
    return ModelShape(name=name, **{column: row[column] for column in MODEL_COLUMNS})


def fingerprint_columns(fingerprint: Fingerprint) -> Columns:
    own = fingerprint.model_dump(exclude={"stack", *_PAIRS})
    return {
        "digest": fingerprint.digest,
        **own,
        **{name: dict(getattr(fingerprint, name)) or None for name in _PAIRS},
        **fingerprint.stack.model_dump(),
    }


def fingerprint_of(row: Row) -> Fingerprint:
    stack = Stack(**{name: row[name] for name in Stack.model_fields})
    own = {name: row[name] for name in Fingerprint.model_fields if name not in ("stack", *_PAIRS)}
    pairs: dict[str, Any] = {name: tuple(sorted((row[name] or {}).items())) for name in _PAIRS}
    return Fingerprint(**own, **pairs, stack=stack)


def phase_columns(phases: Mapping[Phase, float]) -> Columns:
    return _NO_PHASES | {_PHASE_COLUMNS[phase]: seconds for phase, seconds in phases.items()}


def phases_of(row: Row) -> dict[Phase, float]:
    return {
        phase: row[column] for phase, column in _PHASE_COLUMNS.items() if row[column] is not None
    }


def load_columns(load: MachineLoad) -> Columns:
    """No columns if nothing is known of the load: they stay NULL."""
    if not load.is_known:
        return {}
    return {**asdict(load), "gpu_throttle_reasons": ", ".join(load.gpu_throttle_reasons) or None}


def load_of(row: Row) -> MachineLoad:
    if all(row[name] is None for name in _TELLING):
        return NO_LOAD
    reasons = row["gpu_throttle_reasons"]
    values = {name: row[name] for name in LOAD_COLUMNS}
    return MachineLoad(
        **{**values, "gpu_throttle_reasons": tuple(reasons.split(", ")) if reasons else ()}
    )


def measurement_columns(
    measurement: Measurement, gpu: GpuUsage, memory_by_part: Mapping[str, int] | None
) -> Columns:
    step_time = measurement.step_time
    return {
        **{name: getattr(measurement, name) for name in _MEASURED},
        "step_seconds_median": step_time.median,
        "step_seconds_iqr": step_time.iqr,
        "num_steps": step_time.num_steps,
        "relative_confidence": step_time.relative_confidence,
        **{column: getattr(gpu, name) for column, name in GPU_COLUMNS.items()},
        "joules_per_token": gpu.joules_per_token(measurement.tokens_per_second_per_gpu),
        "memory_by_part": {storable(part): int(size) for part, size in memory_by_part.items()}
        if memory_by_part
        else None,
        "step_seconds": list(measurement.step_seconds),
    }


def gpu_usage_of(row: Row) -> GpuUsage:
    return GpuUsage(**{name: row[column] for column, name in GPU_COLUMNS.items()})


def measurement_of(row: Row) -> Measurement:
    step_time = StepTime(
        median=row["step_seconds_median"],
        iqr=row["step_seconds_iqr"],
        num_steps=row["num_steps"],
        relative_confidence=row["relative_confidence"],
    )
    return Measurement(
        **{name: row[name] for name in _MEASURED if name != "peak_memory_driver_kind"},
        peak_memory_driver_kind=driver_memory_kind_of(row),
        step_time=step_time,
        step_seconds=tuple(row["step_seconds"]),
    )


def driver_memory_kind_of(row: Row) -> DriverMemoryKind | None:
    kind = row["peak_memory_driver_kind"]
    return DriverMemoryKind(kind) if kind is not None else None


def failure_columns(failure: Failure) -> Columns:
    values = {name: getattr(failure, name) for name in _names(Failure, ("memory",))}
    columns: Columns = {
        f"failure_{name}": storable(value) if isinstance(value, str) else value
        for name, value in values.items()
    }
    memory = None if failure.memory is None else asdict(failure.memory)
    part = None if memory is None else memory.pop("step_part")
    return {**columns, "failure_memory": memory, "failure_step_part": part}


def failure_of(row: Row) -> Failure | None:
    if row["failure_kind"] is None:
        return None
    values = {name: row[f"failure_{name}"] for name in _names(Failure, ("kind", "memory"))}
    texts = {name: values[name] or "" for name in ("message", "evidence", "log_tail", "log_path")}
    kind = FailureKind(row["failure_kind"])
    return Failure(kind=kind, memory=shortage_of(row), **values | texts)


def shortage_of(row: Row) -> MemoryShortage | None:
    known = row["failure_memory"]
    part = row["failure_step_part"]
    if known is None:
        return None
    return MemoryShortage(**known, step_part=None if part is None else StepPart(part))


def storable(text: str) -> str:
    """The text without NUL (PostgreSQL refuses it) and lone surrogates (no driver encodes them)."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def finite(value: float | None) -> float | None:
    """The prediction, or None (unknown) if it is infinite or NaN."""
    return None if value is None or not math.isfinite(value) else float(value)
