"""A rule of the sweep file over the axes, `tp <= 8 or recompute == 'full'`: parsed against a whitelist, checked over whole columns at once.

Nothing of it is ever executed as Python. Arithmetic is exact whatever the sizes, and a row where it divides by zero is said to be so.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import (
    SHORT_NAMES,
    OptionValue,
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.layout_table import Ints, LayoutTable, Mask

MAX_CHARACTERS = 500
MAX_DEPTH = 40
MAX_NUMBER = 1 << 40
MAX_CHOICES = 256

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "recompute": (
            *RecomputeMode,
            *(f"{RecomputeMode.SELECTIVE}_{policy}" for policy in SelectivePolicy),
        ),
        "precision": tuple(Precision),
    }
)
_OF_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
_OF_CELL = ("num_gpus", "num_nodes", "gpus_per_node", "sequence_length", "global_batch_size")
NUMBERS = (
    *SHORT_NAMES.values(),
    "zero_stage",
    "recompute_layers",
    "world_size",
    *_OF_MODEL,
    *_OF_CELL,
)
Varying = tuple[
    tuple[str, tuple[OptionValue, ...]], ...
]  # options of the workload that are axes, with their values, which are of one kind


@dataclass(frozen=True)
class Names:
    """What a constraint may name: what every sweep has, and the options that are axes in this one."""

    varying: Varying = ()

    @cached_property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        return {
            **WORDS,
            **{
                name: tuple(map(str, values))
                for name, values in self.varying
                if isinstance(values[0], str)
            },
        }

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        return (
            *NUMBERS,
            *(
                name
                for name, values in self.varying
                if isinstance(values[0], int) and not isinstance(values[0], bool)
            ),
        )

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        return tuple(name for name, values in self.varying if isinstance(values[0], bool))

    @property
    def all(self) -> list[str]:
        return [*self.numbers, *SHORT_NAMES, *self.words, *self.conditions]


@dataclass(frozen=True, kw_only=True)
class Words:
    """A column of words: one code per row, and for each code the words that it answers to (`selective_ops` is also `selective`)."""

    codes: Ints
    meanings: tuple[frozenset[str], ...]

    def are(self, wanted: frozenset[str]) -> Mask:
        return np.array([bool(meaning & wanted) for meaning in self.meanings], dtype=np.bool_)[
            self.codes
        ]


Facts = Mapping[str, "Ints | int | Words"]


def facts_of(table: LayoutTable, *, cell: Cell, gpus_per_node: int) -> Facts:
    """What constraints may ask about each row of a table of a cell's layouts."""
    layers = np.array(
        [recompute.layers_of(cell.model.num_layers) for recompute in table.recomputes],
        dtype=np.int64,
    )
    return {
        **{
            name: getattr(table, name)
            for name in (*SHORT_NAMES.values(), "zero_stage", "world_size")
        },
        "recompute": Words(codes=table.recompute, meanings=tuple(map(_meaning, table.recomputes))),
        "recompute_layers": layers[table.recompute],
        "precision": Words(
            codes=table.precision,
            meanings=tuple(frozenset({str(precision)}) for precision in table.precisions),
        ),
        **{name: getattr(cell.model, name) for name in _OF_MODEL},
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
    return frozenset(
        {
            str(recompute.mode),
            f"{recompute.mode}_{recompute.policy}" if recompute.policy else str(recompute.mode),
        }
    )


@dataclass(frozen=True, slots=True)
class Constraint:
    """`require` must hold for a layout to be legal; `because` is what people are told when it does not."""

    require: str
    because: str | None = None
    varying: Varying = ()  # what the sweep's `axes.options` let it name besides

    def __post_init__(self) -> None:
        _parse(self.require, self.varying)

    def knowing(self, varying: Varying) -> Constraint:
        """The same where these options are axes."""
        return Constraint(self.require, self.because, varying)

    @property
    def reason(self) -> str:
        """Why a row that breaks it is rejected."""
        return self.because or f"constraint: {' '.join(self.require.split())}"

    @property
    def divides(self) -> bool:
        """Whether a row can be undefined at all."""
        return any(
            isinstance(node, (ast.FloorDiv, ast.Mod))
            for node in ast.walk(_parse(self.require, self.varying))
        )

    @property
    def undefined_reason(self) -> str:
        return f"constraint divides by zero: {' '.join(self.require.split())}"

    def check(self, facts: Facts, num_rows: int) -> tuple[Mask, Mask]:
        """Say for each row whether the constraint holds, and whether it is undefined there: a division by zero that nothing guards."""
        outcome = _evaluate(_parse(self.require, self.varying), facts, Names(self.varying))
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
        properties = {"require": text, "because": {"type": "string", "maxLength": 200}}
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
class Unread:
    """A constraint as it stands in the file, with the options that it may name: both are known only where the whole file is read."""

    data: Any
    varying: Varying


def _from_data(value: Any) -> Constraint:
    varying: Varying = ()
    if isinstance(value, Unread):
        value, varying = value.data, value.varying
    if isinstance(value, Constraint):
        return value.knowing(varying)
    if isinstance(value, str):
        return Constraint(value, None, varying)
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("require"), str)
        or set(value) - {"require", "because"}
    ):
        raise ValueError(
            f"{value!r} is no constraint; write an expression, 'tp <= 8', or {{require: 'tp <= 8', because: 'one node has 8'}}"
        )
    because = value.get("because")
    if because is not None and not (
        isinstance(because, str) and 0 < len(because) <= 200 and because.isprintable()
    ):
        raise ValueError(f"because {because!r} is not one line of at most 200 characters")
    return Constraint(value["require"], because, varying)


def _as_data(value: Constraint) -> Any:
    return (
        value.require
        if value.because is None
        else {"require": value.require, "because": value.because}
    )


# --- the language ---------------------------------------------------------------------------------------------------------------

_ARITHMETIC: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
_COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
)
_ALLOWED = (
    "allowed: names of the axes, whole numbers, + - * // %, comparisons, in (..), and, or, not"
)
_FOREIGN_SIGNS = (
    (r"&&", "and"),
    (r"\|\|", "or"),
    (r"!(?!=)", "not"),
    (r"(?<![<>=!])=(?!=)", "=="),
    (r"(?<!/)/(?!/)", "//"),
)


@lru_cache(maxsize=1024)
def _parse(text: str, varying: Varying = ()) -> ast.expr:
    """The checked syntax tree. Raises ValueError that names the text, the rule and the fix."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"constraint of {len(text)} characters; at most {MAX_CHARACTERS}: write several, all of them must hold"
        )
    if not text.strip():
        raise ValueError("constraint is empty; write an expression such as 'tp <= 8'")
    shown = f"constraint {text!r}"
    if strange := re.search(r"[^\w \t\n().,'\"<>=!+\-*/%&|^~\[\]{}:@]|[^\x00-\x7f]|;|\\", text):
        raise ValueError(f"{shown}: character {strange[0]!r} means nothing here; {_ALLOWED}")
    outside_quotes = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    for pattern, instead in _FOREIGN_SIGNS:
        if found := re.search(pattern, outside_quotes):
            raise ValueError(f"{shown}: write {instead!r} instead of {found[0]!r}")
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except SyntaxError as exc:
        raise ValueError(
            f"{shown}: not an expression: {exc.msg}{f', at character {exc.offset}' if exc.offset else ''}"
        ) from None
    except (ValueError, MemoryError, RecursionError):
        raise ValueError(f"{shown}: not an expression that can be read; {_ALLOWED}") from None
    try:
        _check_depth(tree)
        if _kind(tree, Names(varying)) != "condition":
            raise ValueError("is a value, not a condition; compare it, as in 'tp > 1'")
    except ValueError as exc:
        raise ValueError(f"{shown}: {exc}") from None
    return tree


def _check_depth(tree: ast.expr) -> None:
    level: Sequence[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.expr)
        ]
        if not level:
            return
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _kind(node: ast.expr, names: Names) -> str:
    """What a node yields: `condition`, `number` or `words`. Raises ValueError for all that the language lacks."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _want("condition", value, names)
            return "condition"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _want("condition", operand, names)
            return "condition"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _want("number", operand, names)
            return "number"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _want("number", left, names)
            _want("number", right, names)
            return "number"
        case ast.Compare():
            _check_comparison(node, names)
            return "condition"
        case ast.Constant(value=bool()):
            raise ValueError(f"{node.value!r} is no number here; write the comparison itself")
        case ast.Constant(value=int() as value):
            if value > MAX_NUMBER:
                raise ValueError(f"{value} is larger than {MAX_NUMBER}")
            return "number"
        case ast.Name(id=name):
            return _kind_of_name(name, names)
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; {_ALLOWED}")


def _want(kind: str, node: ast.expr, names: Names) -> None:
    found = _kind(node, names)
    if found == kind:
        return
    shown = ast.unparse(node)
    if found == "words":
        raise ValueError(
            f"{shown} is a word; compare it: {shown} == {str(names.words[shown][0])!r}"
        )
    raise ValueError(
        f"{shown!r} is a {found}, not a {kind}"
        + ("; compare it, as in 'tp > 1'" if kind == "condition" else "")
    )


def _kind_of_name(name: str, names: Names) -> str:
    if name in names.words:
        return "words"
    if name in names.numbers or name in SHORT_NAMES:
        return "number"
    if name in names.conditions:
        return "condition"
    known = names.all
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    word = next((axis for axis, words in names.words.items() if name in words), None)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    raise ValueError(
        f"{name!r} is no axis; "
        + (f"a word stands in quotes: {word} == {name!r}" if word else hint)
    )


def _check_comparison(node: ast.Compare, names: Names) -> None:
    if _compares_words(node, names):
        _words_compared(node, names)
        return
    _want("number", node.left, names)
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, (ast.In, ast.NotIn)):
            for choice in _choices(right):
                _want("number", choice, names)
        elif type(op) in _COMPARISONS:
            _want("number", right, names)
        else:
            raise ValueError(f"{ast.unparse(node)!r}: compare with == != < <= > >= in, not in")


def _compares_words(node: ast.Compare, names: Names) -> bool:
    return any(
        isinstance(o, ast.Name) and o.id in names.words for o in (node.left, *node.comparators)
    )


def _choices(node: ast.expr) -> list[ast.expr]:
    if (
        not isinstance(node, (ast.Tuple, ast.List, ast.Set))
        or not 1 <= len(node.elts) <= MAX_CHOICES
    ):
        raise ValueError(
            f"after in stands a list of 1 to {MAX_CHOICES} values, (1, 2, 4), not {ast.unparse(node)!r}"
        )
    return node.elts


def _words_compared(node: ast.Compare, names: Names) -> tuple[str, frozenset[str], bool]:
    """The column, the words, and whether they are wanted (==, in) or not (!=, not in)."""
    name, op, other = node.left, node.ops[0], node.comparators[0]
    if isinstance(name, ast.Constant):
        name, other = other, name
    equality, membership = isinstance(op, (ast.Eq, ast.NotEq)), isinstance(op, (ast.In, ast.NotIn))
    if (
        len(node.ops) > 1
        or not isinstance(name, ast.Name)
        or not (equality or (membership and name is node.left))
    ):
        raise ValueError(
            f"{ast.unparse(node)!r}: compare a word with ==, !=, in or not in, as in recompute in ('none', 'full')"
        )
    words, allowed = [], names.words[name.id]
    for choice in _choices(other) if membership else [other]:
        if not isinstance(choice, ast.Constant) or not isinstance(choice.value, str):
            raise ValueError(
                f"{name.id} is compared with words in quotes, not with {ast.unparse(choice)}; allowed: {', '.join(allowed)}"
            )
        if choice.value not in allowed:
            close = get_close_matches(choice.value, allowed, n=1)
            layers = (
                "; the number of layers is recompute_layers"
                if name.id == "recompute" and re.search(r"[:.]\d", choice.value)
                else ""
            )
            hint = f"; did you mean {str(close[0])!r}?" if close and not layers else layers
            raise ValueError(
                f"{name.id} is never {choice.value!r}; allowed: {', '.join(allowed)}{hint}"
            )
        words.append(choice.value)
    return name.id, frozenset(words), isinstance(op, (ast.Eq, ast.In))


# --- evaluation over columns ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Truth:
    value: Any  # a column or one value for all rows
    undefined: Any  # rows where a division by zero was met
    bound: int = 1  # no |value| is larger: decides when int64 would overflow


def _evaluate(node: ast.expr, facts: Facts, names: Names) -> _Truth:
    match node:
        case ast.Constant(value=int() as value):
            return _Truth(value, False, abs(value))
        case ast.Name(id=name):
            column = facts[SHORT_NAMES.get(name, name)]
            assert not isinstance(column, Words)  # `_kind` lets words stand in comparisons only
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
            return _calculate(
                type(op), _evaluate(left, facts, names), _evaluate(right, facts, names)
            )
        case ast.BoolOp(op=op, values=values):
            return _logic(
                [_evaluate(value, facts, names) for value in values], every=isinstance(op, ast.And)
            )
        case ast.Compare():
            return _compare(node, facts, names)
    raise AssertionError(f"unchecked syntax {ast.dump(node)}")


def _calculate(op: type[ast.AST], left: _Truth, right: _Truth) -> _Truth:
    undefined = np.logical_or(left.undefined, right.undefined)
    divides = op in (ast.FloorDiv, ast.Mod)
    bound = (
        left.bound * right.bound
        if op is ast.Mult
        else max(left.bound, right.bound)
        if divides
        else left.bound + right.bound
    )
    a, b = left.value, right.value
    if bound >= 1 << 63:  # exact at any size, only slower
        a, b = (np.asarray(value).astype(object) for value in (a, b))
    if divides:
        zero = np.asarray(b == 0, dtype=np.bool_)
        undefined = np.logical_or(undefined, zero)
        b = np.where(zero, 1, b)
    return _Truth(_ARITHMETIC[op](a, b), undefined, bound)


def _logic(parts: Sequence[_Truth], *, every: bool) -> _Truth:
    """`and` / `or` from left to right: what stands behind a decided row is not asked, so `pp == 1 or 8 // (pp - 1) > 2` is defined."""
    value, undefined = parts[0].value, parts[0].undefined
    for part in parts[1:]:
        open_rows = value if every else np.logical_not(value)
        undefined = np.logical_or(undefined, np.logical_and(open_rows, part.undefined))
        value = np.logical_and(value, part.value) if every else np.logical_or(value, part.value)
    return _Truth(value, undefined)


def _compare(node: ast.Compare, facts: Facts, names: Names) -> _Truth:
    if _compares_words(node, names):
        name, words, wanted = _words_compared(node, names)
        column = facts[name]
        assert isinstance(column, Words)
        return _Truth(column.are(words) == wanted, False)
    links, left = [], _evaluate(node.left, facts, names)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, (ast.In, ast.NotIn)):
            equal = [
                _holds(ast.Eq, left, _evaluate(choice, facts, names))
                for choice in _choices(right_node)
            ]
            inside = _logic(equal, every=False)
            links.append(
                inside
                if isinstance(op, ast.In)
                else _Truth(np.logical_not(inside.value), inside.undefined)
            )
        else:
            right = _evaluate(right_node, facts, names)
            links.append(_holds(type(op), left, right))
            left = right
    return _logic(links, every=True)


def _holds(op: type[ast.AST], left: _Truth, right: _Truth) -> _Truth:
    return _Truth(
        np.asarray(_COMPARISONS[op](left.value, right.value), dtype=np.bool_),
        np.logical_or(left.undefined, right.undefined),
    )
