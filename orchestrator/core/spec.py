"""The experiment, as the sweep file says it: validated once, at the door; inside, its types are trusted.

Only values live here. Reading YAML with its places is `spec_yaml`; which layouts a spec means is `space`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator

from orchestrator.core.cell import Cell
from orchestrator.core.constraint import Constraint
from orchestrator.core.hardware import DEVICES
from orchestrator.core.layout import Precision, Recompute
from orchestrator.core.model_shape import PRESETS, ModelShape
from orchestrator.core.protocol import MeasurementPlan, PhaseLimits

MAX_GPUS = 16_384
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATIONS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _tokens(value: Any) -> Any:
    """`4M` is 4 * 2**20, as the field counts tokens of a batch: 4M tokens at sequence length 4096 are 1,024 sequences exactly."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*([kKmMgG]?)", value)):
        return int(match[1]) * _SIZES[match[2].lower()]
    return value


def _duration(value: Any) -> Any:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)", value)):
        return float(match[1]) * _DURATIONS[match[2]]
    return value


def _distinct(values: Any) -> Any:
    if isinstance(values, tuple) and len(set(values)) != len(values):
        raise ValueError(f"{list(map(str, values))} names a value twice")
    return values


def _model(value: Any) -> Any:
    if isinstance(value, str):
        if value not in PRESETS:
            raise ValueError(f"no model preset is called {value!r}; presets: {', '.join(PRESETS)}; or give the sizes themselves")
        return PRESETS[value]
    return value


def _recompute(value: Any) -> Any:
    if value is False or value is None:
        return Recompute()
    return Recompute.parse(value) if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, le=1 << 24)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=1e8), WithJsonSchema({"type": ["number", "string"], "description": "seconds, or 90s, 5min, 2h"})]
Tokens = Annotated[int, BeforeValidator(_tokens), Field(ge=1, le=1 << 40), WithJsonSchema({"type": ["integer", "string"], "description": "a number, or 4M = 4 * 2**20"})]
Model = Annotated[ModelShape, BeforeValidator(_model), WithJsonSchema({"anyOf": [{"enum": sorted(PRESETS)}, {"type": "object"}]})]
RecomputeChoice = Annotated[
    Recompute,
    BeforeValidator(_recompute),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(none|full(:\d+)?|selective(_ops|_attention)?(:\d+)?)$"}),
]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=4096), AfterValidator(_distinct)]
Auto = Literal["auto"]


class Axes(_Section):
    """The values each part of a layout may take. `auto`: every value that the cell allows, which are divisors of its GPUs and its batch."""

    data_parallel_size: Counts | Auto = "auto"
    micro_batch_size: Counts | Auto = "auto"
    grad_accum_steps: Counts | Auto = "auto"
    recompute: Annotated[tuple[RecomputeChoice, ...], BeforeValidator(_as_list), Field(min_length=1), AfterValidator(_distinct)] | Auto = "auto"
    zero_stage: Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], BeforeValidator(_as_list), Field(min_length=1), AfterValidator(_distinct)] | Auto = (0,)
    tensor_parallel_size: Counts | Auto = (1,)
    pipeline_parallel_size: Counts | Auto = (1,)
    context_parallel_size: Counts | Auto = (1,)


class Limits(_Section):
    """Seconds a rank may stay in each phase before it counts as hung."""

    start: Duration = 120.0
    rendezvous: Duration = 120.0
    first_step: Duration = 300.0  # a first step may compile for minutes
    steady: Duration = 60.0  # from one step to the next
    teardown: Duration = 20.0
    total: Duration = 1800.0

    @property
    def plan(self) -> PhaseLimits:
        return PhaseLimits(**self.model_dump())


class Measuring(_Section):
    """Warm-up is dropped; then steps are timed until the median is known to `precision`, within the bounds."""

    warmup_steps: Annotated[int, Field(ge=2, le=1000)] = 3  # "it fits" needs two optimizer steps: the states appear in the first
    min_steps: Annotated[int, Field(ge=2, le=1000)] = 5
    max_steps: Annotated[int, Field(ge=2, le=10_000)] = 50
    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02  # relative half-width of the median's 95 % interval
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is more than max_steps {self.max_steps}")
        return self

    @property
    def plan(self) -> MeasurementPlan:
        return MeasurementPlan(warmup_steps=self.warmup_steps, min_steps=self.min_steps, max_steps=self.max_steps, relative_confidence=self.precision)


class Strategy(StrEnum):
    AUTO = "auto"  # best prediction first while the space fits the budget, then TPE
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    TPE = "tpe"
    GP = "gp"


class Plateau(_Section):
    """Stop a cell when its last `trials` finished trials brought less than `gain` over the best before them."""

    trials: Annotated[int, Field(ge=1)] = 20
    gain: Annotated[float, Field(ge=0, lt=1)] = 0.01


class Search(_Section):
    """How the next layout is chosen, and when to stop. Budgets count what is spent, failures included."""

    strategy: Strategy = Strategy.AUTO
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    max_trials: Annotated[int, Field(ge=1)] | None = None  # launches per cell
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None  # of the sweep
    max_wall_time: Duration | None = None  # of one `sweep run`
    max_parallel_trials: Annotated[int, Field(ge=1, le=4096)] | Auto = "auto"  # auto: as many as fit; on a CPU machine, one
    plateau: Plateau | None = None


class Objective(StrEnum):
    TOKENS_PER_SECOND_PER_GPU = "tokens_per_second_per_gpu"
    STEP_SECONDS = "step_seconds"


class Workload(_Section):
    """The program that ranks run, and what it takes besides the layout."""

    name: Literal["llama", "synthetic", "command"] = "llama"
    options: Mapping[str, Any] = {}


def _workload(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _device(value: str) -> str:
    if value not in ("auto", "cpu", *DEVICES):
        raise ValueError(f"device {value!r} is not one of auto, cpu, {', '.join(DEVICES)}")
    return value


class SweepSpec(_Section):
    """One sweep file. Model, GPUs, sequence length and global batch may be lists: each combination is a cell with a best of its own."""

    name: Name
    model: Annotated[tuple[Model, ...], BeforeValidator(_as_list), Field(min_length=1)]
    sequence_length: Counts
    global_batch_size: Counts | None = None  # in sequences
    global_batch_tokens: Annotated[tuple[Tokens, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    precision: Annotated[tuple[Precision, ...], BeforeValidator(_as_list), Field(min_length=1), AfterValidator(_distinct)] = (Precision.BF16,)
    gpus: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_GPUS)], ...], BeforeValidator(_as_list), Field(min_length=1), AfterValidator(_distinct)]
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    device: Annotated[str, AfterValidator(_device), WithJsonSchema({"enum": ["auto", "cpu", *DEVICES]})] = "auto"
    device_memory_gib: Annotated[float, Field(gt=0, le=4096)] | None = None  # None: the device's own
    axes: Axes = Axes()
    tensor_parallel_across_nodes: bool = False
    constraints: tuple[Constraint, ...] = ()
    measurement: Measuring = Measuring()
    search: Search = Search()
    objective: Objective = Objective.TOKENS_PER_SECOND_PER_GPU
    workload: Annotated[Workload, BeforeValidator(_workload), WithJsonSchema({"anyOf": [{"enum": ["llama", "synthetic", "command"]}, {"type": "object"}]})] = Workload()

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError("give exactly one of global_batch_size (sequences) and global_batch_tokens (tokens, 4M)")
        for tokens, length in product(self.global_batch_tokens or (), self.sequence_length):
            if tokens % length:
                raise ValueError(f"global_batch_tokens {tokens} is not a multiple of sequence_length {length}: the batch is exact, never rounded")
        names = [m.name for m in self.model]
        if len(set(names)) != len(names):
            raise ValueError(f"models {names}: a name stands twice; two definitions need two names")
        return self

    def cells(self) -> tuple[Cell, ...]:
        """Every model x GPU count x sequence length x global batch, in the file's order."""
        return tuple(
            Cell(model=model, num_gpus=gpus, sequence_length=length, global_batch_size=batch)
            for model, gpus, length in product(self.model, self.gpus, self.sequence_length)
            for batch in (self.global_batch_size or [tokens // length for tokens in self.global_batch_tokens or ()])
        )

    def conditions(self) -> dict[str, Any]:
        """What makes numbers incomparable when it changes. Axes, budgets, cells and limits are not among it."""
        return {
            "workload": self.workload.model_dump(mode="json"),
            "warmup_steps": self.measurement.warmup_steps,
            "objective": str(self.objective),
            "device": self.device,
            "gpus_per_node": self.gpus_per_node,
            "device_memory_gib": self.device_memory_gib,
        }
