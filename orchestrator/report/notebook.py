"""Sweeps in a notebook: `open_store(url).sweep(name)`, with tables and pictures.

    from orchestrator.report.notebook import open_store
    sweep = open_store("sqlite:///.sweep/sweep.sqlite").sweep("mine")
    sweep.best()            # the winner of each cell, in the words of `sweep best`
    sweep.frame()           # a row per trial, in polars or pandas if one of them is installed
    sweep.trial(7)          # all that is known of a trial
    sweep.plot("scaling")   # a picture of `sweep report`

It only reads. A sweep is read once: ask the store for it again to see what came since.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.report import records, trial_facts
from orchestrator.report.comparison import Comparison, of_fingerprints, of_sweeps
from orchestrator.report.json_text import json_text
from orchestrator.report.pages.headline import CellHeadline, headlines
from orchestrator.report.pages.summary import markdown
from orchestrator.report.paper_figure import paper_figure
from orchestrator.report.pictures.all_pictures import PICTURES
from orchestrator.report.pictures.picture import Figure, Picture
from orchestrator.report.sweep_rows import SweepRows, read_rows
from orchestrator.report.trial_file import TrialFiles

if TYPE_CHECKING:
    from db.read.rows import TrialDetail


def open_store(url: str | None = None) -> NotebookStore:
    """Return the store of a URL, of SWEEP_DB, or .sweep/sweep.sqlite.

    Raises UsageInvalid if there is none.
    """
    from db.connection import url as urls  # SQLAlchemy

    resolved = urls.resolve(url)
    if resolved.drivername == "sqlite" and not Path(str(resolved.database)).is_file():
        raise UsageInvalid(f"there is no store at {urls.display(resolved)}")
    return NotebookStore(url=url, shown_url=urls.display(resolved))


@dataclass(frozen=True, kw_only=True)
class NotebookStore:
    """A store that is opened for each question."""

    url: str | None
    # Without a password.
    shown_url: str

    def names(self) -> list[str]:
        """The names of all sweeps, the newest first."""
        from db.store import Store  # SQLAlchemy

        with Store.open(self.url, to_read=True) as store:
            return [row.name for row in store.sweeps()]

    def sweep(self, name: str | None = None) -> NotebookSweep:
        """Read a sweep; None: the newest that is not simulated. Raises UsageInvalid."""
        from db.store import Store  # SQLAlchemy

        with Store.open(self.url, to_read=True) as store:
            if name is not None:
                row = store.sweep_named(name)
            else:
                sweeps = store.sweeps()
                if not sweeps:
                    raise UsageInvalid(f"{self.shown_url} holds no sweep yet")
                row = next((one for one in sweeps if not one.is_simulated), sweeps[0])
            return NotebookSweep(rows=read_rows(store, row))

    def __repr__(self) -> str:
        return f"open_store({self.shown_url!r}) with the sweeps {', '.join(self.names()) or 'none'}"


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookSweep:
    """A sweep as the store had it when it was read."""

    rows: SweepRows

    def best(self) -> Best:
        """Return the fastest layouts of each cell, and how sure their order is."""
        return Best(cells=headlines([self.rows]))

    def records(self) -> list[dict[str, Any]]:
        """Return a flat record per trial, with the names of the SQL columns and units in them."""
        found = []
        for one in self.rows.trials:
            record = records.trial_record(one.trial, one.cell, one.sweep_name)
            found.append({name: _flat(value) for name, value in record.items()})
        return found

    def frame(self) -> Any:
        """Return the records as a polars data frame, else a pandas one, else as they are."""
        if find_spec("polars") is not None:
            import polars  # optional

            return polars.from_dicts(self.records(), infer_schema_length=None)
        if find_spec("pandas") is not None:
            import pandas  # optional

            return pandas.DataFrame(self.records())
        return self.records()

    def trial(self, trial_id: int) -> NotebookTrial:
        """Return one trial of the sweep. Raises UsageInvalid if it has none with this number."""
        from db.read.holder import is_worked_on  # SQLAlchemy

        row = self.rows.sweep
        for one in self.rows.trials:
            if one.trial.id == trial_id:
                files = TrialFiles.of(row.spec_json)
                return NotebookTrial(detail=one, files=files, is_worked_on=is_worked_on(row))
        raise UsageInvalid(f"sweep {self.rows.name} has no trial {trial_id}")

    def plot(self, name: str, *others: NotebookSweep) -> Plot:
        """Return a picture of `sweep report`, of this sweep or of several together."""
        if name not in PICTURES:
            hint = did_you_mean(name, PICTURES) or f"; there are {', '.join(PICTURES)}"
            raise UsageInvalid(f"no picture is called {name!r}{hint}")
        return Plot(picture=PICTURES[name]([self.rows, *(other.rows for other in others)]))

    def compare(self, after: NotebookSweep | None = None) -> Comparison | None:
        """Compare with a later sweep; None: compare the last two fingerprints of this one."""
        return of_fingerprints(self.rows) if after is None else of_sweeps(self.rows, after.rows)

    def __repr__(self) -> str:
        return markdown([self.rows])

    def _repr_html_(self) -> str:
        num = len(self.rows.trials)
        return f"<h3>{escape(self.rows.name)}</h3><p>{num:,} trials</p>{self.best()._repr_html_()}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Best:
    """The head of a report."""

    cells: Sequence[CellHeadline]

    def __iter__(self) -> Iterator[CellHeadline]:
        return iter(self.cells)

    @property
    def trial_ids(self) -> list[int]:
        """The fastest trial of each cell that has one."""
        return [cell.rows[0].trial_id for cell in self.cells if cell.rows]

    def __repr__(self) -> str:
        return "\n".join(f"{cell.title}\n  {cell.verdict}" for cell in self.cells)

    def _repr_html_(self) -> str:
        parts = []
        for cell in self.cells:
            parts.append(f"<h4>{escape(cell.title)}</h4><p>{escape(cell.verdict)}</p>")
            if cell.rows:
                rows = [[str(row.trial_id), *row.texts] for row in cell.rows]
                parts.append(_table(cell.titles, rows))
            parts += [f"<p><small>{escape(line)}</small></p>" for line in cell.remarks]
        return "".join(parts)


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookTrial:
    """Everything known about a trial."""

    detail: TrialDetail
    files: TrialFiles
    is_worked_on: bool  # its sweep has an orchestrator

    @property
    def sweep_file(self) -> str | None:
        """The YAML of a sweep with this layout alone; None: the store has no sweep file."""
        return self.files.sweep_file(self.detail)

    def _parts(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titles with facts."""
        num_gpus = self.detail.cell.cell.num_gpus
        alive = {"is_worked_on": self.is_worked_on}
        title = trial_facts.title(self.detail.trial, **alive)
        found = [(title, trial_facts.head_facts(self.detail, **alive))]
        found += [
            (
                trial_facts.attempt_title(it, self.detail.attempts),
                trial_facts.attempt_facts(it, num_gpus),
            )
            for it in self.detail.attempts
        ]
        return [(title, [(name, text) for name, text in facts if text]) for title, facts in found]

    def __repr__(self) -> str:
        lines = []
        for title, facts in self._parts():
            lines += [title, *(f"  {name:<17} {text}" for name, text in facts)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        compared = trial_facts.compared_rows(self.detail.trial)
        (title, facts), *attempts = self._parts()
        columns = ("quantity", *trial_facts.COMPARED_COLUMNS)
        parts = [f"<h3>{escape(title)}</h3>", _table((), facts), _table(columns, compared)]
        parts += [f"<h4>{escape(name)}</h4>{_table((), some)}" for name, some in attempts]
        return "".join(parts)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plot:
    """A picture of a report, which a notebook shows as SVG."""

    picture: Picture

    @property
    def figure(self) -> Figure:
        """The figure in plotly's format: `plotly.graph_objects.Figure(plot.figure)` draws it.

        Raises UsageInvalid, with what would fill it, if there is none.
        """
        if self.picture.figure is None:
            raise UsageInvalid(f"{self.picture.name}: {self.picture.why_empty}")
        return self.picture.figure

    def save(self, file: str | Path) -> None:
        """Write a file whose ending tells its format: .svg, .png or .pdf."""
        paper_figure(self.figure, title=self.picture.title).savefig(file)

    def __repr__(self) -> str:
        return f"{self.picture.title}: {self.picture.caption or self.picture.why_empty}"

    def _repr_html_(self) -> str:
        if self.picture.figure is None:
            return f"<p>{escape(self.picture.title)}: {escape(self.picture.why_empty)}</p>"
        drawn = io.StringIO()
        paper_figure(self.figure, title=self.picture.title).savefig(drawn, format="svg")
        svg = drawn.getvalue()
        return f"{svg[svg.index('<svg') :]}<p>{escape(self.picture.caption)}</p>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _flat(value: Any) -> Any:
    """Nested values as JSON: a column of a data frame has one type."""
    return json_text(value) if isinstance(value, dict | list | tuple) else value
