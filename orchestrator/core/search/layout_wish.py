"""A layout as a person names it: its key, the short form that tables print, or a few fields of it, `dp=2 mbs=4 recompute=full`.

What is left out is filled in from the layouts of the cell, the best predicted first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import (
    SHORT_NAMES,
    Layout,
    OptionValue,
    Precision,
    Recompute,
    parse_key,
)
from orchestrator.core.search.planner import Candidates

Axes = Mapping[str, Sequence[OptionValue]]
Fields = Mapping[
    str, Any
]  # of a layout, by name; the options that vary are a mapping under `options`

SIZES = (*SHORT_NAMES.values(), "zero_stage")
_ALIASES = {**SHORT_NAMES, "z": "zero_stage", "zero": "zero_stage"}
_PART = re.compile(rf"({'|'.join([*SHORT_NAMES, 'z'])})(\d+)")
_WORDS = ("recompute", "precision")


def is_field(word: str, options: Collection[str]) -> bool:
    """Whether `NAME=VALUE` says something of a layout, and not of the sweep file."""
    name = word.partition("=")[0]
    return name in (*_ALIASES, *SIZES, *_WORDS, *options)


def parse_wish(words: Sequence[str], *, options: Axes, keys: Collection[str] = ()) -> Fields:
    """The fields that the words name. `options` are the workload's that vary, with their values; `keys` are what a mistyped key may have meant.

    Raises UsageInvalid, with what was probably meant.
    """
    found: dict[str, Any] = {}
    for word in (part for said in words for part in said.split()):
        for name, value in _fields_of(word, options, keys).items():
            if name == "options":
                found.setdefault("options", {}).update(value)
            elif found.setdefault(name, value) != value:
                raise UsageInvalid(
                    f"layout: {name} is said to be both {found[name]} and {value}; give it once"
                )
    if not found:
        raise UsageInvalid(
            "no layout is named; give a key as `sweep plan` and `sweep trials` print it, or fields: dp=2 mbs=4 recompute=full"
        )
    return found


def complete(wish: Fields, candidates: Candidates, cell: Cell) -> Layout:
    """The layout that is meant: of the legal ones that have the fields, the best predicted; where none has, one made up around them."""
    for row in candidates.order:
        layout = candidates.table.layout(int(row))
        if _has(layout, wish):
            return layout
    like = candidates.table.layout(int(candidates.order[0])) if len(candidates) else Layout()
    values = {name: getattr(like, name) for name in (*SIZES, *_WORDS)} | {
        name: value for name, value in wish.items() if name != "options"
    }
    replica = (
        values["tensor_parallel_size"]
        * values["pipeline_parallel_size"]
        * values["context_parallel_size"]
    )
    if "data_parallel_size" not in wish and cell.num_gpus % replica == 0:
        values["data_parallel_size"] = cell.num_gpus // replica
    share, rest = divmod(
        cell.global_batch_size, values["data_parallel_size"] * values["micro_batch_size"]
    )
    if "grad_accum_steps" not in wish and not rest:
        values["grad_accum_steps"] = share
    options = {**dict(like.options), **wish.get("options", {})}
    return Layout(**values, options=tuple(sorted(options.items())))


def _has(layout: Layout, wish: Fields) -> bool:
    said = dict(layout.options)
    return all(
        all(said.get(option) == wanted for option, wanted in value.items())
        if name == "options"
        else getattr(layout, name) == value
        for name, value in wish.items()
    )


def _fields_of(word: str, options: Axes, keys: Collection[str]) -> Fields:
    """What one word says."""
    if "=" in word and not word.startswith("dp"):
        return _said(word, options)
    if word.startswith("dp") and "_" in word:
        return _of_key(word, options, keys)
    if "=" in word:
        return _said(word, options)
    part = _PART.fullmatch(word)
    if part is not None:
        return {_ALIASES[part[1]]: _size(part[1], part[2])}
    if word in tuple(Precision):
        return {"precision": Precision(word)}
    try:
        return {"recompute": Recompute.parse(word)}
    except ValueError:
        close = get_close_matches(
            word, [*keys, *Precision, "none", "full", "selective_ops", "selective_attention"], n=1
        )
        raise UsageInvalid(
            f"{word!r} is no part of a layout{_meant(close)}; write a key (dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16), its short form"
            " (dp8 mbs2 full bf16), or fields: dp=8 mbs=2 recompute=full"
        ) from None


def _of_key(word: str, options: Axes, keys: Collection[str]) -> Fields:
    try:
        layout = parse_key(word)
    except ValueError as exc:
        raise UsageInvalid(
            f"layout {word!r}: {exc}{_meant(get_close_matches(word, keys, n=1))}"
        ) from None
    named = {name: getattr(layout, name) for name in (*SIZES, *_WORDS)}
    said = {
        name: _option(name, _option_text(value), options.get(name, ()))
        for name, value in layout.options
    }
    return named | ({"options": said} if said else {})


def _said(word: str, options: Axes) -> Fields:
    """`dp=2`, `recompute=full:8`, `attention=eager`."""
    name, _, text = word.partition("=")
    field = _ALIASES.get(name, name)
    if field in SIZES:
        return {field: _size(name, text)}
    if field in options:
        return {"options": {field: _option(field, text, options[field])}}
    if field not in _WORDS:
        names = [*SHORT_NAMES, *SIZES, *_WORDS, "z", *options]
        raise UsageInvalid(
            f"{name!r} is no field of a layout{_meant(get_close_matches(name, names, n=1))}; fields: {', '.join(names)}"
        )
    try:
        return (
            {"recompute": Recompute.parse(text)}
            if field == "recompute"
            else {"precision": Precision(text)}
        )
    except ValueError as exc:
        close = get_close_matches(
            text,
            [*Precision]
            if field == "precision"
            else ["none", "full", "selective_ops", "selective_attention"],
            n=1,
        )
        raise UsageInvalid(f"{field}={text}: {exc}{_meant(close)}") from None


def _option(name: str, text: str, values: Sequence[OptionValue]) -> OptionValue:
    """The value of an axis that a text means: what a trainer would make of any other is not known."""
    by_text = {_option_text(value): value for value in values}
    if text not in by_text:
        known = (
            f"expected one of {', '.join(by_text)}"
            if by_text
            else "it is no axis of this sweep (axes.options)"
        )
        raise UsageInvalid(f"{name}={text}: {known}{_meant(get_close_matches(text, by_text, n=1))}")
    return by_text[text]


def _option_text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size(name: str, text: str) -> int:
    least = 0 if _ALIASES.get(name, name) == "zero_stage" else 1
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise UsageInvalid(f"{name}={text}: expected a whole number, at least {least}")
    return int(text)


def _meant(close: Sequence[str]) -> str:
    return f"; did you mean {close[0]}?" if close else ""
