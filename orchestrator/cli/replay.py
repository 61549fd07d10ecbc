"""The command that searches a table of measured runs as if they were launched now: `sweep replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.output import DbOption, JsonOption, examples, note, write
from orchestrator.cli.sweep_file import Overrides

if TYPE_CHECKING:
    from orchestrator.core.pretend.replay import ReplayTable


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep replay runs.csv --table pretraining-8gpu search.max_trials=20",
            "sweep replay runs.csv --table pretraining-8gpu --file > replay.yaml",
        )
    )(replay)


def replay(
    csv_file: Annotated[
        Path,
        typer.Argument(metavar="TABLE.csv", help="Measured runs, one a row.", show_default=False),
    ],
    table: Annotated[
        str,
        typer.Option(
            "--table", metavar="ID", help="Which table of the file: a value of its column table_id."
        ),
    ],
    overrides: Overrides = None,
    file: Annotated[
        bool, typer.Option("--file", help="Only print the sweep file that the table means.")
    ] = False,
    db: DbOption = None,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Take the sweep from an orchestrator that still holds it."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Search a table of measured runs.

    The sweep file is made of the table: its problems, and every value that occurs. A launch returns the row that was measured.
    """
    from orchestrator.cli.run import run_spec
    from orchestrator.cluster.replayed import table_in
    from orchestrator.core.sweepfile.spec_yaml import load

    measured = table_in(csv_file, table)
    if not measured.is_complete:
        note(
            f"{table} has {len(measured.runs)} problems; the largest is meant, or one of these: {'; '.join(measured.problem_texts)}"
        )
    text = sweep_file(measured, csv_file)
    spec = load(text, source=f"{csv_file}, table {table}", overrides=overrides or ())
    if file:
        write(text.rstrip("\n"))
        return
    run_spec(
        spec, db=db, ray_address=None, takeover=takeover, strict=False, quiet=quiet, as_json=as_json
    )


def sweep_file(table: ReplayTable, path: Path) -> str:
    """The sweep file of a table, one key a line; values are written as JSON, which YAML is."""
    content = table.sweep(name=None, path=str(path.resolve()))
    return "".join(
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in content.items()
    )
