"""One change of an operator, a comparison or a constant in a file, and all that a file allows."""

from __future__ import annotations

import ast
import difflib
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise

# Keyword arguments that declare, or only check what cannot happen.
_SWITCHES = frozenset(
    {"frozen", "kw_only", "slots", "eq", "compare", "repr", "strict", "maxsize", "stacklevel"}
)
_BINARY: Mapping[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
_COMPARED: Mapping[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change of a file: characters from `start` to `end` become `new`."""

    path: str
    line: int
    start: int
    end: int
    new: str
    # The outermost function around it, with its class; None: it acts when the module is imported.
    function: str | None

    def diff(self, source: str) -> str:
        """The changed lines, before and after."""
        lines = difflib.unified_diff(
            source.splitlines(), self.applied(source).splitlines(), n=0, lineterm=""
        )
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def applied(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a module."""
    return list(_Finder(path=path, source=source).mutants())


class _Finder:
    """Walks a module and yields its mutants."""

    def __init__(self, *, path: str, source: str) -> None:
        self._path, self._tree = path, ast.parse(source)
        lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._lines = lines
        self._tokens = [
            (self._starts[token.start[0] - 1] + token.start[1], token.string)
            for token in tokenize.generate_tokens(StringIO(source).readline)
        ]

    def mutants(self) -> Iterator[Mutant]:
        yield from self._below(self._tree, None, ())

    def _below(
        self, node: ast.AST, function: str | None, classes: tuple[str, ...]
    ) -> Iterator[Mutant]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._at(child, function, classes)

    def _at(
        self, node: ast.AST, function: str | None, classes: tuple[str, ...]
    ) -> Iterator[Mutant]:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.keyword(arg=name) if name in _SWITCHES:
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                rest = ast.Module(body=node.orelse, type_ignores=[])
                yield from self._below(rest, function, classes)
                return
            case ast.FunctionDef(name=name):
                yield from self._below(node, function or ".".join([*classes, name]), classes)
                return
            case ast.Lambda():
                yield from self._below(node, function or ".".join([*classes, "<lambda>"]), classes)
                return
            case ast.ClassDef(name=name) if function is None:
                yield from self._below(node, None, (*classes, name))
                return
            case ast.Assign(value=ast.BinOp(op=ast.BitOr())) if function is None:
                return  # an alias of types
            case ast.BinOp(op=op) if type(op) in _BINARY and not _is_text(node):
                sign, others = _BINARY[type(op)]
                yield from self._operator(node.left, node.right, sign, others, function)
            case ast.AugAssign(op=op) if type(op) in _BINARY:
                sign, others = _BINARY[type(op)]
                yield from self._operator(
                    node.target, node.value, f"{sign}=", [f"{o}=" for o in others], function
                )
            case ast.BoolOp(values=values, op=op):
                sign, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for left, right in pairwise(values):
                    yield from self._operator(left, right, sign, (other,), function)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for compared, before, after in zip(
                    ops, [left, *comparators], comparators, strict=False
                ):
                    sign, others = _COMPARED[type(compared)]
                    yield from self._operator(before, after, sign, others, function)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._mutant(node, self._place(node), self._place(operand), "", function)
            case ast.Constant(value=value):
                for new in _other_values(value):
                    end = self._end(node)
                    yield self._mutant(node, self._place(node), end, new, function)
        yield from self._below(node, function, classes)

    def _operator(
        self,
        left: ast.expr,
        right: ast.expr,
        sign: str,
        others: Sequence[str],
        function: str | None,
    ) -> Iterator[Mutant]:
        begin, stop = self._end(left), self._place(right)
        words = sign.split()
        between = [(at, text) for at, text in self._tokens if begin <= at < stop]
        at = next(at for at, text in between if text == words[0])
        last = next(at for at, text in between if text == words[-1])
        for other in others:
            yield self._mutant(left, at, last + len(words[-1]), other, function)

    def _mutant(
        self, node: ast.expr, start: int, end: int, new: str, function: str | None
    ) -> Mutant:
        line = next(n for n, at in enumerate(self._starts) if at > start)
        return Mutant(path=self._path, line=line, start=start, end=end, new=new, function=function)

    def _place(self, node: ast.expr) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """The place of a column, which ast counts in bytes."""
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operator joins texts, as in a message."""
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)))
        for part in (node.left, node.right)
    )


def _other_values(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (str(not value),)
    if isinstance(value, int):
        return (repr(value + 1), repr(value - 1)) if value else ("1",)
    if isinstance(value, float):
        return (repr(value * 2.0), repr(value / 2.0)) if value else ("1.0",)
    return ()
