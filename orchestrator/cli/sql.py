"""The command `sql`: one SELECT over the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.defaults import existing_store
from orchestrator.cli.options import Db, FormatOption, Json
from orchestrator.cli.output import (
    Column,
    Format,
    StyledText,
    narrowest,
    note,
    output_format,
    terminal,
    write_json,
    write_line,
    write_rows,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.json_text import json_text
from orchestrator.report.quantities import UNKNOWN

if TYPE_CHECKING:
    from db.sql.bounded_answer import Answer


def sql(
    statement: Annotated[
        str | None,
        typer.Argument(metavar="STATEMENT", help="One SELECT over the views or tables."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Show the views and their columns.")
    ] = False,
    max_rows: Annotated[int, typer.Option(min=1, help="Show at most this many rows.")] = 100_000,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that the statement may take.")
    ] = 30.0,
    format: FormatOption = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Ask the store any question in SQL.

    The statement can only read: the database itself refuses to write. Rows that are wider than the
    terminal are shown with one column a line.

    Examples:
      sweep sql 'select * from v_best'
      sweep sql 'select recompute, max(mfu) from v_trial group by 1' --format md
      sweep sql --schema
    """
    from db.sql import readonly  # needs SQLAlchemy

    format = output_format(format, as_json=as_json)
    if schema == (statement is not None):
        raise UsageInvalid(
            "give one statement, for example: sweep sql 'select * from v_best'; or --schema for the"
            " views and their columns"
        )
    with existing_store(db):
        # Raises the right error for a store that does not exist or has another version.
        pass
    if statement is None:
        _print_schema(db, format)
        return
    result = readonly.query(db, statement, max_rows=max_rows, timeout_seconds=timeout)
    if result.truncated:
        note(f"only the first {max_rows} rows are shown; --max-rows shows more")
    match format:
        case Format.JSON:
            rows = [list(values) for values in result.rows]
            fields = {"columns": result.columns, "rows": rows, "truncated": result.truncated}
            write_json("sql", fields)
        case Format.TABLE:
            _print_rows(result)
        case _:
            write_rows(format, result.columns, result.rows)


def _print_rows(result: Answer) -> None:
    """Print a table if it fits the terminal, else one column a line, as psql does."""
    columns = []
    for i, name in enumerate(result.columns):
        is_numeric = all(isinstance(row[i], int | float | None) for row in result.rows)
        columns.append(Column(name, right=is_numeric, wrap=not is_numeric))
    rows = [[StyledText(_text(value)) for value in values] for values in result.rows]
    if not rows or narrowest(columns, rows) <= terminal().width:
        write_table(columns, rows)
        if not rows:
            note("no rows")
        return
    names = [StyledText(f"  {name}") for name in result.columns]
    for number, row in enumerate(rows, start=1):
        write_line(f"row {number}", style="bold")
        facts = zip(names, row, strict=True)
        write_table([Column(), Column(wrap=True)], facts, header=False)


def _text(value: Any) -> str:
    """A value in a table; JSON, CSV and Markdown have all its digits."""
    match value:
        case None:
            return UNKNOWN
        case float():
            return f"{value:,.1f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
        case str() | int():
            return str(value)
        case _:
            return json_text(value).strip('"')


def _print_schema(db: str | None, format: Format) -> None:
    from db import migrate, schema  # needs SQLAlchemy
    from db.sql import readonly

    # A query without rows names the columns on every database.
    columns = {
        view: readonly.own_query(db, f"SELECT * FROM {view} LIMIT 0").columns
        for view in schema.VIEWS
    }
    meanings = migrate.meanings()
    match format:
        case Format.JSON:
            write_json("sql --schema", {"views": columns, "meanings": meanings})
        case Format.TABLE:
            for view, names in columns.items():
                write_line(view, style="bold")
                row = [" ", ", ".join(names)]
                write_table([Column(), Column(wrap=True)], [row], header=False)
            write_line(f"The views select from the tables {', '.join(schema.metadata.tables)}.")
        case _:
            rows = [(v, name, meanings[name]) for v, names in columns.items() for name in names]
            write_rows(format, ("view", "column", "meaning"), rows)
