"""The queries of this program that have a name: each is one file of `db/queries`.

The first line of a file is its question. Lines `-- name (type, default): meaning` below it declare
its parameters, which are written as `:name` in the statement; `:sweep` needs no such line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Literal

from orchestrator.core.errors import UsageInvalid

FOLDER = Path(__file__).parent.parent / "queries"
SWEEP = "sweep"
Value = str | float | int | None
_PARAMETER = re.compile(
    r"^-- (?P<name>[a-z_]+) \((?P<type>text|number)(?:, (?P<default>[\d.]+))?\): (?P<means>.+)$",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    name: str
    type: Literal["text", "number"]
    # None: the statement itself handles NULL.
    default: Value
    means: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedQuery:
    name: str
    question: str
    parameters: tuple[Parameter, ...]
    sql: str

    @property
    def takes_sweep(self) -> bool:
        return f":{SWEEP}" in self.sql

    def values(self, given: Iterable[str]) -> dict[str, Value]:
        """The values of its parameters, by the texts `name=value` that a person gave.

        Raises UsageInvalid for an unknown parameter, or a value that its type does not take.
        """
        values: dict[str, Value] = {each.name: each.default for each in self.parameters}
        by_name = {each.name: each for each in self.parameters}
        for text in given:
            name, separator, value = text.partition("=")
            if not separator or name not in by_name:
                raise UsageInvalid(_no_parameter(self, text, name))
            values[name] = _number(name, value) if by_name[name].type == "number" else value
        return values


@cache
def named_queries() -> Mapping[str, NamedQuery]:
    """All of them by name, in the order of their names."""
    return {file.stem: _read(file) for file in sorted(FOLDER.glob("*.sql"))}


def named_query(name: str) -> NamedQuery:
    """Raises UsageInvalid with the name that was probably meant."""
    queries = named_queries()
    if name in queries:
        return queries[name]
    close = get_close_matches(name.lower().replace("-", "_"), queries, n=1)
    meant = f"did you mean @{close[0]}?" if close else f"there are {', '.join(queries)};"
    raise UsageInvalid(f"no query is named @{name}; {meant} `sweep sql --list` shows them")


def _read(file: Path) -> NamedQuery:
    sql = file.read_text()
    parameters = tuple(
        Parameter(
            name=match["name"],
            type="number" if match["type"] == "number" else "text",
            default=None if match["default"] is None else _number(match["name"], match["default"]),
            means=match["means"],
        )
        for match in _PARAMETER.finditer(sql)
    )
    question = sql.splitlines()[0].removeprefix("-- ")
    return NamedQuery(name=file.stem, question=question, parameters=parameters, sql=sql)


def _number(name: str, text: str) -> float | int:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise UsageInvalid(f"{name}={text} is not a number of 0 or more; for example {name}=10")
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def _no_parameter(query: NamedQuery, text: str, name: str) -> str:
    names = [each.name for each in query.parameters]
    if name == SWEEP and query.takes_sweep:
        return f"@{query.name} takes its sweep as --sweep NAME, not as {text!r}"
    if not names:
        return f"@{query.name} has no parameters, and {text!r} was given"
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}=VALUE?" if close else f"it takes {', '.join(names)}"
    return f"@{query.name} has no parameter {text!r}; {hint}"
