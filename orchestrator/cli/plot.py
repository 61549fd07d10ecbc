"""The command `plot`: one picture of a report as an SVG or PNG file, for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Db, Json
from orchestrator.cli.report import Sweeps
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import note, write, write_json
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.suggestion import did_you_mean

RESOLUTION = 200  # dots per inch of a PNG


def plot(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The picture: docs/report.md lists them.")
    ],
    sweeps: Sweeps = None,
    svg: Annotated[bool, typer.Option("--svg", help="Write NAME.svg (the default).")] = False,
    png: Annotated[bool, typer.Option("--png", help="Write NAME.png.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file. Default: NAME.svg or .png."),
    ] = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Write one picture as a file.

    It has the values of the same picture in `sweep report`, drawn by matplotlib.

    Examples:
      sweep plot scaling --svg
      sweep plot best-layouts 1b 8b --png -o figures/best.png
    """
    from orchestrator.report.paper_figure import paper_figure
    from orchestrator.report.pictures.all_pictures import PICTURES
    from orchestrator.report.sweep_rows import read_rows  # numpy, SQLAlchemy

    if name not in PICTURES:
        hint = did_you_mean(name, PICTURES) or f"; there are {', '.join(PICTURES)}"
        raise UsageInvalid(f"no picture is called {name!r}{hint}")
    file = output or Path(f"{name}.{'png' if png and not svg else 'svg'}")
    if file.suffix not in (".svg", ".png"):
        raise UsageInvalid(f"{file}: the name ends in neither .svg nor .png")
    if (svg and file.suffix != ".svg") or (png and file.suffix != ".png"):
        raise UsageInvalid(f"--svg, --png and the ending of {file} contradict each other")
    with existing_store(db) as store:
        names = list(dict.fromkeys(sweeps)) if sweeps else [None]
        rows = [read_rows(store, select_sweep(store, each)) for each in names]
    picture = PICTURES[name](rows)
    if picture.figure is None:
        raise UsageInvalid(f"{name}: {picture.why_empty}")
    drawn = paper_figure(picture.figure, title=picture.title)
    try:
        drawn.savefig(
            file, dpi=RESOLUTION, metadata={"Date": None} if file.suffix == ".svg" else None
        )
    except OSError as exc:
        raise UsageInvalid(f"cannot write {file}: {exc.strerror}") from exc
    if as_json:
        write_json("plot", {"picture": name, "file": file, "num_marks": picture.num_marks})
        return
    write(str(file))
    note(picture.caption)
