"""The kinds of values in a sweep file: sizes, durations, names, options, and lists of them.

Each kind checks its own values. What a value means is described in its section.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orchestrator.core.problem.layout import Recompute
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.sweepfile.suggestion import did_you_mean

MAX_VALUES = 4096  # of one axis
MAX_FEW = 64  # models, constraints, values of an option
MAX_OPTIONS = 16  # that vary
MAX_OPTION_CHARACTERS, MAX_OPTION_NUMBER = 100, 10**15
MAX_NAME = 63  # characters of a sweep's name
_NAME = re.compile(rf"(?=.{{1,{MAX_NAME}}}\Z)[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
_OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATIONS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|min|m|h|d)")
_SPELT_OUT = re.compile(
    r"(\d+(?:\.\d+)?)\s*(?:(?P<ms>ms|msec|millisecond)|(?P<s>s|sec|second)|(?P<min>m|min|minute)"
    r"|(?P<h>h|hr|hour)|(?P<d>d|day))s?\.?",
    re.IGNORECASE,
)
SCHEDULE_WORDS = ("gpipe", "1f1b", "interleaved:2", "auto")
RECOMPUTE_WORDS = ("none", "full", "selective", "selective_ops", "selective_attention", "auto")


class Section(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    OMITTED_DEFAULTS: ClassVar[frozenset[str]] = frozenset()
    """Keys that are stored only if they differ from their default.

    A sweep that was stored before a key existed then still reads the same.
    """

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        defaults = {name: type(self).model_fields[name].default for name in self.OMITTED_DEFAULTS}
        values = write(self).items()
        return {
            name: value
            for name, value in values
            if name not in defaults or not _is_same(value, defaults[name])
        }


def _is_same(value: Any, default: Any) -> bool:
    """Compare a value as it is written with a default: JSON has lists only."""
    return bool(value == default) or (value == [] and default == ())


def key(takes: str, means: str) -> Any:
    """Describe a key, for `Annotated`: the values it takes and what it means.

    `sweep schema` and the documents show both.
    """
    return Field(description=means, json_schema_extra={"takes": takes})


def whole(least: int, most: int) -> Any:
    """The bounds of a whole number, for `Annotated`."""
    return Field(strict=True, ge=least, le=most)


def as_list(value: Any) -> Any:
    """Put one value into a list. Refuse a list that is far too long before its values are read."""
    if not isinstance(value, (list, tuple)):
        return [value]
    if len(value) > MAX_VALUES:
        raise ValueError(f"{len(value):,} values; at most {MAX_VALUES:,}")
    return value


def few(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and len(value) > MAX_FEW:
        raise ValueError(f"{len(value):,} values; at most {MAX_FEW}")
    return value


def few_options(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) > MAX_OPTIONS:
        raise ValueError(f"{len(value):,} options; at most {MAX_OPTIONS}")
    return value


def _tokens(value: Any) -> Any:
    """Read `4M` as 4 * 2**20: at sequence length 4096, these are exactly 1,024 sequences."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,18})\s*([kKmMgG]?)", value)
    if match is None:
        raise ValueError(
            f"{value!r} is no number of tokens; write a whole number, or 4M = 4 * 2**20"
        )
    return int(match[1]) * _SIZES[match[2].lower()]


def _duration(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError(
            f"{value!r} is no duration; write seconds, or 90s, 5min, 2h, 1d{_meant_duration(value)}"
        )
    return float(match[1]) * _DURATIONS[match[2]]


def _meant_duration(value: str) -> str:
    """Return the hint that writes a spelt out duration as a file does; empty: it is none."""
    meant = _SPELT_OUT.fullmatch(value.strip())
    if meant is None:
        return ""
    number, unit = float(meant[1]), meant.lastgroup
    written = [(number / 1000, "s"), (number, "s")] if unit == "ms" else [(number, unit)]
    # As many decimals as a file may have, and no exponent.
    hints = [f"{f'{value:.6f}'.rstrip('0').rstrip('.')}{unit}" for value, unit in written]
    accepted = [one for one in hints if (read := _DURATION.fullmatch(one)) and float(read[1])]
    return f"; did you mean {' or '.join(accepted)}?" if accepted else ""


def checked_name(value: str) -> str:
    """The name of a sweep. Raises ValueError if it is none."""
    if not _NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"name {value[:80]!r} is not 1 to 63 of a-z 0-9 . _ -, with a letter or digit at both"
            " ends and no '..': it names files and rows"
        )
    return value


def _distinct(values: Any) -> Any:
    if isinstance(values, tuple) and len(set(values)) != len(values):
        twice = next(value for i, value in enumerate(values) if value in values[:i])
        raise ValueError(f"{twice} appears twice in the list")
    return values


def _recompute(value: Any) -> Any:
    if value is False or value is None:
        return Recompute()
    if isinstance(value, Recompute):
        return value
    if not isinstance(value, str):
        raise ValueError(
            f"{value!r} is no recompute; write none, selective or full,"
            " each but none with an optional :LAYERS (full:8)"
        )
    try:
        return Recompute.parse(value)
    except ValueError as exc:
        raise ValueError(f"{exc}{did_you_mean(value, RECOMPUTE_WORDS)}") from None


def _pipeline_schedule(value: Any) -> Any:
    if isinstance(value, PipelineSchedule):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no schedule; write gpipe, 1f1b, or interleaved:2")
    try:
        return PipelineSchedule.parse(value)
    except ValueError as exc:
        raise ValueError(f"{exc}{did_you_mean(value, SCHEDULE_WORDS)}") from None


def _option_name(value: str) -> str:
    if not _OPTION_NAME.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no name of an option: 1 to 63 letters, digits and _,"
            " a letter or _ first"
        )
    return value


def _option_value(value: Any) -> Any:
    if isinstance(value, str):
        good = len(value) <= MAX_OPTION_CHARACTERS and value.isprintable()
    else:
        good = isinstance(value, int) and abs(value) <= MAX_OPTION_NUMBER
    if not good:
        raise ValueError(
            f"{str(value)[:80]!r} is no value of an option;"
            " expected a word on one line, a whole number, true or false"
        )
    return value


def _text(**schema: Any) -> Any:
    return WithJsonSchema({"type": "string", **schema})


def _number_or_text(kind: str, description: str) -> Any:
    return WithJsonSchema({"type": [kind, "string"], "description": description})


Flag = Annotated[bool, Field(strict=True)]
FLAG_TAKES = "`true`, `false`"
Count = Annotated[int, whole(1, 1 << 24)]
Name = Annotated[str, AfterValidator(checked_name), _text(pattern=f"^{_NAME.pattern}$")]
Duration = Annotated[
    Annotated[float, Field(strict=True, gt=0, le=1e8)],
    BeforeValidator(_duration),
    _number_or_text("number", "seconds, or 90s, 5min, 2h"),
]
Tokens = Annotated[
    Annotated[int, whole(1, 1 << 40)],
    BeforeValidator(_tokens),
    _number_or_text("integer", "a number, or 4M = 4 * 2**20"),
]
Length = Annotated[
    Count, BeforeValidator(_tokens), _number_or_text("integer", "a number, or 8K = 8192")
]
RecomputeChoice = Annotated[
    Recompute,
    BeforeValidator(_recompute),
    PlainSerializer(str, return_type=str),
    _text(pattern=r"^(none|full(:\d+)?|selective(_ops|_attention)?(:\d+)?)$"),
]


ScheduleChoice = Annotated[
    PipelineSchedule,
    BeforeValidator(_pipeline_schedule),
    PlainSerializer(str, return_type=str),
    _text(pattern=r"^(gpipe|1f1b|interleaved:\d+)$"),
]


class AlsoSingleValue:
    """Add to the JSON schema that one value needs no list, as `as_list` allows."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


class AlsoForm:
    """Add to the JSON schema another form that the value may have."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = form

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [dict(self._form), handler(schema)]}


_T = TypeVar("_T")
Some = Annotated[
    tuple[_T, ...],
    BeforeValidator(as_list),
    Field(min_length=1),
    AfterValidator(_distinct),
    AlsoSingleValue(),
]
# Stored as one value if it is one, as before there could be several.
OneOrMore = Annotated[
    Some[_T], PlainSerializer(lambda values: values[0] if len(values) == 1 else list(values))
]
# The tag separates the word `auto` from values, so that pydantic reports one mistake, not two.
OrAuto = Annotated[
    Annotated[_T, Tag("values")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "values"),
]
OptionName = Annotated[str, AfterValidator(_option_name)]
OptionChoice = Annotated[
    str | int | bool,
    PlainValidator(_option_value),
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("string", "integer", "boolean")]}),
]
OptionValues = Annotated[
    tuple[OptionChoice, ...],
    BeforeValidator(lambda value: few(as_list(value))),
    Field(min_length=1),
    AfterValidator(_distinct),
    AlsoSingleValue(),
]
