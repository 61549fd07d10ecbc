"""The commands that give the data away: sql for any question, export for whole sweeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.defaults import chosen_sweep, complete_names, existing_store
from orchestrator.cli.output import (
    Column,
    DbOption,
    Format,
    FormatOption,
    JsonOption,
    StyledText,
    chosen_format,
    csv_text,
    examples,
    json_text,
    narrowest,
    note,
    terminal,
    write,
    write_csv,
    write_json,
    write_line,
    write_markdown,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.quantities import UNKNOWN, counted

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.sql.bounded_answer import Answer
    from db.store import Store

MAX_EXPORTED = 10_000_000
EXPORT_SECONDS = 600.0  # 100,000 trials take about 8 s


class Target(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"
    OPTUNA = "optuna"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(
        epilog=examples(
            "sweep sql 'select * from v_best'",
            "sweep sql 'select recompute, max(mfu) from v_trial group by 1' --format md",
            "sweep sql --schema",
        )
    )(sql)
    app.command(
        epilog=examples(
            "sweep export csv -o trials.csv",
            "sweep export parquet 8b -o 8b.parquet",
            "sweep export csv --all -o everything.csv",
            "sweep export optuna -o sqlite:///optuna.sqlite && optuna-dashboard sqlite:///optuna.sqlite",
        )
    )(export)


def sql(
    statement: Annotated[
        str | None,
        typer.Argument(
            metavar="STATEMENT", help="One SELECT over the views or tables.", show_default=False
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Show the views and their columns.")
    ] = False,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, help="At most so many rows.")
    ] = 100_000,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds the statement may take.")
    ] = 30.0,
    format: FormatOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the store anything in SQL.

    It can only read: the database itself refuses the rest. Rows wider than the terminal are shown one column a line.
    """
    from db.sql import readonly  # needs SQLAlchemy

    chosen = chosen_format(format, as_json=as_json)
    if schema == (statement is not None):
        raise UsageInvalid(
            "give one statement, for example: sweep sql 'select * from v_best'; or --schema for the views and their columns"
        )
    with existing_store(db):
        pass  # a store that is not there, or of another version, is named as such
    if schema:
        _print_schema(db, chosen)
        return
    assert statement is not None
    result = readonly.query(db, statement, max_rows=max_rows, timeout_seconds=timeout)
    if result.truncated:
        note(f"only the first {max_rows} rows are shown; --max-rows shows more")
    if chosen is Format.JSON:
        write_json(
            "sql",
            {
                "columns": result.columns,
                "rows": [list(values) for values in result.rows],
                "truncated": result.truncated,
            },
        )
    elif chosen is Format.TABLE:
        _print_rows(result)
    else:
        (write_csv if chosen is Format.CSV else write_markdown)(result.columns, result.rows)


def _print_rows(result: Answer) -> None:
    """Rows as a table where it fits, else one column a line, as psql does."""
    columns = _sql_columns(result)
    rows = [[StyledText(text=_sql_text(value)) for value in values] for values in result.rows]
    if not rows or narrowest(columns, rows) <= terminal().width:
        write_table(columns, rows)
        if not rows:
            note("no rows")
        return
    for number, row in enumerate(rows, start=1):
        write_line(f"row {number}", style="bold")
        facts = [
            [StyledText(text=f"  {name}"), cell]
            for name, cell in zip(result.columns, row, strict=True)
        ]
        write_table([Column(title=""), Column(title="", wrap=True)], facts, header=False)


def _sql_columns(result: Answer) -> list[Column]:
    numeric = [
        all(isinstance(row[i], int | float | None) for row in result.rows)
        for i in range(len(result.columns))
    ]
    return [
        Column(title=name, right=right, wrap=not right)
        for name, right in zip(result.columns, numeric, strict=True)
    ]


def _sql_text(value: Any) -> str:
    """A value in a table; JSON, CSV and Markdown carry all digits."""
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:,.1f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return (
        value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, int)
        else json_text(value).strip('"')
    )


def _print_schema(db: str | None, format: Format) -> None:
    from db import migrate, schema  # needs SQLAlchemy
    from db.sql import readonly

    # A query that gives no rows names the columns, on every database alike.
    columns = {
        view: readonly.own_query(db, f"SELECT * FROM {view} LIMIT 0").columns
        for view in schema.VIEWS
    }
    means = migrate.meanings()
    if format is Format.JSON:
        write_json("sql --schema", {"views": columns, "meanings": means})
    elif format is Format.TABLE:
        for view, names in columns.items():
            write_line(view, style="bold")
            write_table(
                [Column(title=""), Column(title="", wrap=True)],
                [[" ", ", ".join(names)]],
                header=False,
            )
        write_line(f"Beneath them are the tables {', '.join(schema.metadata.tables)}.")
    else:
        rows = [(view, name, means[name]) for view, names in columns.items() for name in names]
        (write_csv if format is Format.CSV else write_markdown)(("view", "column", "meaning"), rows)


def export(
    target: Annotated[Target, typer.Argument(metavar="TARGET", help="What to write.")],
    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP",
            help="Which sweep. Default: the newest that was measured, which is said.",
            show_default=False,
            autocompletion=complete_names,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to; for optuna a storage URL. Default: stdout.",
            show_default=False,
        ),
    ] = None,
    sweep_option: Annotated[str | None, typer.Option("--sweep", hidden=True)] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All sweeps of the store, simulated ones too.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export trials as CSV, Parquet, JSON or Optuna.

    Every trial with all its numbers (the columns of v_trial), or one Optuna study per cell.
    """
    if sweep is not None and sweep_option not in (None, sweep):
        raise UsageInvalid(
            f"sweep {sweep} and --sweep {sweep_option} contradict each other; give one of them"
        )
    name = sweep or sweep_option
    if every and name is not None:
        raise UsageInvalid(f"sweep {name} and --all contradict each other; give one of them")
    output = None if output == "-" else output
    if as_json and output is None and target in (Target.CSV, Target.PARQUET):
        raise UsageInvalid(
            f"--json and {target} cannot both go to stdout; say where the rows go to: sweep export {target} -o FILE --json"
        )
    with existing_store(db) as store:
        if target is Target.OPTUNA:
            _export_optuna(
                store,
                store.sweeps() if every else [chosen_sweep(store, name)],
                output,
                as_json=as_json,
            )
            return
        row = None if every else chosen_sweep(store, name)
        condition = "" if row is None else f" WHERE sweep_id = {row.id}"
    from db.sql import readonly  # needs SQLAlchemy

    result = readonly.own_query(
        db,
        f"SELECT * FROM v_trial{condition} ORDER BY trial_id",
        max_rows=MAX_EXPORTED,
        timeout_seconds=EXPORT_SECONDS,
    )
    result = replace(result, rows=_typed(result))
    if target is Target.PARQUET:
        _write_parquet(result, output)
    elif target is Target.CSV:
        _write_text(csv_text(result.columns, result.rows), output)
    else:
        rows = [dict(zip(result.columns, values, strict=True)) for values in result.rows]
        _write_text(json_text({"schema": 1, "command": "export", "trials": rows}) + "\n", output)
    of = "all sweeps" if row is None else f"sweep {row.name}"
    if output is not None and as_json:
        fields = {
            "target": target,
            "sweep": row.name if row is not None else None,
            "output": output,
            "num_trials": len(result.rows),
        }
        write_json("export", fields)
    else:
        note(
            f"{counted(len(result.rows), 'trial')} of {of}{f' written to {output}' if output is not None else ''}"
        )


_BOOLEANS = frozenset({"confident", "thrashing", "is_current_fingerprint"})
_TIMES = frozenset({"created_at", "updated_at"})


def _typed(result: Answer) -> list[tuple[Any, ...]]:
    """Rows of v_trial with the same types from every database: SQLite knows neither booleans, times nor JSON."""
    converters = [
        bool if name in _BOOLEANS else _moment if name in _TIMES else _CONVERTERS.get(name)
        for name in result.columns
    ]
    return [
        tuple(
            value if convert is None or value is None else convert(value)
            for value, convert in zip(row, converters, strict=True)
        )
        for row in result.rows
    ]


def _mapping(value: Any) -> dict[str, Any]:
    """JSON is text on SQLite, and has an order of keys of its own on PostgreSQL."""
    return dict(sorted((json.loads(value) if isinstance(value, str) else value).items()))


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {"options": _mapping}


def _moment(value: Any) -> datetime:
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _write_text(text: str, output: str | None) -> None:
    if output is None:
        write(text.rstrip("\n"))
        return
    _write_bytes(text.encode(), output)


def _write_bytes(content: bytes, output: str) -> None:
    """Written under another name and renamed: a reader never sees half of it."""
    try:
        path = Path(output)
        if path.exists() and not path.is_file():
            path.write_bytes(
                content
            )  # a pipe or a device: a file put in its place would be no such thing
            return
        path = path.resolve()  # a link stays one
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as exc:
        raise UsageInvalid(f"cannot write {output}: {exc.strerror}") from exc


def _write_parquet(result: Answer, output: str | None) -> None:
    if output is None and sys.stdout.isatty():
        raise UsageInvalid(
            "Parquet is not for a terminal; say where to: sweep export parquet -o trials.parquet, or into a pipe"
        )
    try:
        # pyarrow is an extra: only this format needs it.
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageInvalid(
            "Parquet needs pyarrow, which is not installed: pip install 'layout-sweep[export]'"
        ) from None
    columns = {name: [row[i] for row in result.rows] for i, name in enumerate(result.columns)}
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        pyarrow.table({name: _arrow_values(values) for name, values in columns.items()}), buffer
    )
    content = buffer.getvalue().to_pybytes()
    if output is None:
        sys.stdout.buffer.write(content)
    else:
        _write_bytes(content, output)


def _arrow_values(values: Sequence[Any]) -> list[Any]:
    """One type per column: SQLite gives whole numbers as integers also where others are not whole."""
    if any(isinstance(value, float) for value in values):
        return [None if value is None else float(value) for value in values]
    if any(isinstance(value, dict | list) for value in values):
        return [None if value is None else json_text(value) for value in values]
    return list(values)


def _export_optuna(
    store: Store, rows: Sequence[SweepRow], output: str | None, *, as_json: bool
) -> None:
    """One study per cell, named SWEEP/CELL: what the search would be told of it today, without what waits."""
    # Optuna takes 0.5 s to import.
    from db.connection.foreign_storage import errors_in_one_line
    from orchestrator.core.sweepfile.sections import Objective
    from orchestrator.search.optuna_storage import export_study
    from orchestrator.sweep.cell_search import known_of

    if output is None:
        raise UsageInvalid(
            "say which Optuna storage to write to: sweep export optuna -o sqlite:///optuna.sqlite"
        )
    studies = {}
    for row in rows:
        objective = Objective(
            _spec_value(row.spec_json, "objective") or Objective.TOKENS_PER_SECOND_PER_GPU
        )
        for cell in store.cells(row.id):
            trials = store.trials(row.id, cell_id=cell.id)
            known = [
                (trial.layout, fact)
                for trial in trials
                if (fact := known_of(trial, objective)) is not None
            ]
            study = f"{row.name}/{cell.cell.key}"
            with errors_in_one_line("Optuna study", example="sqlite:///optuna.db"):
                studies[study] = export_study(output, study, known, objective=objective)
    names = ", ".join(row.name for row in rows)
    if as_json:
        write_json(
            "export",
            {"target": "optuna", "sweep": names if len(rows) == 1 else None, "studies": studies},
        )
    else:
        note(
            "\n".join(
                f"{counted(count, 'trial')} written to study {study}"
                for study, count in studies.items()
            )
            or (f"sweep {names} has no cells yet" if rows else f"{store.url} holds no sweep yet")
        )


def _spec_value(spec_json: str, key: str) -> Any:
    import json

    spec: Mapping[str, Any] = json.loads(spec_json)
    return spec.get(key)
