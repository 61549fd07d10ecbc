"""The option `metrics` of workload command: patterns of the numbers that a program prints.

A pattern is a regular expression with one group, the number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from orchestrator.core.sweepfile.spec_values import AlsoForm, key
from orchestrator.core.sweepfile.workload_options import few_entries
from orchestrator.core.trial.printed_numbers import BYTES_OF, PaceUnit, number_of, step_seconds_of

MAX_PATTERN = 500  # characters
MAX_ALSO = 32
MAX_EVERY = 10_000
# Characters of a value that is no number.
MAX_TEXT = 200
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
# The names in `also` that are fields of a result.
_RESULT_FIELDS = {
    "peak_memory": "peak_memory_allocated_bytes",
    "peak_memory_allocated": "peak_memory_allocated_bytes",
    "peak_memory_reserved": "peak_memory_reserved_bytes",
}
_BYTES = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")


def _pattern(text: str) -> str:
    if len(text) > MAX_PATTERN:
        raise ValueError(f"a pattern of {len(text)} characters; at most {MAX_PATTERN}")
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"{text[:80]!r} is no regular expression: {exc}") from None
    if groups != 1:
        raise ValueError(
            f"{text[:80]!r} has {groups} groups; put exactly the number into ( ), and write (?: )"
            " for any other group"
        )
    return text


def _field_name(name: str) -> str:
    if not _FIELD_NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} is no name of a field: 1 to 63 letters, digits and _, no digit first"
        )
    if name == "step_seconds":
        raise ValueError(f"{name} is what `log` gives; leave it out")
    return name


def _memory_unit(unit: str) -> str:
    if unit not in BYTES_OF:
        raise ValueError(f"{unit[:80]!r} is not one of {', '.join(BYTES_OF)}")
    return unit


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]


class PrintingNode(StrEnum):
    FIRST = "first"
    LAST = "last"


class _AsWritten(BaseModel):
    """A section that is stored as the file gives it, without defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler) -> Any:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class AlsoPattern(_AsWritten):
    """A further number that a program prints. A pattern alone is a text."""

    log: Annotated[Pattern, key("pattern", "A regular expression with one group, the value")]
    unit: Annotated[
        Annotated[str, AfterValidator(_memory_unit)] | None,
        key(
            "`MiB`, `GB`, ...",
            "Unit of memory, if the text does not name it itself, as `9.46GiB` does",
        ),
    ] = None

    @model_serializer(mode="wrap")
    def _as_text(self, write: SerializerFunctionWrapHandler) -> Any:
        return self.log if self.model_fields_set == {"log"} else self._as_written(write)


def _also(value: Any) -> Any:
    return {"log": value} if isinstance(value, str) else value


class MetricsSection(_AsWritten):
    """The patterns that read steps from a program's output."""

    log: Annotated[
        Pattern,
        key(
            "pattern",
            "A regular expression, searched in each line. Its one group is the number that gives"
            " the time of a step",
        ),
    ]
    unit: Annotated[
        PaceUnit,
        key(
            ", ".join(f"`{unit}`" for unit in PaceUnit),
            "What that number is. `tokens_per_second` is of all GPUs",
        ),
    ]
    every: Annotated[
        int,
        Field(strict=True, ge=1, le=MAX_EVERY),
        key("number", "Optimizer steps that one line covers; the number is their mean"),
    ] = 1
    node: Annotated[
        PrintingNode,
        key(
            "`first`, `last`",
            "The node of the gang whose ranks print the steps: the one with rank 0, or the last one"
            " (Megatron-LM prints on the last rank)",
        ),
    ] = PrintingNode.FIRST
    also: Annotated[
        Mapping[
            Annotated[str, AfterValidator(_field_name)],
            Annotated[AlsoPattern, BeforeValidator(_also), AlsoForm({"type": "string"})],
        ],
        BeforeValidator(few_entries),
        Field(max_length=MAX_ALSO),
        key(
            "mapping of patterns",
            "Further values: `loss`, `grad_norm`, `peak_memory`, `peak_memory_reserved`, `step`"
            " (its number), and any name of your own. A pattern, or `{log: PATTERN, unit: MiB}`",
        ),
    ] = {}


class LinePatterns:
    """The patterns of a `metrics` section, compiled, for one trial."""

    def __init__(self, section: MetricsSection, *, tokens_per_step: int, world_size: int) -> None:
        self.section = section
        self._tokens_per_step = tokens_per_step
        self._world_size = world_size

    @cached_property
    def _log(self) -> re.Pattern[str]:
        return re.compile(self.section.log)

    @cached_property
    def _also(self) -> list[tuple[str, re.Pattern[str], str | None]]:
        return [
            (_RESULT_FIELDS.get(name, name), re.compile(also.log), also.unit)
            for name, also in self.section.also.items()
        ]

    def values_of(self, line: str) -> dict[str, Any]:
        """Return the fields that a line tells, as a line of metrics has them; empty if none."""
        return dict(self._values(line))

    def _values(self, line: str) -> Iterator[tuple[str, Any]]:
        match = self._log.search(line)
        if match is not None and match[1] is not None:
            number = number_of(match[1])
            seconds = None
            if number is not None:
                seconds = step_seconds_of(
                    number,
                    self.section.unit,
                    tokens_per_step=self._tokens_per_step,
                    world_size=self._world_size,
                )
            if seconds is not None:
                yield "step_seconds", seconds
        for name, pattern, unit in self._also:
            match = pattern.search(line)
            if match is None or match[1] is None:
                continue
            value = number_of(match[1])
            has_own_unit = match[1].rstrip().endswith("B")
            scale = 1 if unit is None or has_own_unit else BYTES_OF[unit]
            if value is None:
                if name not in _BYTES:
                    yield name, match[1][:MAX_TEXT]
            elif name not in _BYTES:
                yield name, value * scale
            elif 0 <= value < 1e15:
                yield name, round(value * scale)
