"""The kinds of values that a sweep file holds: lists that may be one value, sizes, durations, names, options, and what is said of a wrong one.

What they mean is said where they stand, in `spec`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

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
    Tag,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orchestrator.core.problem.layout import Recompute

MAX_VALUES = 4096  # of one axis
MAX_FEW = 64  # models, constraints, values of an option
MAX_OPTIONS = 16  # that vary
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATIONS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPELT_OUT = re.compile(
    r"(\d+(?:\.\d+)?)\s*(?:(?P<s>s|sec|second)|(?P<min>m|min|minute)|(?P<h>h|hr|hour)|(?P<d>d|day))s?\.?",
    re.IGNORECASE,
)
MAX_NAME = 63  # characters of a sweep's name
_NAME = re.compile(rf"(?=.{{1,{MAX_NAME}}}\Z)[a-z0-9]([a-z0-9._-]*[a-z0-9])?")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def key(takes: str, means: str) -> Any:
    """The words of a key, for `Annotated`: what it takes, and what it means. `sweep schema` and the documents show them."""
    return Field(description=means, json_schema_extra={"takes": takes})


def as_list(value: Any) -> Any:
    """One value may stand without its list. Far too long a list is refused before its values are looked at."""
    if not isinstance(value, (list, tuple)):
        return [value]
    if len(value) > MAX_VALUES:
        raise ValueError(f"{len(value):,} values; at most {MAX_VALUES:,}")
    return value


def few(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and len(value) > MAX_FEW:
        raise ValueError(f"{len(value):,} values; at most {MAX_FEW}")
    return value


def _tokens(value: Any) -> Any:
    """`4M` is 4 * 2**20, as the field counts tokens of a batch: 4M tokens at sequence length 4096 are 1,024 sequences exactly."""
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
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|min|m|h|d)", value)
    if match is None:
        meant = _SPELT_OUT.fullmatch(value.strip())
        hint = f"; did you mean {meant[1]}{meant.lastgroup}?" if meant is not None else ""
        raise ValueError(f"{value!r} is no duration; write seconds, or 90s, 5min, 2h, 1d{hint}")
    return float(match[1]) * _DURATIONS[match[2]]


def _name(value: str) -> str:
    if not _NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"name {value[:80]!r} is not 1 to 63 of a-z 0-9 . _ -, with a letter or digit at both ends and no '..': it names files and rows"
        )
    return value


def _distinct(values: Any) -> Any:
    if isinstance(values, tuple) and len(set(values)) != len(values):
        twice = [value for i, value in enumerate(values) if value in values[:i]]
        raise ValueError(f"{twice[0]} stands twice in the list")
    return values


def _recompute(value: Any) -> Any:
    if value is False or value is None:
        return Recompute()
    if isinstance(value, Recompute):
        return value
    if not isinstance(value, str):
        raise ValueError(
            f"{value!r} is no recompute; write none, selective or full, each but none with an optional :LAYERS (full:8)"
        )
    try:
        return Recompute.parse(value)
    except ValueError as exc:
        close = get_close_matches(
            value,
            ("none", "full", "selective", "selective_ops", "selective_attention", "auto"),
            n=1,
        )
        raise ValueError(f"{exc}; did you mean {close[0]}?" if close else str(exc)) from None


def _auto(value: Any) -> str:
    return "auto" if value == "auto" else "values"


Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
Name = Annotated[
    str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]
Duration = Annotated[
    Annotated[float, Field(strict=True, gt=0, le=1e8)],
    BeforeValidator(_duration),
    WithJsonSchema({"type": ["number", "string"], "description": "seconds, or 90s, 5min, 2h"}),
]
Tokens = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=1 << 40)],
    BeforeValidator(_tokens),
    WithJsonSchema({"type": ["integer", "string"], "description": "a number, or 4M = 4 * 2**20"}),
]
Length = Annotated[
    Count,
    BeforeValidator(_tokens),
    WithJsonSchema({"type": ["integer", "string"], "description": "a number, or 8K = 8192"}),
]
RecomputeChoice = Annotated[
    Recompute,
    BeforeValidator(_recompute),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {"type": "string", "pattern": r"^(none|full(:\d+)?|selective(_ops|_attention)?(:\d+)?)$"}
    ),
]


class OneWithoutItsList:
    """Says in the JSON schema what `as_list` does."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


_T = TypeVar("_T")
Some = Annotated[
    tuple[_T, ...],
    BeforeValidator(as_list),
    Field(min_length=1),
    AfterValidator(_distinct),
    OneWithoutItsList(),
]
# The tag keeps the word `auto` and the values apart, so that a mistake is told once, about what was meant.
OrAuto = Annotated[
    Annotated[_T, Tag("values")] | Annotated[Literal["auto"], Tag("auto")], Discriminator(_auto)
]


def _option_values(value: Any) -> Any:
    return few(as_list(value))


def few_options(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) > MAX_OPTIONS:
        raise ValueError(f"{len(value):,} options; at most {MAX_OPTIONS}")
    return value


def _option_value(value: Any) -> Any:
    is_text = (
        isinstance(value, str)
        and len(value) <= MAX_OPTION_CHARACTERS
        and (value.isprintable() or not value)
    )
    if is_text or (isinstance(value, int) and abs(value) <= MAX_OPTION_NUMBER):
        return value
    raise ValueError(
        f"{str(value)[:80]!r} is no value of an option; expected a word on one line, a whole number, true or false"
    )


def _option_name(value: str) -> str:
    if not _OPTION_NAME.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no name of an option: 1 to 63 letters, digits and _, a letter or _ first"
        )
    return value


MAX_OPTION_CHARACTERS, MAX_OPTION_NUMBER = 100, 10**15
_OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
OptionName = Annotated[str, AfterValidator(_option_name)]
OptionChoice = Annotated[
    str | int | bool,
    PlainValidator(_option_value),
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("string", "integer", "boolean")]}),
]
OptionValues = Annotated[
    tuple[OptionChoice, ...],
    BeforeValidator(_option_values),
    Field(min_length=1),
    AfterValidator(_distinct),
    OneWithoutItsList(),
]
