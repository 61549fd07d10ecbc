"""How commands write: data to stdout as a table, JSON, CSV or Markdown, remarks to stderr, and nothing in data that a terminal would obey.

Knows no sweep and no store; what is shown comes as plain values.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1  # of every JSON document: raised when a field changes its name or meaning, not when one is added


LONGEST_LINE = 1_000  # characters of a message; what it quotes may have millions
MIN_WRAPPED_WIDTH = 24  # characters: most layouts fit on one line, or break once


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


DbOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="The database: sqlite:///FILE or postgresql://USER@HOST/NAME. Default: the environment variable SWEEP_DB, else"
        " .sweep/sweep.sqlite. A password given here is visible to others in `ps`: put it into SWEEP_DB or ~/.pgpass.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Write one JSON document to stdout; an error too.")
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="How to write rows.", show_default="table")
]


def chosen_format(format: Format | None, *, as_json: bool) -> Format:
    """What --format and --json mean together. Raises UsageInvalid when they contradict."""
    if as_json and format not in (None, Format.JSON):
        raise UsageInvalid(f"--json and --format {format} contradict each other; give one of them")
    return Format.JSON if as_json else format or Format.TABLE


def examples(*lines: str) -> str:
    """The end of a command's help, kept line by line."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" if line else " " for line in lines)])


def write(text: str = "") -> None:
    """One or more lines to stdout. What stands in it is data: pass what others wrote through `plain` first."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """A remark or a line of progress, to stderr."""
    sys.stderr.write(shortened(plain(text, lines=True)) + "\n")
    sys.stderr.flush()


def write_json(command: str, fields: Mapping[str, Any]) -> None:
    """The one JSON document of a command. Control characters come out escaped; numbers that JSON lacks come out as null."""
    write(json_text({"schema": SCHEMA, "command": command, **fields}, indent=2))


def write_error(kind: str, message: str, exit_code: int) -> None:
    """What a command writes to stdout in place of its JSON document when it ends with an error: a machine need not read stderr."""
    error = {"kind": kind, "message": shortened(plain(message, lines=True)), "exit_code": exit_code}
    write(json_text({"schema": SCHEMA, "error": error}, indent=2))


def json_text(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(
        _jsonable(value), indent=indent, allow_nan=False
    )  # ensure_ascii is on: no raw escape character gets through


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table meant for people."""

    title: str
    right: bool = False  # numbers line up at the right
    wrap: bool = False  # may be broken over lines where the terminal is narrow; others are not
    style: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StyledText:
    """Text of one cell with a style of ours; the text may be anything."""

    text: str
    style: str = ""


def write_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str | StyledText]], *, header: bool = True
) -> None:
    """A table as wide as the terminal, or as wide as it is where stdout is no terminal. Only columns that wrap give way; none is cut."""
    # rich takes 0.1 s to import, and `sweep --help` shows no table.
    from rich.table import Table
    from rich.text import Text

    cells = [
        [
            StyledText(text=plain(c.text, lines=True), style=c.style)
            if isinstance(c, StyledText)
            else StyledText(text=plain(c, lines=True))
            for c in row
        ]
        for row in rows
    ]
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        show_header=header,
    )
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=not column.wrap,
            overflow="fold",
            style=column.style,
        )
    for row in cells:
        # Text, never a string: a string is read as markup, and `[/bold]` in somebody's data would raise MarkupError.
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    console = terminal()
    # Where even the narrowest form is wider than the terminal, rich would drop columns: let the terminal break the lines instead.
    console.width = max(console.width, narrowest(columns, cells))
    with console.capture() as capture:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def narrowest(columns: Sequence[Column], rows: Sequence[Sequence[StyledText]]) -> int:
    """How wide a table is when its columns that wrap are as narrow as can still be read."""
    widths = []
    for i, column in enumerate(columns):
        content = max((len(line) for row in rows for line in row[i].text.split("\n")), default=0)
        widths.append(
            max(len(column.title), min(content, MIN_WRAPPED_WIDTH) if column.wrap else content)
        )
    return sum(widths) + 2 * len(columns)


def write_line(text: str, *, style: str = "") -> None:
    """One line to stdout, styled where stdout is a terminal; never broken."""
    from rich.text import Text  # as above

    terminal().print(Text(plain(text), style=style), soft_wrap=True)


def write_csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows as CSV to stdout."""
    sys.stdout.write(csv_text(names, rows))


def csv_text(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV that no spreadsheet computes: a text that would start a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_csv_cell(name) for name in names])
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def write_markdown(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows as a Markdown table to stdout."""
    write("| " + " | ".join(_markdown_cell(name) for name in names) + " |")
    write("|" + "|".join(" --- " for _ in names) + "|")
    for row in rows:
        write("| " + " | ".join(_markdown_cell(value) for value in row) + " |")


def terminal() -> Console:
    """A console on stdout that guesses nothing from data: no markup, no emoji, no highlighting. It obeys NO_COLOR."""
    from rich.console import Console  # as above

    is_terminal = sys.stdout.isatty()
    # Into a pipe or a file nothing is cut or broken, unless COLUMNS says how wide the reader's page is.
    width = (
        shutil.get_terminal_size().columns
        if is_terminal or os.environ.get("COLUMNS", "").isdigit()
        else 10_000
    )
    colors: Literal["auto"] | None = (
        None if os.environ.get("NO_COLOR") else "auto"
    )  # rich alone would still send bold
    return Console(
        file=sys.stdout,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=colors,
    )


# Escape sequences with their arguments (CSI, OSC, DCS and the like, also with 8-bit introducers), then whatever control character
# is left, and the marks that turn the direction of text round.
_TERMINAL_CODES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]"
)
_CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str, *, lines: bool = False) -> str:
    """Text that others wrote, without what would play tricks on a terminal. With `lines` it may have several."""
    clean = _CONTROL_CHARACTERS.sub(
        "", _TERMINAL_CODES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    )
    clean = clean.replace("\t", "    ")
    return clean if lines else " ".join(clean.rstrip("\n").split("\n"))


def shortened(text: str) -> str:
    """A message that can be read: of a line that is longer its beginning and its end, since it may quote whatever it was given."""
    return "\n".join(map(_shortened_line, text.split("\n")))


def _shortened_line(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    head, tail = LONGEST_LINE * 2 // 3, LONGEST_LINE // 4
    return f"{line[:head]} ... [{len(line) - head - tail:,} characters] ... {line[-tail:]}"


def _jsonable(value: Any) -> Any:
    """JSON's own types: times as ISO 8601 in UTC, enums as their values, what is not a number as null."""
    match value:
        case Enum():
            return value.value
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            return (
                (value if value.tzinfo else value.replace(tzinfo=UTC))
                .astimezone(UTC)
                .isoformat()
                .replace("+00:00", "Z")
            )
        case date() | Path():
            return str(value)
        case Mapping():
            return {str(_jsonable(key)): _jsonable(item) for key, item in value.items()}
        case bytes():
            return value.hex()
        case list() | tuple() | set() | frozenset():
            return [_jsonable(item) for item in value]
        case _:
            return str(value)


def _csv_cell(value: Any) -> Any:
    simple = _jsonable(value)
    if isinstance(simple, dict | list):
        simple = json_text(simple)
    if isinstance(simple, bool):
        return "true" if simple else "false"
    if not isinstance(simple, str):
        return simple
    text = plain(simple, lines=True)
    # What stripping left may begin with a formula's sign, also after blanks.
    return (
        f"'{text}"
        if text.lstrip()[:1] in ("=", "+", "-", "@") and text.strip() and not _is_number(text)
        else text
    )


def _markdown_cell(value: Any) -> str:
    simple = _jsonable(value)
    if simple is None:
        return ""
    text = plain(simple if isinstance(simple, str) else json_text(simple))
    return (
        text.replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace("`", "\\`")
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
