"""The command `replay`: searches a table of measured runs as if they were launched now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Db, Json, Overrides, Quiet, Takeover
from orchestrator.cli.terminal.output import note, write


def replay(
    csv_file: Annotated[
        Path, typer.Argument(metavar="TABLE.csv", help="A file of measured runs, one a row.")
    ],
    table: Annotated[
        str,
        typer.Option(metavar="ID", help="The table to use: a value of the file's column table_id."),
    ],
    overrides: Overrides = None,
    file: Annotated[
        bool, typer.Option("--file", help="Only print the sweep file that is made of the table.")
    ] = False,
    db: Db = None,
    takeover: Takeover = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search a table of measured runs.

    A sweep file is made of the table, with its cells and all values that occur in it. Each
    launch of the search then returns the row that was measured.

    Examples:
      sweep replay runs.csv --table pretraining-8gpu search.max_trials=20
      sweep replay runs.csv --table pretraining-8gpu --file > replay.yaml
    """
    from orchestrator.cli.run.sweep_run import RunOptions, run_spec
    from orchestrator.cluster.replayed import table_in
    from orchestrator.core.sweepfile.spec_yaml import load

    measured = table_in(csv_file, table)
    if not measured.is_complete:
        note(
            f"{table} has {len(measured.runs)} cells; the largest is used, or one of these:"
            f" {'; '.join(measured.cell_texts)}"
        )
    content = measured.sweep(name=None, path=str(csv_file.resolve()))
    # One key a line; values are JSON, which is YAML.
    text = "\n".join(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in content.items())
    spec = load(text, source=f"{csv_file}, table {table}", overrides=overrides or ())
    if file:
        write(text)
        return
    run_spec(spec, RunOptions(db=db, takeover=takeover, quiet=quiet, as_json=as_json))
