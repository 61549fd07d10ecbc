"""The language of constraints, `tp <= 8 or recompute == 'full'`: its names, and what it allows.

A constraint is parsed against a whitelist; nothing of it is ever executed as Python.
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

from orchestrator.core.problem.layout import (
    SHORT_NAMES,
    SIZES,
    OptionValue,
    Precision,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.pipeline_schedule import ScheduleKind
from orchestrator.core.sweepfile.suggestion import did_you_mean

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
        "pipeline_schedule": tuple(ScheduleKind),
    }
)
OF_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
_OF_CELL = ("num_gpus", "num_nodes", "gpus_per_node", "sequence_length", "global_batch_size")
NUMBERS = (
    *SIZES,
    "recompute_layers",
    "virtual_stages",
    "world_size",
    *OF_MODEL,
    *_OF_CELL,
)
# Options of the workload that are axes, with their values, which are of one kind.
Varying = tuple[tuple[str, tuple[OptionValue, ...]], ...]


@dataclass(frozen=True)
class Names:
    """The names that a constraint may use: those of every sweep, and the options that are axes."""

    varying: Varying = ()

    @cached_property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        """Each name whose values are words, with the words."""
        texts = {name: values for name, values in self.varying if isinstance(values[0], str)}
        return {**WORDS, **{name: tuple(map(str, values)) for name, values in texts.items()}}

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        return tuple(name for name, values in self.varying if isinstance(values[0], bool))

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        other = (*self.words, *self.conditions)
        return (*NUMBERS, *(name for name, _ in self.varying if name not in other))

    @property
    def all(self) -> list[str]:
        return [*self.numbers, *SHORT_NAMES, *self.words, *self.conditions]


ARITHMETIC: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
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
def parse(text: str, varying: Varying = ()) -> ast.expr:
    """Return the checked syntax tree. Raises ValueError with the text, the rule and the fix."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"constraint of {len(text)} characters; at most {MAX_CHARACTERS}:"
            " write several, all of them must hold"
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
        place = f", at character {exc.offset}" if exc.offset else ""
        raise ValueError(f"{shown}: not an expression: {exc.msg}{place}") from None
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
    """Return what a node yields: `condition`, `number` or `words`.

    Raises ValueError for anything that the language lacks.
    """
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
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
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
    if word := next((axis for axis, words in names.words.items() if name in words), None):
        raise ValueError(f"{name!r} is no axis; put a word in quotes: {word} == {name!r}")
    hint = did_you_mean(name, names.all) or f"; known: {', '.join(names.all)}"
    raise ValueError(f"{name!r} is no axis{hint}")


def _check_comparison(node: ast.Compare, names: Names) -> None:
    if compares_words(node, names):
        words_compared(node, names)
        return
    _want("number", node.left, names)
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, (ast.In, ast.NotIn)):
            for choice in choices(right):
                _want("number", choice, names)
        elif type(op) in COMPARISONS:
            _want("number", right, names)
        else:
            raise ValueError(f"{ast.unparse(node)!r}: compare with == != < <= > >= in, not in")


def compares_words(node: ast.Compare, names: Names) -> bool:
    return any(
        isinstance(o, ast.Name) and o.id in names.words for o in (node.left, *node.comparators)
    )


def choices(node: ast.expr) -> list[ast.expr]:
    """Return the values in the list after `in`."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)) and 1 <= len(node.elts) <= MAX_CHOICES:
        return node.elts
    raise ValueError(
        f"after in comes a list of 1 to {MAX_CHOICES} values, (1, 2, 4), not {ast.unparse(node)!r}"
    )


def words_compared(node: ast.Compare, names: Names) -> tuple[str, frozenset[str], bool]:
    """Return the name, the words, and True for == and in, False for != and not in."""
    name, op, other = node.left, node.ops[0], node.comparators[0]
    if isinstance(name, ast.Constant):
        name, other = other, name
    equality, membership = isinstance(op, (ast.Eq, ast.NotEq)), isinstance(op, (ast.In, ast.NotIn))
    possible = equality or (membership and name is node.left)
    if len(node.ops) > 1 or not isinstance(name, ast.Name) or not possible:
        raise ValueError(
            f"{ast.unparse(node)!r}: compare a word with ==, !=, in or not in,"
            " as in recompute in ('none', 'full')"
        )
    words, allowed = [], names.words[name.id]
    for choice in choices(other) if membership else [other]:
        if not isinstance(choice, ast.Constant) or not isinstance(choice.value, str):
            raise ValueError(
                f"{name.id} is compared with words in quotes, not with {ast.unparse(choice)};"
                f" allowed: {', '.join(allowed)}"
            )
        if choice.value not in allowed:
            raise ValueError(
                f"{name.id} is never {choice.value!r}; allowed: {', '.join(allowed)}"
                f"{_meant(name.id, choice.value, allowed)}"
            )
        words.append(choice.value)
    return name.id, frozenset(words), isinstance(op, (ast.Eq, ast.In))


def _meant(name: str, word: str, allowed: Sequence[str]) -> str:
    if name == "recompute" and re.search(r"[:.]\d", word):
        return "; the number of layers is recompute_layers"
    close = get_close_matches(word, allowed, n=1)
    return f"; did you mean {str(close[0])!r}?" if close else ""
