"""A rule over the axes in a sweep file, `tp <= 8`, checked over whole columns of layouts at once.

Arithmetic is exact at any size. Rows where a constraint divides by zero are reported separately.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from orchestrator.core.problem.arrays import Ints, Mask
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import SHORT_NAMES, SIZES, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_rules import virtual_stages
from orchestrator.core.sweepfile.constraint_language import (
    ARITHMETIC,
    COMPARISONS,
    MAX_CHARACTERS,
    NUMBERS,
    OF_MODEL,
    WORDS,
    Names,
    Varying,
    choices,
    compares_words,
    parse,
    words_compared,
)


@dataclass(frozen=True, kw_only=True)
class Words:
    """A column of words: one code per row, and the words that each code matches.

    `selective_ops` also matches `selective`.
    """

    codes: Ints
    meanings: tuple[frozenset[str], ...]

    def are(self, wanted: frozenset[str]) -> Mask:
        matches = [bool(meaning & wanted) for meaning in self.meanings]
        return np.array(matches, dtype=np.bool_)[self.codes]


Facts = Mapping[str, "Ints | int | Words"]


def facts_of(table: LayoutTable, *, cell: Cell, gpus_per_node: int) -> Facts:
    """Return the value of every name for each layout in the table."""
    layers = np.array(
        [recompute.layers_of(cell.model.num_layers) for recompute in table.recomputes],
        dtype=np.int64,
    )
    return {
        **{name: getattr(table, name) for name in (*SIZES, "world_size")},
        "recompute": Words(codes=table.recompute, meanings=tuple(map(_meaning, table.recomputes))),
        "recompute_layers": layers[table.recompute],
        "precision": Words(
            codes=table.precision,
            meanings=tuple(frozenset({str(precision)}) for precision in table.precisions),
        ),
        "pipeline_schedule": Words(
            codes=table.pipeline_schedule,
            meanings=tuple(frozenset({str(s.kind)}) for s in table.pipeline_schedules),
        ),
        "virtual_stages": virtual_stages(table),
        **{name: getattr(cell.model, name) for name in OF_MODEL},
        "num_gpus": cell.num_gpus,
        "num_nodes": -(-cell.num_gpus // gpus_per_node),
        "gpus_per_node": gpus_per_node,
        "sequence_length": cell.sequence_length,
        "global_batch_size": cell.global_batch_size,
        **{name: _option_column(table, name) for name in table.option_names},
    }


def _option_column(table: LayoutTable, name: str) -> Ints | Words:
    values = [dict(options)[name] for options in table.option_sets]
    if any(isinstance(value, str) for value in values):
        return Words(
            codes=table.options, meanings=tuple(frozenset({str(value)}) for value in values)
        )
    return np.array(values, dtype=np.int64)[table.options]


def _meaning(recompute: Recompute) -> frozenset[str]:
    policy = f"_{recompute.policy}" if recompute.policy else ""
    return frozenset({str(recompute.mode), f"{recompute.mode}{policy}"})


@dataclass(frozen=True, slots=True)
class Constraint:
    """A legal layout meets `require`; otherwise people are shown `because`."""

    require: str
    because: str | None = None
    varying: Varying = ()  # the sweep's `axes.options`

    def __post_init__(self) -> None:
        parse(self.require, self.varying)

    @property
    def reason(self) -> str:
        """Why a row that breaks it is rejected."""
        return self.because or f"constraint: {' '.join(self.require.split())}"

    @property
    def divides(self) -> bool:
        """True if a row may divide by zero."""
        nodes = ast.walk(parse(self.require, self.varying))
        return any(isinstance(node, (ast.FloorDiv, ast.Mod)) for node in nodes)

    @property
    def undefined_reason(self) -> str:
        return f"constraint divides by zero: {' '.join(self.require.split())}"

    def check(self, facts: Facts, num_rows: int) -> tuple[Mask, Mask]:
        """Return two masks: rows that meet the constraint, and rows where it divides by zero."""
        outcome = _evaluate(parse(self.require, self.varying), facts, Names(self.varying))
        holds, undefined = (
            np.broadcast_to(np.asarray(mask, dtype=np.bool_), (num_rows,))
            for mask in (outcome.value, outcome.undefined)
        )
        return holds & ~undefined, undefined

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        serialize = core_schema.plain_serializer_function_ser_schema(_as_data)
        return core_schema.no_info_plain_validator_function(_from_data, serialization=serialize)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        text = {
            "type": "string",
            "maxLength": MAX_CHARACTERS,
            "examples": ["tp <= gpus_per_node", "not pp > 1 or ga >= pp"],
        }
        properties = {
            "require": {**text, "description": "The condition that a legal layout meets"},
            "because": {
                "type": "string",
                "maxLength": 200,
                "description": "The reason that people are shown for layouts that are rejected",
            },
        }
        mapping = {
            "type": "object",
            "properties": properties,
            "required": ["require"],
            "additionalProperties": False,
        }
        return {
            "anyOf": [text, mapping],
            "description": f"names: {', '.join([*WORDS, *NUMBERS, *SHORT_NAMES])}",
        }


@dataclass(frozen=True, slots=True)
class UnparsedConstraint:
    """A constraint of the file before it is parsed, with the options that it may name."""

    data: Any
    varying: Varying


def _from_data(value: Any) -> Constraint:
    varying: Varying = ()
    if isinstance(value, UnparsedConstraint):
        value, varying = value.data, value.varying
    if isinstance(value, Constraint):
        return Constraint(value.require, value.because, varying)
    if isinstance(value, str):
        return Constraint(value, None, varying)
    is_mapping = isinstance(value, Mapping) and not set(value) - {"require", "because"}
    if not is_mapping or not isinstance(value.get("require"), str):
        raise ValueError(
            f"{value!r} is no constraint; write an expression, 'tp <= 8',"
            " or {require: 'tp <= 8', because: 'one node has 8'}"
        )
    because = value.get("because")
    if because is not None and not (
        isinstance(because, str) and 0 < len(because) <= 200 and because.isprintable()
    ):
        raise ValueError(f"because {because!r} is not one line of at most 200 characters")
    return Constraint(value["require"], because, varying)


def _as_data(value: Constraint) -> Any:
    if value.because is None:
        return value.require
    return {"require": value.require, "because": value.because}


# --- evaluation over columns ---


@dataclass(frozen=True, slots=True)
class _Truth:
    value: Any  # a column, or one value
    undefined: Any  # rows that divide by zero
    bound: int = 1  # largest |value|, for overflow of int64


def _evaluate(node: ast.expr, facts: Facts, names: Names) -> _Truth:
    match node:
        case ast.Constant(value=int() as value):
            return _Truth(value, False, abs(value))
        case ast.Name(id=name):
            column = facts[SHORT_NAMES.get(name, name)]
            assert not isinstance(column, Words)  # the parser has checked it
            if name in names.conditions:
                return _Truth(np.asarray(column, dtype=np.bool_), False)
            return _Truth(column, False, int(np.max(np.abs(column), initial=0)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _evaluate(operand, facts, names)
            return _Truth(np.logical_not(inner.value), inner.undefined)
        case ast.UnaryOp(operand=operand):
            inner = _evaluate(operand, facts, names)
            return _Truth(-inner.value, inner.undefined, inner.bound)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, facts, names), _evaluate(right, facts, names)
            return _calculate(type(op), a, b)
        case ast.BoolOp(op=op, values=values):
            parts = [_evaluate(value, facts, names) for value in values]
            return _logic(parts, every=isinstance(op, ast.And))
        case ast.Compare():
            return _compare(node, facts, names)
    raise AssertionError(f"unchecked syntax {ast.dump(node)}")


def _calculate(op: type[ast.AST], left: _Truth, right: _Truth) -> _Truth:
    undefined = np.logical_or(left.undefined, right.undefined)
    a, b = left.value, right.value
    if op is ast.Mult:
        bound = left.bound * right.bound
    elif op in (ast.FloorDiv, ast.Mod):
        bound = max(left.bound, right.bound)
        zero = np.asarray(b == 0, dtype=np.bool_)
        undefined = np.logical_or(undefined, zero)
        b = np.where(zero, 1, b)
    else:
        bound = left.bound + right.bound
    if bound >= 1 << 63:  # Python's integers: exact, only slower
        a, b = (np.asarray(value).astype(object) for value in (a, b))
    return _Truth(ARITHMETIC[op](a, b), undefined, bound)


def _logic(parts: Sequence[_Truth], *, every: bool) -> _Truth:
    """Evaluate `and` / `or` from left to right; a row that is decided ignores what follows.

    So `pp == 1 or 8 // (pp - 1) > 2` divides by zero in no row.
    """
    value, undefined = parts[0].value, parts[0].undefined
    for part in parts[1:]:
        open_rows = value if every else np.logical_not(value)
        undefined = np.logical_or(undefined, np.logical_and(open_rows, part.undefined))
        value = np.logical_and(value, part.value) if every else np.logical_or(value, part.value)
    return _Truth(value, undefined)


def _compare(node: ast.Compare, facts: Facts, names: Names) -> _Truth:
    if compares_words(node, names):
        name, words, wanted = words_compared(node, names)
        column = facts[name]
        assert isinstance(column, Words)
        return _Truth(column.are(words) == wanted, False)
    links, left = [], _evaluate(node.left, facts, names)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, (ast.In, ast.NotIn)):
            values = [_evaluate(choice, facts, names) for choice in choices(right_node)]
            inside = _logic([_holds(ast.Eq, left, value) for value in values], every=False)
            wanted = inside.value if isinstance(op, ast.In) else np.logical_not(inside.value)
            links.append(_Truth(wanted, inside.undefined))
        else:
            right = _evaluate(right_node, facts, names)
            links.append(_holds(type(op), left, right))
            left = right
    return _logic(links, every=True)


def _holds(op: type[ast.AST], left: _Truth, right: _Truth) -> _Truth:
    return _Truth(
        np.asarray(COMPARISONS[op](left.value, right.value), dtype=np.bool_),
        np.logical_or(left.undefined, right.undefined),
    )
