"""Writes a report: a folder of pages that a browser opens from files, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import __version__
from orchestrator.core.errors import UsageInvalid
from orchestrator.report import quantities as show
from orchestrator.report.extras import how_to_install
from orchestrator.report.pages.headline import headlines
from orchestrator.report.pages.script_data import SCRIPT_BEGINS, compressed_script
from orchestrator.report.pages.trial_document import TABLE_TITLES, document, sort_keys, table_row
from orchestrator.report.pictures.all_pictures import pictures
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_file import TrialFiles

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from orchestrator.report.pictures.picture import Picture

HERE = Path(__file__).parent.parent
# A page of a trial loads the documents of this many.
TRIALS_PER_FILE = 250
# Cells of the headline that are shown at once; the others open on a click.
OPEN_CELLS = 4
# A page loads only files of its folder, and runs no script of its own text. Plotly sets the styles
# of its elements.
POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline';"
    " img-src 'self' file: data: blob:; base-uri 'none'; form-action 'none'"
)
# Every page of a report has this.
OWN_PAGE = '<link rel="stylesheet" href="assets/report.css">'
# The files of `static` that the pages of a report load.
STATIC = ("data.js", "report.css", "report.js", "theme.js", "trial.js", "trials.js")
MISSING = f"a report needs {{}}, {how_to_install('report')}"


@dataclass(frozen=True, kw_only=True)
class Written:
    """The parts of a report."""

    index: Path
    num_trials: int
    num_bytes: int
    pictures: Sequence[Picture]


def write_report(
    sweeps: Sequence[SweepRows], folder: Path, *, live_page: str | None = None
) -> Written:
    """Write the report of sweeps into a folder, which may have an older report or other files.

    `live_page`: the address of the page of `sweep ui`, if that shows this report.

    Raises UsageInvalid if a package is missing, if the folder cannot be written, or if its index is
    a page of somebody else.
    """
    plotly, pages = plotly_script(), environment()
    drawn = pictures(sweeps)
    try:
        _refuse_another_index(folder / "index.html")
        for name in ("data", "assets"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in STATIC:
            shutil.copyfile(HERE / "static" / name, folder / "assets" / name)
        shutil.copyfile(plotly, folder / "assets" / plotly.name)
        for old in (folder / "data").glob("trials-*.js"):
            if old.read_text(errors="replace").startswith(SCRIPT_BEGINS):
                old.unlink()
        for name, text in _data(sweeps, drawn):
            (folder / "data" / name).write_text(text, encoding="utf-8")
        for name, more in _pages(sweeps, drawn, live_page):
            (folder / name).write_text(pages.get_template(name).render(more), encoding="utf-8")
    except OSError as exc:
        raise UsageInvalid(f"cannot write the report to {folder}: {exc.strerror}") from exc
    return Written(
        index=folder / "index.html",
        num_trials=sum(len(sweep.trials) for sweep in sweeps),
        num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        pictures=drawn,
    )


def _refuse_another_index(index: Path) -> None:
    if index.is_file() and OWN_PAGE not in index.read_text(errors="replace"):
        raise UsageInvalid(f"{index} is not a report; name another folder: sweep report -o DIR")


def _data(sweeps: Sequence[SweepRows], drawn: Sequence[Picture]) -> Iterator[tuple[str, str]]:
    """The scripts with the data of the pages."""
    from db.read.holder import is_worked_on  # SQLAlchemy

    figures = {one.name: one.figure for one in drawn if one.figure is not None}
    yield "figures.js", compressed_script("figures", figures)
    every = [(sweep, one) for sweep in sweeps for one in sweep.trials]
    table = {
        "titles": TABLE_TITLES,
        "rows": [table_row(sweep, one) for sweep, one in every],
        "keys": [sort_keys(one) for _, one in every],
        "files": {one.trial.id: number // TRIALS_PER_FILE for number, (_, one) in enumerate(every)},
    }
    yield "trials.js", compressed_script("trials", table)
    files = {sweep.name: TrialFiles.of(sweep.sweep.spec_json) for sweep in sweeps}
    worked_on = {sweep.name: is_worked_on(sweep.sweep) for sweep in sweeps}
    for start in range(0, len(every), TRIALS_PER_FILE):
        some = every[start : start + TRIALS_PER_FILE]
        number = start // TRIALS_PER_FILE
        documents = {
            one.trial.id: document(files[sweep.name], one, is_worked_on=worked_on[sweep.name])
            for sweep, one in some
        }
        yield f"trials-{number}.js", compressed_script(f"trials-{number}", documents)


def _pages(
    sweeps: Sequence[SweepRows], drawn: Sequence[Picture], live_page: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pages with the values of their templates."""
    names = [sweep.name for sweep in sweeps]
    common = {
        "policy": POLICY,
        "sweeps": names,
        "version": __version__,
        "live_page": live_page,
        "drawn_at": show.at(datetime.now(tz=UTC)),
    }
    counts = {
        "trials": sum(len(sweep.trials) for sweep in sweeps),
        "attempts": sum(1 for sweep in sweeps for _ in sweep.attempts()),
    }
    simulated = [sweep.name for sweep in sweeps if sweep.sweep.is_simulated]
    yield (
        "index.html",
        {
            **common,
            "cells": headlines(sweeps),
            "pictures": drawn,
            "counts": counts,
            "simulated": simulated,
            "open_cells": OPEN_CELLS,
        },
    )
    yield "trials.html", common
    yield "trial.html", common


def environment() -> Environment:
    """The templates, which escape all that they show."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UsageInvalid(MISSING.format("jinja2")) from None
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["code"] = code
    return found


def code(text: str) -> Markup:
    """Show what is in backticks as code, and escape everything."""
    from markupsafe import Markup, escape  # of jinja2

    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    shown = [
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    ]
    return Markup("").join(shown)


def plotly_script() -> Path:
    """The file of plotly.js within the package plotly, which is not imported."""
    found = find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise UsageInvalid(MISSING.format("plotly"))
    file = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    if not file.is_file():
        raise UsageInvalid(MISSING.format("plotly with its plotly.min.js"))
    return file
