"""YAML text as plain values, each with its place. Scalars follow the YAML 1.2 core schema.

Hostile text is refused before any value is built: size, depth and the number of nodes after
aliases are counted on parser events. Tags and duplicate keys are refused too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
# With aliases expanded: nine levels of ten aliases are 306 bytes and 10^9 nodes.
MAX_NODES = 10_000
MAX_TEXT = 4096  # characters of a scalar
MAX_DIGITS = 100
# Sections that are not YAML, in a text whose other sections are read.
MAX_LEFT_OUT = 5

# libyaml, if PyYAML was built with it, is ten times faster.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place in the text, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Mistake:
    place: Place
    path: Path
    message: str


class YamlRefused(ValueError):
    """The text is not YAML, or hostile."""

    def __init__(self, place: Place, message: str, *, begins: Place | None = None) -> None:
        """`begins`: of text that is not YAML, where what cannot be read begins."""
        super().__init__(f"{place}: {message}")
        self.place = place
        self.message = message
        self.begins = begins


@dataclass(frozen=True, kw_only=True)
class Document:
    """The value of a text, with mistakes such as a key that appears twice.

    A document with mistakes is not valid.
    """

    value: Any
    mistakes: Sequence[Mistake]
    key_places: Mapping[Path, Place]
    value_places: Mapping[Path, Place]


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The sections that can be read of a text that is not YAML, and those that cannot."""

    document: Document | None  # None: nothing can
    refused: Sequence[YamlRefused]
    left_out: Sequence[str]  # top-level keys


def read_rest(text: str, refused: YamlRefused) -> Rest:
    """Read a text that was refused without the sections that are not YAML, if these are few."""
    lines, left_out, found = text.split("\n"), list[str](), [refused]
    while found[-1].begins is not None and len(found) <= MAX_LEFT_OUT:
        first, last = _section_of(lines, found[-1].begins.line - 1)
        if not any(lines[first:last]):
            break
        left_out.append(lines[first].partition(":")[0].strip("\"' "))
        # Empty lines, so that every place stays.
        lines[first:last] = [""] * (last - first)
        try:
            document = read("\n".join(lines))
        except YamlRefused as exc:
            found.append(exc)
        else:
            return Rest(document=document, refused=found, left_out=left_out)
    return Rest(document=None, refused=found[:1], left_out=())


def _section_of(lines: Sequence[str], line: int) -> tuple[int, int]:
    """Return the first line of the top-level section that a line is in, and the one after it."""
    begins = [
        n for n, text in enumerate(lines) if text[:1].isidentifier() or text[:1] in ("'", '"')
    ]
    first = max((n for n in begins if n <= line), default=0)
    return first, min((n for n in begins if n > line), default=len(lines))


def read(text: str) -> Document:
    """Read one document. Raises YamlRefused; lesser mistakes are returned in the document."""
    _check_characters(text)
    try:
        _check_events(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        begins = exc.context_mark or exc.problem_mark
        raise YamlRefused(
            _place(exc.problem_mark or begins) if begins is not None else Place(1, 1),
            _plain_problem(exc, text),
            begins=_place(begins) if begins is not None else None,
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        if isinstance(exc, YamlRefused):
            raise
        raise _refused(None, f"not YAML: {' '.join(str(exc).split())[:200]}") from None
    builder = _Builder()
    value = builder.build(root, ()) if root is not None else None
    return Document(
        value=value,
        mistakes=builder.mistakes,
        key_places=builder.key_places,
        value_places=builder.value_places,
    )


def scalar(text: str) -> Any:
    """Return the value of an unquoted scalar by the YAML 1.2 core schema.

    `no` is text, `1e-3` a number, `1:30` text, `0o17` fifteen.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= MAX_DIGITS:
        if _INTEGER.fullmatch(text):
            return int(text, 10)
        if match := _PREFIXED.fullmatch(text):
            return int(match[1] or match[2], 8 if match[1] else 16)
        if _FLOAT.fullmatch(text):
            return float(text)
    elif _INTEGER.fullmatch(text):
        raise ValueError(f"a number of {len(text)} digits; at most {MAX_DIGITS}")
    return text


_WORDS: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("", "~", "null", "Null", "NULL")),
        **dict.fromkeys(("true", "True", "TRUE"), True),
        **dict.fromkeys(("false", "False", "FALSE"), False),
        **{
            f"{sign}.{word}": float(f"{sign}inf")
            for sign in ("", "+", "-")
            for word in ("inf", "Inf", "INF")
        },
        **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    }
)
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PREFIXED = re.compile(r"0o([0-7]+)|0x([0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


def _check_characters(text: str) -> None:
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise YamlRefused(Place(1, 1), f"file is larger than {MAX_BYTES // 1024} KiB")
    if found := _CONTROL.search(text):
        before = text[: found.start()]
        place = Place(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        raise YamlRefused(place, f"control character {found[0]!r} in the text")


def _check_events(text: str) -> None:
    """Count depth and nodes as the parser meets them, an alias as large as its target."""
    sizes: dict[str, int] = {}  # of complete nodes with an anchor
    # The anchor of each open collection, and the count before it.
    stack: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.NodeEvent):
            is_alias = isinstance(event, yaml.AliasEvent)
            count += sizes.get(event.anchor or "", 1) if is_alias else 1
            _check_event(event, sizes, [anchor for anchor, _ in stack])
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, count - 1))
            sizes.pop(event.anchor or "", None)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = stack.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > MAX_TEXT:
                message = f"a text of {len(event.value):,} characters; at most {MAX_TEXT:,}"
                raise _refused(event.start_mark, message)
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if count > MAX_NODES:
            message = f"more than {MAX_NODES:,} values (an alias counts as its target)"
            raise _refused(event.start_mark, message)
        if len(stack) > MAX_DEPTH:
            raise _refused(event.start_mark, f"nested more than {MAX_DEPTH} deep")


def _check_event(
    event: yaml.NodeEvent, sizes: Mapping[str, int], open_anchors: list[str | None]
) -> None:
    if isinstance(event, yaml.AliasEvent):
        if event.anchor in open_anchors:
            raise _refused(event.start_mark, f"alias *{event.anchor} is inside its own target")
        if event.anchor not in sizes:
            raise _refused(event.start_mark, f"alias *{event.anchor} refers to nothing above it")
    elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
        tag = str(event.tag)[:60]
        message = f"tag {tag!r}: tags are not allowed; write the plain value"
        raise _refused(event.start_mark, message)


def _plain_problem(exc: yaml.MarkedYAMLError, text: str) -> str:
    problem = exc.problem or exc.context or "cannot be read"
    if exc.problem_mark is not None and "\t" in _indentation(text, exc.problem_mark.line):
        return "not YAML: a tab at the start of the line; indent with spaces"
    if "found another document" in problem:
        return "a second document starts here; a sweep is one document"
    hint = ""
    if "mapping values are not allowed" in problem:
        hint = "; quote a text that holds ': ', and check the indentation"
    return f"not YAML: {problem}{hint}"


def _indentation(text: str, line: int) -> str:
    """Return the white space that a line of a text, counted from 0, begins with."""
    content = text.split("\n")[line : line + 1]
    return content[0][: len(content[0]) - len(content[0].lstrip())] if content else ""


class _YamlMark(Protocol):
    """A place counted from 0; PyYAML's Python and C parsers each have their own class."""

    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...


def _refused(mark: _YamlMark | None, message: str) -> YamlRefused:
    return YamlRefused(_place(mark) if mark is not None else Place(1, 1), message)


def _place(mark: _YamlMark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


class _Builder:
    """Builds plain values from nodes. It expands aliases: their number was counted before."""

    def __init__(self) -> None:
        self.key_places: dict[Path, Place] = {}
        self.value_places: dict[Path, Place] = {}
        self.mistakes: list[Mistake] = []

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.value_places[path] = _place(node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        text = str(node.value)
        if found := _CONTROL.search(text):
            self._mistake(node, path, f"control character {found[0]!r} in a text")
        if node.style in (None, ""):
            try:
                return scalar(text)
            except ValueError as exc:
                self._mistake(node, path, str(exc))
        return text

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Place] = {}
        merged: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _place(key_node.start_mark)
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key == "<<" and not key_node.style:
                self._merge(value_node, path, merged)
            elif not isinstance(key, str) or (
                not key_node.style and not isinstance(_quiet_scalar(key), str)
            ):
                shown = key if key is not None else "[..]"
                message = f"key {shown} is not a word; quote it if you mean text"
                self._mistake(key_node, path, message)
            elif key in own:
                message = f"key {key!r} appears twice; first at {own[key]}"
                self.mistakes.append(Mistake(place, (*path, key), message))
            else:
                own[key] = place
                self.key_places[(*path, key)] = place
                values[key] = self.build(value_node, (*path, key))
        return {**{key: value for key, value in merged.items() if key not in values}, **values}

    def _merge(self, node: yaml.Node, path: Path, into: dict[str, Any]) -> None:
        """Merge `<<: *defaults`: the mapping's keys win, then the first source that has a key."""
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                self._mistake(source, path, "<< takes a mapping or a list of mappings")
                continue
            other = _Builder()
            for key, value in other.build(source, path).items():
                if key not in into:
                    into[key] = value
                    self._adopt(other, (*path, key))
            self.mistakes += other.mistakes

    def _adopt(self, other: _Builder, path: Path) -> None:
        for mine, theirs in (
            (self.key_places, other.key_places),
            (self.value_places, other.value_places),
        ):
            for place_path, place in theirs.items():
                if place_path[: len(path)] == path:
                    mine.setdefault(place_path, place)

    def _mistake(self, node: yaml.Node, path: Path, message: str) -> None:
        self.mistakes.append(Mistake(_place(node.start_mark), path, message))


def _quiet_scalar(text: str) -> Any:
    try:
        return scalar(text)
    except ValueError:
        return None
