"""Writes the output of commands: data to stdout as a table, JSON, CSV, Markdown; remarks to stderr.

Text that others wrote reaches no terminal with its control characters. Knows no sweep and no store.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.report.json_text import json_text, jsonable

if TYPE_CHECKING:
    from rich.console import Console

# The version of every JSON document: raised when a field is renamed or changes its meaning.
SCHEMA = 1
# Characters of a message; what it quotes may have millions.
LONGEST_LINE = 1_000
# A longer word was not written to be read. This is the longest name of a file.
LONGEST_WORD = 255
# Characters: most layouts fit on one line, or break once.
MIN_WRAPPED_WIDTH = 24


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


def output_format(format: Format | None, *, as_json: bool) -> Format:
    """Combine --format and --json. Raises UsageInvalid if they contradict each other."""
    if as_json and format not in (None, Format.JSON):
        raise UsageInvalid(f"--json and --format {format} contradict each other; give one of them")
    return Format.JSON if as_json else format or Format.TABLE


def write(text: str = "") -> None:
    """Write lines of data to stdout. Pass text that others wrote through `plain` first."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Write a remark or a line of progress to stderr."""
    sys.stderr.write(shortened(plain(text, lines=True)) + "\n")
    sys.stderr.flush()


def write_json(command: str, fields: Mapping[str, Any]) -> None:
    """Write the one JSON document of a command."""
    write(json_text({"schema": SCHEMA, "command": command, **fields}, indent=2))


def write_error(kind: str, message: str, exit_code: int) -> None:
    """Write an error as JSON to stdout, in place of the command's document."""
    error = {"kind": kind, "message": shortened(plain(message, lines=True)), "exit_code": exit_code}
    write(json_text({"schema": SCHEMA, "error": error}, indent=2))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table for people."""

    title: str = ""
    _: KW_ONLY
    right: bool = False  # numbers are aligned at the right
    # May be broken over lines on a narrow terminal.
    wrap: bool = False
    style: str = ""


def numbers(*titles: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(title, right=True) for title in titles]


@dataclass(frozen=True, slots=True)
class StyledText:
    """The text of one table cell with its style."""

    text: str
    style: str = ""


TableRow = Sequence[str | StyledText]


def write_table(
    columns: Sequence[Column], rows: Iterable[TableRow], *, header: bool = True
) -> None:
    """Write a table, at most as wide as the terminal if the columns that wrap allow it."""
    # rich takes 0.1 s to import, and `sweep --help` shows no table.
    from rich.table import Table
    from rich.text import Text

    cells = [[c if isinstance(c, StyledText) else StyledText(c) for c in row] for row in rows]
    cells = [[StyledText(plain(c.text, lines=True), c.style) for c in row] for row in cells]
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
        # Text, not str: rich reads a str as markup, and `[/bold]` in data would raise MarkupError.
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    console = terminal()
    # On a terminal narrower than this, rich would drop columns. The terminal breaks the lines.
    console.width = max(console.width, narrowest(columns, cells))
    with console.capture() as capture:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def write_facts(facts: Iterable[tuple[str, str | None]], *, indent: str = "  ") -> None:
    """Write names with their values, one a line; unknown and empty values are left out."""
    columns = [Column(style="dim"), Column(wrap=True)]
    rows = [[f"{indent}{name:<17}", value] for name, value in facts if value]
    write_table(columns, rows, header=False)


def narrowest(columns: Sequence[Column], rows: Sequence[Sequence[StyledText]]) -> int:
    """The width of a table whose wrapping columns are as narrow as can still be read."""
    widths = []
    for i, column in enumerate(columns):
        content = max((len(line) for row in rows for line in row[i].text.split("\n")), default=0)
        width = min(content, MIN_WRAPPED_WIDTH) if column.wrap else content
        widths.append(max(len(column.title), width))
    return sum(widths) + 2 * len(columns)


def write_line(text: str, *, style: str = "") -> None:
    """Write one line to stdout, styled on a terminal and never broken."""
    from rich.text import Text  # as above

    terminal().print(Text(plain(text), style=style), soft_wrap=True)


def write_rows(format: Format, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write rows as CSV or as a Markdown table."""
    if format is Format.CSV:
        sys.stdout.write(csv_text(names, rows))
        return
    lines = [map(_markdown_cell, names), ("---" for _ in names)]
    for line in [*lines, *(map(_markdown_cell, row) for row in rows)]:
        write(f"| {' | '.join(line)} |")


def csv_text(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV. A text that a spreadsheet would run as a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_csv_cell(name) for name in names])
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def terminal() -> Console:
    """A console on stdout that obeys NO_COLOR and interprets nothing in the data."""
    from rich.console import Console  # as above

    # Into a pipe or a file nothing is broken, unless COLUMNS gives the width of the page.
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(
        file=sys.stdout,
        width=shutil.get_terminal_size().columns if has_width else 10_000,
        markup=False,
        emoji=False,
        highlight=False,
        # With NO_COLOR alone rich would still send bold.
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


# Escape sequences with their arguments: CSI; OSC, DCS and the like; both also with their 8-bit
# introducers. Then the control characters that are left, and marks that turn the text direction.
_TERMINAL_CODES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def plain(text: str, *, lines: bool = False) -> str:
    """Text without terminal codes. With `lines` its line breaks stay."""
    unix = text.replace("\r\n", "\n").replace("\r", "\n")
    clean = _CONTROL_CHARACTERS.sub("", _TERMINAL_CODES.sub("", unix)).replace("\t", "    ")
    return clean if lines else " ".join(clean.rstrip("\n").split("\n"))


def shortened(text: str) -> str:
    """A message with each long word, and each line that is still long, cut in its middle."""
    return "\n".join(
        _cut(_LONG_WORD.sub(_cut_word, line), LONGEST_LINE) for line in text.split("\n")
    )


def _cut_word(word: re.Match[str]) -> str:
    return _cut(word[0], LONGEST_WORD)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head, tail = longest // 2, longest // 4
    return f"{text[:head]} ... [{len(text) - head - tail:,} characters] ... {text[-tail:]}"


def _csv_cell(value: Any) -> Any:
    simple = jsonable(value)
    if isinstance(simple, dict | list):
        simple = json_text(simple)
    if isinstance(simple, bool):
        return "true" if simple else "false"
    if not isinstance(simple, str):
        return simple
    text = plain(simple, lines=True)
    # After the removal of control characters the text may begin with the sign of a formula.
    is_formula = text.lstrip().startswith(("=", "+", "-", "@")) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _markdown_cell(value: Any) -> str:
    simple = jsonable(value)
    if simple is None:
        return ""
    text = plain(simple if isinstance(simple, str) else json_text(simple))
    for character, escaped in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    return text.replace("`", "\\`")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
