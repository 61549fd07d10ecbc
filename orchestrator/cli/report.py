"""The command `report`: pages about sweeps that a browser opens from files, or a text to paste."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Db, Json, complete_names
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import note, write, write_json
from orchestrator.report.quantities import counted

DEFAULT_FOLDER = Path("sweep-report")


class ReportFormat(StrEnum):
    HTML = "html"
    MD = "md"


Sweeps = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SWEEP",
        help="The sweeps, by name. Default: the newest that is not simulated.",
        autocompletion=complete_names,
    ),
]


def report(
    sweeps: Sweeps = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write.")
    ] = DEFAULT_FOLDER,
    format: Annotated[
        ReportFormat, typer.Option("--format", help="Pages, or Markdown to stdout.")
    ] = ReportFormat.HTML,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Write a report of one sweep or of several.

    A folder of pages that opens in a browser without a server or a network: the best layouts and
    how sure that is, pictures, and a page for each trial. With `--format md` a summary for a pull
    request, on stdout.

    Examples:
      sweep report -o report && xdg-open report/index.html
      sweep report 1b 8b -o scaling
      sweep report 8b --format md
    """
    from orchestrator.report.sweep_rows import read_rows  # numpy, SQLAlchemy

    with existing_store(db) as store:
        names = list(dict.fromkeys(sweeps)) if sweeps else [None]
        rows = [read_rows(store, select_sweep(store, name)) for name in names]
    if format is ReportFormat.MD:
        from orchestrator.report.pages.summary import markdown

        write(markdown(rows))
        return
    from orchestrator.report.pages.report_folder import write_report  # jinja2

    written = write_report(rows, output)
    if as_json:
        fields = {
            "sweeps": [one.name for one in rows],
            "index": written.index,
            "num_trials": written.num_trials,
            "num_bytes": written.num_bytes,
            "pictures": {
                one.name: {"num_marks": one.num_marks, "why_empty": one.why_empty or None}
                for one in written.pictures
            },
        }
        write_json("report", fields)
        return
    write(str(written.index))
    size = f"{written.num_bytes / 1e6:.1f} MB"
    note(f"report of {counted(written.num_trials, 'trial')}, {size}: open it in a browser")
