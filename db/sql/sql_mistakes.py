"""Messages about statements that a database could not answer: refused, or wrong.

They suggest the name that was probably meant. Pure text: no connection is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from db.sql.sql_text import ALLOWED_FUNCTIONS, did_you_mean

ONLY_READING = "only reading is possible here, one statement at a time"
# Most characters of the database's message, which may repeat the statement.
_MAX_CHARACTERS = 300

_UNKNOWN_COLUMN = re.compile(
    r'no such column: (?P<sqlite>.+)|column (?P<postgresql>"[^"]+"|[\w.]+) does not exist'
)
_UNKNOWN_TABLE = re.compile(
    r'no such table: (?P<sqlite>.+)|relation "(?P<postgresql>[^"]+)" does not exist'
)
_UNKNOWN_FUNCTION = re.compile(r"no such function: (?P<sqlite>.+)")


def refused(message: str) -> str:
    """The line for a statement that does more than read."""
    return f"the query was refused: {one_line(message)}; {ONLY_READING}"


def wrong(message: str, sql: str, columns: Mapping[str, Iterable[str]]) -> str:
    """The line for a wrong statement. `columns` are those of each table and view."""
    line = one_line(message)
    return f"the query cannot be answered: {line}{_meant(line, sql, columns)}"


def one_line(message: str) -> str:
    """The first line of a database's message, without severity and full stop."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
    return re.sub(r"^[A-Z]+:\s+", "", line)[:_MAX_CHARACTERS].rstrip(".")


def _meant(message: str, sql: str, columns: Mapping[str, Iterable[str]]) -> str:
    if name := _name_in(_UNKNOWN_TABLE.fullmatch(message)):
        there = f"; there are {', '.join(sorted(columns, reverse=True))}"
        return did_you_mean(name, columns) or there
    if name := _name_in(_UNKNOWN_FUNCTION.fullmatch(message)):
        return did_you_mean(name, ALLOWED_FUNCTIONS)
    if name := _name_in(_UNKNOWN_COLUMN.fullmatch(message)):
        return _meant_column(name.lower(), sql, columns)
    return ""


def _meant_column(name: str, sql: str, columns: Mapping[str, Iterable[str]]) -> str:
    words = set(re.findall(r"\w+", sql.lower()))
    asked = {relation: set(names) for relation, names in columns.items() if relation in words}
    close = get_close_matches(name, sorted(set().union(*asked.values())), n=2)
    elsewhere = sorted(
        relation
        for relation, names in columns.items()
        if relation not in asked and name in set(names)
    )
    if elsewhere:
        return f"; it is a column of {', '.join(elsewhere)}"
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return "; `sweep sql --schema` shows the columns"


def _name_in(match: re.Match[str] | None) -> str:
    """The unknown name without its table; empty if the message is about something else."""
    if match is None:
        return ""
    found = next(text for text in match.groups() if text)
    return found.strip('"').rpartition(".")[2]
