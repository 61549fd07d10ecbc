"""A layout as a person names it: its key, its short form in tables, or a few fields, `dp=2 mbs=4`.

Missing fields come from the best predicted layout of the cell that has the given ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import (
    SHORT_NAMES,
    SIZES,
    Layout,
    OptionValue,
    Precision,
    Recompute,
    parse_key,
)
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.search.planner import Candidates
from orchestrator.core.sweepfile.suggestion import did_you_mean

Axes = Mapping[str, Sequence[OptionValue]]
# Fields of a layout by name; the options that vary are a mapping under `options`.
Fields = Mapping[str, Any]

_ALIASES = {**SHORT_NAMES, "z": "zero_stage", "zero": "zero_stage"}
_PART = re.compile(rf"({'|'.join([*SHORT_NAMES, 'z'])})(\d+)")
# The fields that are words.
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "precision": Precision,
    "pipeline_schedule": PipelineSchedule.parse,
    "recompute": Recompute.parse,
}
_EXAMPLES: Mapping[str, Sequence[str]] = {
    "precision": tuple(Precision),
    "pipeline_schedule": ("gpipe", "1f1b", "interleaved:2"),
    "recompute": ("none", "full", "selective_ops", "selective_attention"),
}


def is_field(word: str, options: Collection[str]) -> bool:
    """True if `NAME=VALUE` is a field of a layout, not a key of the sweep file."""
    name = word.partition("=")[0]
    return name in (*_ALIASES, *SIZES, *_PARSERS, *options)


def parse_wish(words: Sequence[str], *, options: Axes, keys: Collection[str] = ()) -> Fields:
    """Return the fields in the words.

    `options` are the workload's options that vary, with their values; a mistyped key is corrected
    from `keys`. Raises UsageInvalid with a suggestion.
    """
    found = _merged(_fields_of(word, options, keys) for word in " ".join(words).split())
    if not found:
        raise UsageInvalid(
            "no layout is named; give a key as `sweep plan` and `sweep trials` print it,"
            " or fields: dp=2 mbs=4 recompute=full"
        )
    return found


def parse_assignments(assignments: Iterable[tuple[str, str]], *, options: Axes) -> Fields:
    """Return the fields of names with values, which may have spaces. Raises UsageInvalid."""
    return _merged(_of_assignment(name, text, options) for name, text in assignments)


def complete(wish: Fields, candidates: Candidates, cell: Cell) -> Layout:
    """Return the best predicted legal layout that has the fields; if none has, build one."""
    for row in candidates.order:
        layout = candidates.table.layout(int(row))
        if _has(layout, wish):
            return layout
    return filled(wish, first(candidates), cell)


def first(candidates: Candidates) -> Layout:
    """Return the layout predicted to be the best; without a legal one, the plainest of all."""
    return candidates.table.layout(int(candidates.order[0])) if len(candidates) else Layout()


def filled(wish: Fields, like: Layout, cell: Cell) -> Layout:
    """Return the layout with the fields, whose missing ones are those of another.

    The numbers of replicas and of micro-batches follow from the fields where they can.
    """
    values = {name: getattr(like, name) for name in (*SIZES, *_PARSERS)} | {
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


def _merged(parts: Iterable[Fields]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name == "options":
                found.setdefault("options", {}).update(value)
            elif found.setdefault(name, value) != value:
                raise UsageInvalid(
                    f"layout: {name} is both {found[name]} and {value}; give it once"
                )
    return found


def _has(layout: Layout, wish: Fields) -> bool:
    options = wish.get("options", {}).items()
    fields = ((name, value) for name, value in wish.items() if name != "options")
    return options <= dict(layout.options).items() and all(
        getattr(layout, name) == value for name, value in fields
    )


def _fields_of(word: str, options: Axes, keys: Collection[str]) -> Fields:
    """Return the fields in one word."""
    if word.startswith("dp") and "_" in word:
        return _of_key(word, options, keys)
    if "=" in word:
        name, _, text = word.partition("=")
        return _of_assignment(name, text, options)
    part = _PART.fullmatch(word)
    if part is not None:
        return {_ALIASES[part[1]]: _size(part[1], part[2])}
    for field, parse in _PARSERS.items():
        try:
            return {field: parse(word)}
        except ValueError:
            pass
    hint = did_you_mean(word, [*keys, *(each for words in _EXAMPLES.values() for each in words)])
    raise UsageInvalid(
        f"{word!r} is no part of a layout{hint};"
        " write a key (dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16), its short form"
        " (dp8 mbs2 full bf16), or fields: dp=8 mbs=2 recompute=full"
    )


def _of_key(word: str, options: Axes, keys: Collection[str]) -> Fields:
    try:
        layout = parse_key(word)
    except ValueError as exc:
        raise UsageInvalid(f"layout {word!r}: {exc}{did_you_mean(word, keys)}") from None
    named = {name: getattr(layout, name) for name in (*SIZES, *_PARSERS)}
    found = {
        name: _option(name, option_text(value), options.get(name, ()))
        for name, value in layout.options
    }
    return named | ({"options": found} if found else {})


def _of_assignment(name: str, text: str, options: Axes) -> Fields:
    """Read `dp` with `2`, `recompute` with `full:8` or `attention` with `eager`."""
    field = _ALIASES.get(name, name)
    if field in SIZES:
        return {field: _size(name, text)}
    if field in options:
        return {"options": {field: _option(field, text, options[field])}}
    if field not in _PARSERS:
        names = [*SHORT_NAMES, *SIZES, *_PARSERS, "z", *options]
        raise UsageInvalid(
            f"{name!r} is no field of a layout{did_you_mean(name, names)};"
            f" fields: {', '.join(names)}"
        )
    try:
        return {field: _PARSERS[field](text)}
    except ValueError as exc:
        hint = did_you_mean(text, _EXAMPLES[field])
        raise UsageInvalid(f"{field}={text}: {exc}{hint}") from None


def _option(name: str, text: str, values: Sequence[OptionValue]) -> OptionValue:
    """Return the value of an axis that a text means. Other values are refused."""
    by_text = {option_text(value): value for value in values}
    if text not in by_text:
        rule = "it is no axis of this sweep (axes.options)"
        if by_text:
            rule = f"expected one of {', '.join(by_text)}"
        raise UsageInvalid(f"{name}={text}: {rule}{did_you_mean(text, by_text)}")
    return by_text[text]


def option_text(value: OptionValue) -> str:
    """Return the value of an option as a person writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size(name: str, text: str) -> int:
    least = 0 if _ALIASES.get(name, name) == "zero_stage" else 1
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise UsageInvalid(f"{name}={text}: expected a whole number, at least {least}")
    return int(text)
