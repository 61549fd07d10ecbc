"""The command `sql`: one SELECT over the store, of a person or with a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Db, FormatOption, Json, SweepOption
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import (
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
    from db.store_reads import StoreReads

NAMED = "@"


def sql(
    statement: Annotated[
        str | None,
        typer.Argument(
            metavar="STATEMENT",
            help="One SELECT over the views or tables, or @NAME: a query of `--list`.",
            autocompletion=_complete_statements,
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Parameters of the query @NAME."),
    ] = None,
    sweep: SweepOption = None,
    queries: Annotated[
        bool, typer.Option("--list", help="Show the queries that have a name.")
    ] = False,
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
      sweep sql --list
      sweep sql @best --sweep 8b
      sweep sql @cheapest within=0.1
    """
    from db.sql import readonly  # needs SQLAlchemy

    format = output_format(format, as_json=as_json)
    if schema + queries + (statement is not None) != 1:
        raise UsageInvalid(
            "give one statement, for example: sweep sql 'select * from v_best'; or --schema for the"
            " views and their columns, or --list for the queries that have a name"
        )
    if queries:
        _print_queries(format)
        return
    with existing_store(db) as store:
        # Raises the right error for a store that does not exist or has another version.
        asked, parameters = _asked(store, statement or "", values or [], sweep)
    if statement is None:
        _print_schema(db, format)
        return
    result = readonly.query(
        db, asked, parameters=parameters, max_rows=max_rows, timeout_seconds=timeout
    )
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


def _complete_statements(incomplete: str) -> list[str]:
    from db.sql.named_queries import named_queries

    names = [NAMED + name for name in named_queries()]
    return [name for name in names if name.startswith(incomplete)]


def _asked(
    store: StoreReads, statement: str, values: Sequence[str], sweep: str | None
) -> tuple[str, dict[str, Any] | None]:
    """The statement to run, and the parameters if it has a name.

    Raises UsageInvalid for an unknown name, sweep or value, and where only a name takes them.
    """
    if not statement.startswith(NAMED):
        given = "--sweep" if sweep is not None else values[0] if values else None
        if given is not None:
            raise UsageInvalid(
                f"{given} is for a query with a name, such as `sweep sql @best`; a statement says"
                " it itself: WHERE sweep = '...'"
            )
        return statement, None
    from db.sql.named_queries import SWEEP, named_query

    query = named_query(statement.removeprefix(NAMED))
    parameters: dict[str, Any] = query.values(values)
    if query.takes_sweep:
        parameters[SWEEP] = select_sweep(store, sweep).name
    return query.sql, parameters


def _print_queries(format: Format) -> None:
    from db.sql.named_queries import named_queries

    queries = named_queries().values()
    match format:
        case Format.JSON:
            write_json("sql --list", {"queries": [asdict(query) for query in queries]})
        case Format.TABLE:
            for query in queries:
                write_line(f"{NAMED}{query.name}", style="bold")
                rows = [(" ", query.question)]
                rows += [(" ", f"{each.name}=: {each.means}") for each in query.parameters]
                write_table([Column(), Column(wrap=True)], rows, header=False)
            write_line("Each is about one sweep: --sweep NAME; default: the newest.")
        case _:
            write_rows(
                format,
                ("name", "question", "parameters"),
                [
                    (query.name, query.question, " ".join(each.name for each in query.parameters))
                    for query in queries
                ],
            )


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
    from db.sql.own_queries import view_columns

    columns = view_columns(db)
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
