"""One way to run a cell: how the GPUs share the work, and what is recomputed.

`Layout` is the only list of a layout's axes: the columns of `LayoutTable` and of the store's tables
follow from it. Whether a layout is legal is decided in `space`, whether it fits in `memory`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from string import ascii_letters, digits
from types import MappingProxyType
from typing import Any, Literal, Protocol

from orchestrator.core.problem.pipeline_schedule import (
    ONE_F_ONE_B,
    PipelineSchedule,
    ScheduleKind,
)


class RecomputeMode(StrEnum):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class SelectivePolicy(StrEnum):
    """The activations that selective recomputation drops."""

    # The attention core (Korthikanti et al. 2022), or every second matmul (torchtitan).
    ATTENTION = "attention"
    OPS = "ops"


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


_RECOMPUTE_TEXT = re.compile(r"(none|full|selective(?:_(attention|ops))?)(?::([1-9]\d{0,4}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """The activations that are recomputed in the backward pass."""

    mode: RecomputeMode = RecomputeMode.NONE
    policy: SelectivePolicy | None = None  # of mode selective only
    num_layers: int | None = None  # counted from the first; None: all

    def __post_init__(self) -> None:
        if (self.mode is RecomputeMode.SELECTIVE) != (self.policy is not None):
            raise ValueError(
                f"recompute {self.mode}: a policy belongs to selective, and only to it; "
                f"got {self.policy}"
            )
        if self.num_layers is not None and (self.mode is RecomputeMode.NONE or self.num_layers < 1):
            raise ValueError(
                f"recompute {self.mode} for {self.num_layers} layers: "
                "expected a mode other than none and at least 1 layer"
            )

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Read `none`, `full`, `full:8` (first 8 layers), `selective` (is `selective_ops`), ...

        Raises ValueError with what is allowed.
        """
        match = _RECOMPUTE_TEXT.fullmatch(text)
        if match is None or (text.startswith("none") and text != "none"):
            raise ValueError(
                f"recompute {text!r} is not one of none, full, selective, selective_ops, "
                "selective_attention, each but none with an optional :LAYERS (full:8)"
            )
        mode = RecomputeMode(match[1].split("_")[0])
        policy = (
            SelectivePolicy(match[2] or SelectivePolicy.OPS)
            if mode is RecomputeMode.SELECTIVE
            else None
        )
        return cls(mode=mode, policy=policy, num_layers=int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        text = f"{self.mode}_{self.policy}" if self.policy else str(self.mode)
        return f"{text}:{self.num_layers}" if self.num_layers is not None else text

    def layers_of(self, num_layers: int) -> int:
        """The number of a model's layers that are recomputed."""
        if self.mode is RecomputeMode.NONE:
            return 0
        return num_layers if self.num_layers is None else min(self.num_layers, num_layers)


NO_RECOMPUTE = Recompute()

OptionValue = str | int | bool
# Names and values of the workload's options that vary, sorted by name.
Options = tuple[tuple[str, OptionValue], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutColumn:
    """A column of a row that keeps an axis of a layout, or one part of it."""

    name: str
    means: str
    type: type[Any] = str
    is_nullable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedAxis:
    """The columns of an axis that is not a plain number.

    A row has one column for each part of the value. A `LayoutTable` has an index into the
    distinct values, which are in its field `distinct`.
    """

    columns: tuple[LayoutColumn, ...]
    parts: Callable[[Any], tuple[object, ...]]
    value: Callable[..., Any]  # of its parts
    distinct: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeAxis:
    """An axis that is a plain number, and one column everywhere."""

    means: str
    short: str | None = None  # its name in keys and constraints
    # The number of the cell whose divisors are its values.
    divides: Literal["num_gpus", "global_batch_size"] | None = None


def _parallel(means: str, short: str) -> dict[str, SizeAxis]:
    return {"axis": SizeAxis(means=means, short=short, divides="num_gpus")}


def _batch(means: str, short: str) -> dict[str, SizeAxis]:
    return {"axis": SizeAxis(means=means, short=short, divides="global_batch_size")}


_PIPELINE_SCHEDULE = CodedAxis(
    columns=(
        LayoutColumn(name="pipeline_schedule", means="gpipe, 1f1b or interleaved"),
        LayoutColumn(
            name="virtual_stages",
            means="pipeline stages of each rank: more than 1 if interleaved",
            type=int,
        ),
    ),
    parts=lambda it: (it.kind.value, it.virtual_stages),
    value=lambda kind, stages: PipelineSchedule(kind=ScheduleKind(kind), virtual_stages=stages),
    distinct="pipeline_schedules",
)
_RECOMPUTE = CodedAxis(
    columns=(
        LayoutColumn(name="recompute", means="none, selective or full"),
        LayoutColumn(
            name="recompute_policy", means="of selective: attention or ops", is_nullable=True
        ),
        LayoutColumn(
            name="recompute_layers",
            means="for how many layers from the first; NULL: all",
            type=int,
            is_nullable=True,
        ),
    ),
    parts=lambda it: (it.mode.value, it.policy.value if it.policy else None, it.num_layers),
    value=lambda mode, policy, num_layers: Recompute(
        mode=RecomputeMode(mode),
        policy=SelectivePolicy(policy) if policy else None,
        num_layers=num_layers,
    ),
    distinct="recomputes",
)
_PRECISION = CodedAxis(
    columns=(LayoutColumn(name="precision", means="fp32, bf16, fp16 or fp8"),),
    parts=lambda it: (it.value,),
    value=Precision,
    distinct="precisions",
)
_OPTIONS = CodedAxis(
    columns=(
        LayoutColumn(
            name="options",
            means="of a trial: the workload's options that vary, as JSON; NULL: none",
            type=dict,
            is_nullable=True,
        ),
    ),
    parts=lambda it: (dict(it) or None,),
    value=lambda options: tuple(sorted((options or {}).items())),
    distinct="option_sets",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    data_parallel_size: int = field(default=1, metadata=_parallel("replicas", "dp"))
    tensor_parallel_size: int = field(
        default=1, metadata=_parallel("ranks that share each layer", "tp")
    )
    pipeline_parallel_size: int = field(default=1, metadata=_parallel("pipeline stages", "pp"))
    context_parallel_size: int = field(
        default=1, metadata=_parallel("ranks that share a sequence", "cp")
    )
    micro_batch_size: int = field(
        default=1, metadata=_batch("sequences per replica and forward pass", "mbs")
    )
    grad_accum_steps: int = field(
        default=1, metadata=_batch("micro-batches per replica and optimizer step", "ga")
    )
    pipeline_schedule: PipelineSchedule = field(
        default=ONE_F_ONE_B, metadata={"axis": _PIPELINE_SCHEDULE}
    )
    recompute: Recompute = field(default=NO_RECOMPUTE, metadata={"axis": _RECOMPUTE})
    zero_stage: int = field(default=0, metadata={"axis": SizeAxis(means="0 to 3")})
    precision: Precision = field(default=Precision.BF16, metadata={"axis": _PRECISION})
    options: Options = field(default=(), metadata={"axis": _OPTIONS})

    def __post_init__(self) -> None:
        if not self.options:
            return
        names = [name for name, _ in self.options]
        if names != sorted(set(names)):
            raise ValueError(
                f"options {', '.join(names)}: expected each name once, in alphabetical order"
            )

    @property
    def world_size(self) -> int:
        return (
            self.data_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
        )

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step: exact by construction."""
        return self.data_parallel_size * self.micro_batch_size * self.grad_accum_steps

    @property
    def num_techniques(self) -> int:
        """Count the techniques that it uses in addition to data parallelism: each may fail."""
        plain = Layout()
        return sum(getattr(self, name) != getattr(plain, name) for name in _TECHNIQUES)

    @property
    def key(self) -> str:
        """A readable, stable name, used in SQL, in logs and on the command line.

        It names the pipeline's schedule only if that is not 1f1b.
        """
        schedule = (
            ""
            if self.pipeline_schedule == ONE_F_ONE_B
            else f"_{str(self.pipeline_schedule).replace(':', '.')}"
        )
        options = "".join(f"-{name}={_option_text(value)}" for name, value in self.options)
        return (
            f"dp{self.data_parallel_size}_tp{self.tensor_parallel_size}"
            f"_pp{self.pipeline_parallel_size}_cp{self.context_parallel_size}"
            f"_mbs{self.micro_batch_size}_ga{self.grad_accum_steps}{schedule}"
            f"_{str(self.recompute).replace(':', '.')}_z{self.zero_stage}_{self.precision}{options}"
        )

    @property
    def short(self) -> str:
        """The key without the parts that have their neutral value, for people to read."""
        parts = [f"dp{self.data_parallel_size}"]
        parts += [
            f"{name}{size}"
            for name, size in (
                ("tp", self.tensor_parallel_size),
                ("pp", self.pipeline_parallel_size),
                ("cp", self.context_parallel_size),
            )
            if size > 1
        ]
        if self.pipeline_schedule != ONE_F_ONE_B:
            parts.append(str(self.pipeline_schedule))
        parts += [f"mbs{self.micro_batch_size}", f"ga{self.grad_accum_steps}", str(self.recompute)]
        parts += [f"z{self.zero_stage}"] if self.zero_stage else []
        return " ".join(
            [*parts, str(self.precision), *([self.option_text] if self.options else [])]
        )

    @property
    def option_text(self) -> str:
        """The options alone, readable: `attention=eager fused=true`."""
        return " ".join(f"{name}={_option_text(value)}" for name, value in self.options)


def _option_text(value: OptionValue) -> str:
    """Write a value as part of a key, so that it reads back with its type.

    A text that looks like a number or a truth value is escaped.
    """
    if isinstance(value, bool):
        return str(value).lower()
    text = "".join(
        chr(byte) if chr(byte) in _PLAIN else f"%{byte:02X}" for byte in str(value).encode()
    )
    if isinstance(value, str) and _LITERAL.fullmatch(text):
        return f"%{ord(text[0]):02X}{text[1:]}"
    return text


def _option_value(text: str) -> OptionValue:
    if _LITERAL.fullmatch(text):
        return text == "true" if text in ("true", "false") else int(text)
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), text.encode()).decode()


_TECHNIQUES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "pipeline_schedule",
    "grad_accum_steps",
    "recompute",
    "zero_stage",
)
_PLAIN = frozenset(ascii_letters + digits + "_.+,:@~-")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_LITERAL = re.compile(r"true|false|-?\d{1,18}")
_OPTION = re.compile(r"-([A-Za-z_]\w*)=([^=]*?)(?=-[A-Za-z_]\w*=|$)", re.ASCII)
_AXES: Mapping[str, SizeAxis | CodedAxis] = {f.name: f.metadata["axis"] for f in fields(Layout)}
CODED: Mapping[str, CodedAxis] = MappingProxyType(
    {name: axis for name, axis in _AXES.items() if isinstance(axis, CodedAxis)}
)
_SIZE_AXES = {name: axis for name, axis in _AXES.items() if isinstance(axis, SizeAxis)}
SIZES = tuple(_SIZE_AXES)
# The axes whose product is the number of GPUs.
PARALLEL_AXES = tuple(name for name, axis in _SIZE_AXES.items() if axis.divides == "num_gpus")
BATCH_AXES = tuple(name for name, axis in _SIZE_AXES.items() if axis.divides == "global_batch_size")
# Without the options, which have names of their own.
NAMED_AXES = tuple(name for name in _AXES if name != "options")
# The numbers of a layout, in the order of `SIZES`.
sizes_of = attrgetter(*SIZES)
# The columns of each coded axis.
_COLUMN_NAMES = {
    name: tuple(column.name for column in axis.columns) for name, axis in CODED.items()
}
SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {axis.short: name for name, axis in _SIZE_AXES.items() if axis.short is not None}
)
# What a row of a table keeps of a layout, in the order of its axes.
LAYOUT_COLUMNS: tuple[LayoutColumn, ...] = tuple(
    column
    for name, axis in _AXES.items()
    for column in (
        axis.columns
        if isinstance(axis, CodedAxis)
        else (LayoutColumn(name=name, means=axis.means, type=int),)
    )
)
_KEY = re.compile(
    "_".join(rf"{short}(?P<{name}>\d+)" for short, name in SHORT_NAMES.items())
    + r"(?:_(?P<pipeline_schedule>gpipe|interleaved\.\d+))?"
    + r"_(?P<recompute>[a-z_]+(?:\.\d+)?)_z(?P<zero_stage>[0-3])"
    + rf"_(?P<precision>{'|'.join(Precision)})(?P<options>(?:-[A-Za-z_]\w*=[^=]*?)*)",
    re.ASCII,
)


def parse_key(key: str) -> Layout:
    """Read a `Layout.key` back. Raises ValueError if it is none."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(
            f"layout {key!r} is not of the form dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16, "
            "with -NAME=VALUE behind it for each option that varies"
        )
    return Layout(
        **{name: int(match[name]) for name in SIZES},
        pipeline_schedule=PipelineSchedule.parse(schedule.replace(".", ":"))
        if (schedule := match["pipeline_schedule"]) is not None
        else ONE_F_ONE_B,
        recompute=Recompute.parse(match["recompute"].replace(".", ":")),
        precision=Precision(match["precision"]),
        options=tuple(
            (found[1], _option_value(found[2])) for found in _OPTION.finditer(match["options"])
        ),
    )


def to_columns(layout: Layout) -> dict[str, Any]:
    """The values of `LAYOUT_COLUMNS`, by the column's name."""
    values: dict[str, Any] = dict(zip(SIZES, sizes_of(layout), strict=True))
    for name, axis in CODED.items():
        values.update(zip(_COLUMN_NAMES[name], axis.parts(getattr(layout, name)), strict=True))
    return values


class _LayoutRow(Protocol):
    def __getitem__(self, column: str, /) -> Any: ...


def from_columns(row: _LayoutRow) -> Layout:
    """The layout that `to_columns` wrote; a row may have more columns."""
    return Layout(
        **{name: row[name] for name in SIZES},
        **{
            name: axis.value(*[row[column] for column in _COLUMN_NAMES[name]])
            for name, axis in CODED.items()
        },
    )
