"""The arguments and options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.terminal.output import Format
from orchestrator.core.errors import SweepError


def complete_names(incomplete: str) -> list[str]:
    """Sweep names for the shell's completion; none if there is no store."""
    from db.sql.own_queries import sweep_names  # needs SQLAlchemy

    try:
        return [name for name in sweep_names() if name.startswith(incomplete)]
    except SweepError:
        return []


File = Annotated[Path, typer.Argument(metavar="FILE", help="The sweep file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values that replace those of the file: search.max_trials=10 gpus=8",
    ),
]
_NEWEST_SWEEP = "The sweep's name. Default: the newest sweep that is not simulated."
SweepArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SWEEP",
        help=_NEWEST_SWEEP,
        autocompletion=complete_names,
    ),
]
SweepOption = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="SWEEP",
        help=_NEWEST_SWEEP,
        autocompletion=complete_names,
    ),
]
CellOption = Annotated[
    str | None,
    typer.Option(
        "--cell",
        metavar="TEXT",
        help="A part of the cell's name, if there are several cells.",
    ),
]
TrialArgument = Annotated[
    int, typer.Argument(metavar="TRIAL", help="The trial's number (see `sweep trials`).", min=1)
]
Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="The database: sqlite:///FILE or postgresql://USER@HOST/NAME. Default: the variable"
        " SWEEP_DB, else .sweep/sweep.sqlite. Other users can see a password given here in `ps`:"
        " put it into SWEEP_DB or ~/.pgpass.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON document to stdout, also for an error.")
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="How to write rows.", show_default="table")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="The Ray cluster to join: auto or HOST:PORT. Default: start a local Ray.",
        envvar="RAY_ADDRESS",
    ),
]
Takeover = Annotated[
    bool,
    typer.Option("--takeover", help="Take the sweep away from a `sweep run` that works on it."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
