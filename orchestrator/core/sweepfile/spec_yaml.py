"""Reads the text of a sweep file into a `SweepSpec`, with overrides from the command line.

Every mistake is reported at once with its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.sweepfile.mistake_text import WRONG_NAME, means, message_of, shown
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.workload_section import WORKLOADS
from orchestrator.core.sweepfile.yaml_document import (
    Document,
    Path,
    Place,
    YamlRefused,
    read,
    read_rest,
)

MAX_MISTAKES_SHOWN = 50
MAX_OVERRIDES = 256
# With more of them, none is tried by itself to find which one broke a rule.
MAX_OVERRIDES_TRIED = 16


def load(text: str, *, source: str, overrides: Sequence[str] = ()) -> SweepSpec:
    """Read a sweep file. Overrides are `search.max_trials=10`, with their values read as YAML.

    Raises SpecInvalid with a line for every mistake:
    `file:line:column: path: what is wrong; what is allowed`.
    """
    spec, lines, num_not_explained = _read(text, source, overrides)
    if spec is None or lines:
        lines = _name_overrides(lines, text, source, overrides)
        raise _invalid(source, lines, num_not_explained=num_not_explained)
    return spec


def _read(
    text: str, source: str, overrides: Sequence[str]
) -> tuple[SweepSpec | None, list[_MistakeLine], int]:
    """Return the spec, its mistakes, and how many more there are.

    Raises SpecInvalid if the text is no mapping.
    """
    broken: list[_MistakeLine] = []
    left_out: Sequence[str] = ()
    try:
        document = read(text)
    except YamlRefused as exc:
        rest = read_rest(text, exc)
        broken = [_MistakeLine(one.place, (), one.message) for one in rest.refused]
        if rest.document is None or not isinstance(rest.document.value, dict):
            raise _invalid(source, broken) from None
        document, left_out = rest.document, rest.left_out
    if not isinstance(document.value, dict):
        what = f"a sweep file is a mapping of keys, not {shown(document.value)}"
        if document.value is None:
            what = "the file is empty"
        message = f"{what}; it starts with name:, model:, gpus:"
        raise _invalid(source, [_MistakeLine(Place(1, 1), (), message)])
    sweep = _SweepSection(document, left_out)
    sweep.override(overrides)
    spec, found = _checked(sweep)
    return spec, [*broken, *sweep.mistakes, *found], sweep.num_not_explained


def _name_overrides(
    lines: list[_MistakeLine], text: str, source: str, overrides: Sequence[str]
) -> list[_MistakeLine]:
    """Name the override instead of a line of the file, if that line is right without it."""
    if len(overrides) > MAX_OVERRIDES_TRIED or all(isinstance(one.where, str) for one in lines):
        return lines
    of_file = {one.key for one in _read(text, source, ())[1]}
    unexplained = {one.key for one in lines if isinstance(one.where, Place)} - of_file
    cause: dict[tuple[Path, str], str] = {}
    for override in overrides:
        if not unexplained:
            break
        of_override = {line.key for line in _read(text, source, [override])[1]} & unexplained
        cause |= dict.fromkeys(of_override, override)
        unexplained -= of_override
    return [
        replace(one, where=f"override {shown(cause[one.key])}")
        if isinstance(one.where, Place) and one.key in cause
        else one
        for one in lines
    ]


# Each round can uncover the rules of the next larger section: option, section, whole file.
_ROUNDS = 4


def _checked(sweep: _SweepSection) -> tuple[SweepSpec | None, list[_MistakeLine]]:
    """Return the spec and its mistakes, also those that pydantic looks for only if all is right.

    It checks the rules of a section once the keys of the section are valid. So what is wrong is
    taken out, and the rest is checked again.
    """
    lines: list[_MistakeLine] = []
    for _ in range(_ROUNDS):
        try:
            return SweepSpec.model_validate(sweep.value), lines
        except ValidationError as exc:
            found = sweep.explain(exc)
            lines += found
            if not sweep.take_out(found):
                break
    return None, lines


def to_json_schema() -> dict[str, Any]:
    """The JSON schema of a sweep file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **SweepSpec.model_json_schema(),
        "title": "Sweep",
    }


@dataclass(frozen=True, slots=True)
class _MistakeLine:
    where: Place | str  # in the file, or the override
    path: Path
    message: str

    @property
    def key(self) -> tuple[Path, str]:
        return self.path, self.message

    @property
    def order(self) -> tuple[bool, Place]:
        """Mistakes of the file from top to bottom, then those of overrides as they were given."""
        return (False, self.where) if isinstance(self.where, Place) else (True, Place(0, 0))


def _invalid(
    source: str, lines: Iterable[_MistakeLine], *, num_not_explained: int = 0
) -> SpecInvalid:
    texts = []
    for line in sorted(lines, key=lambda line: line.order):
        where = f"{source}:{line.where}" if isinstance(line.where, Place) else line.where
        path = f"{_dotted(line.path)}: " if line.path else ""
        texts.append(f"{where}: {path}{line.message}")
    texts = list(dict.fromkeys(texts))
    num_more = max(0, num_not_explained) + max(0, len(texts) - MAX_MISTAKES_SHOWN)
    more = [f"and {num_more:,} more"] if num_more else []
    return SpecInvalid("\n".join([*texts[:MAX_MISTAKES_SHOWN], *more]))


def _dotted(path: Path) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).lstrip(".")


# --- the values and where each came from ---

_BATCHES = ("global_batch_size", "global_batch_tokens")
# In place of required keys that are wrong, so that the rest is checked: these break no rule.
_HARMLESS: Mapping[str, Any] = MappingProxyType(
    {
        "name": "unnamed",
        "model": "llama-tiny",
        "gpus": 1,
        "sequence_length": 1,
        "workload": "synthetic",
    }
)
_OVERRIDE = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)


class _SweepSection:
    """The values of a file with overrides applied, and the place of each for error messages."""

    def __init__(self, document: Document, left_out: Sequence[str] = ()) -> None:
        """`left_out`: top-level keys of the file that are not in the document."""
        self.value: dict[str, Any] = document.value
        self.num_not_explained = 0
        # What was wrong and is not in the value.
        self._taken_out: list[Path] = [(name,) for name in left_out]
        self._fill_in()
        self.mistakes = [
            _MistakeLine(mistake.place, mistake.path, mistake.message)
            for mistake in document.mistakes
        ]
        self._document = document
        self._overridden: dict[Path, str] = {}

    def override(self, overrides: Sequence[str]) -> None:
        for text in overrides[:MAX_OVERRIDES]:
            try:
                self._apply(text)
            except (YamlRefused, ValueError) as exc:
                message = exc.message if isinstance(exc, YamlRefused) else str(exc)
                self.mistakes.append(_MistakeLine(f"override {shown(text)}", (), message))
        if len(overrides) > MAX_OVERRIDES:
            message = f"{len(overrides)} of them; at most {MAX_OVERRIDES}"
            self.mistakes.append(_MistakeLine("overrides", (), message))

    def _apply(self, text: str) -> None:
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise ValueError("is not of the form search.max_trials=10")
        document = read(match[2])
        if document.mistakes:
            raise ValueError(document.mistakes[0].message)
        path: Path = tuple(int(part) if part.isdecimal() else part for part in match[1].split("."))
        owner: Any = self.value
        for depth, part in enumerate(path[:-1]):
            if isinstance(owner, dict) and owner.get(str(part)) is None:
                # The override creates this section.
                self._overridden[path[: depth + 1]] = text
            owner = _entered(owner, part, path[: depth + 1])
        last = path[-1]
        if isinstance(owner, list) and isinstance(last, int) and last < len(owner):
            owner[last] = document.value
        elif isinstance(owner, dict):
            owner[str(last)] = document.value
        else:
            raise ValueError(f"{_dotted(path[:-1])} has no {last!r}")
        # The two ways to give the global batch exclude each other; the command line wins.
        if path in ((_BATCHES[0],), (_BATCHES[1],)):
            other = _BATCHES[1 - _BATCHES.index(str(last))]
            if (other,) not in self._overridden:
                self.value.pop(other, None)
        self._overridden[path] = text

    def explain(self, failure: ValidationError) -> list[_MistakeLine]:
        """Return a line for each mistake that pydantic found.

        Mistakes that may come only from what was taken out are left out.
        """
        errors = failure.errors(include_url=False)
        self.num_not_explained = max(0, len(errors) - MAX_MISTAKES_SHOWN)
        # A suggestion is slow to find: not for thousands of keys.
        errors = errors[:MAX_MISTAKES_SHOWN]
        self._taken_out += self._mistyped(errors)
        lines = [self._line(error) for error in errors]
        return [line for line in lines if line is not None]

    def _mistyped(self, errors: Sequence[ErrorDetails]) -> list[Path]:
        """Return the required keys that an unknown key stands for: `model`, given as `modle`."""
        unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
        missing: list[Path] = [error["loc"] for error in errors if error["type"] == "missing"]
        missing += [(name,) for name in _BATCHES]
        return [
            self._path(loc, "missing")
            for loc in missing
            if any(means(other, loc) for other in unknown)
        ]

    def _line(self, error: ErrorDetails) -> _MistakeLine | None:
        path = self._path(error["loc"], error["type"])
        if error["type"] in WRONG_NAME and isinstance(self._at(path), dict):
            path = (*path, "name")  # the key that chooses among sections
        message = message_of(error, path)
        if self._may_be_ours(error["type"], path, message):
            return None
        path = self._narrowed(path, message)
        return _MistakeLine(
            self._where(path, key=error["type"] == "extra_forbidden"), path, message
        )

    def _may_be_ours(self, kind: str, path: Path, message: str) -> bool:
        """Return whether a mistake may come from a key that was taken out, or is not readable."""
        if kind == "missing" and any(path[: len(out)] == out for out in self._taken_out):
            return True
        words = set(re.findall(r"\w+", message)) if kind == "value_error" else ()
        return any(str(out[-1]) in words for out in self._taken_out)

    def take_out(self, lines: Sequence[_MistakeLine]) -> bool:
        """Take out of the values what is wrong. False: nothing could be taken out."""
        if self.num_not_explained:
            return False
        paths = {self._removable(line.path) for line in lines if line.path}
        of_workload = {path for path in paths if path[0] == "workload"}
        if any(len(path) < 3 or self._at(path) is None for path in of_workload):
            # The options that vary belong to a workload that is not known.
            paths = paths - of_workload | {("workload",), ("axes", "options")}
        if any(path[:2] == ("axes", "options")[: len(path)] for path in paths):
            # They may name these options.
            paths.add(("constraints",))
        for path in paths:
            owner = self._at(path[:-1])
            if isinstance(owner, dict):
                owner.pop(str(path[-1]), None)
        self._taken_out += paths
        self._fill_in()
        return bool(paths)

    def _fill_in(self) -> None:
        """Give the keys that were taken out, and have to be there, values that break no rule."""
        for name, harmless in _HARMLESS.items():
            if (name,) in self._taken_out and name not in self.value:
                self.value[name] = harmless

    def _removable(self, path: Path) -> Path:
        """Return the path of the key to take out: of a list all, so that no other entry moves."""
        place = next((n for n, part in enumerate(path) if isinstance(part, int)), len(path))
        return path[:place]

    def _path(self, loc: tuple[int | str, ...], kind: str) -> Path:
        """Return the path in the file, without tags and lists that only the validators add."""
        path: list[int | str] = []
        value: Any = self.value
        for part in loc:
            if isinstance(value, dict) and isinstance(part, str) and part in value:
                value = value[part]
                path.append(part)
            elif kind == "missing" and isinstance(part, str) and part not in WORKLOADS:
                value = None  # missing from here on
                path.append(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
                path.append(part)
        return tuple(path)

    def _narrowed(self, path: Path, message: str) -> Path:
        """Return the path of the key that a section's rule starts with, if it names one."""
        value = self._at(path)
        first = message.split(" ", 1)[0]
        return (*path, first) if isinstance(value, dict) and first in value else path

    def _at(self, path: Path) -> Any:
        value: Any = self.value
        for part in path:
            if isinstance(value, list) and isinstance(part, int):
                value = value[part]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def _where(self, path: Path, *, key: bool = False) -> Place | str:
        """Return the place of a value or its key, or else of what is around it."""
        for length in range(len(path), -1, -1):
            if text := self._overridden.get(path[:length]):
                return f"override {shown(text)}"
            place = self._document.value_places.get(path[:length])
            if key and length == len(path):
                place = self._document.key_places.get(path, place)
            if place is not None:
                return place
        return Place(1, 1)


def _entered(owner: Any, part: int | str, path: Path) -> Any:
    """Return the mapping or list inside, creating it if it is missing.

    `workload: llama` becomes `workload: {name: llama}`.
    """
    if isinstance(owner, list) and isinstance(part, int) and part < len(owner):
        return owner[part]
    if not isinstance(owner, dict):
        raise ValueError(f"{_dotted(path[:-1])} has no {part!r}")
    inner = owner.get(str(part))
    if inner is None:
        inner = owner[str(part)] = {}
    elif isinstance(inner, str) and path in (("workload",), ("model",)):
        inner = owner[str(part)] = {"name" if path == ("workload",) else "preset": inner}
    elif not isinstance(inner, (dict, list)):
        raise ValueError(f"{_dotted(path)} is {shown(inner)}, not a mapping")
    return inner
