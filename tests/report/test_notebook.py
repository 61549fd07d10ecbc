"""The notebook API answers as the commands do, shows itself, and the worked notebook runs."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.errors import UsageInvalid
from orchestrator.report import notebook
from orchestrator.report.notebook import NotebookSweep, open_store
from orchestrator.report.records import TRIAL_COLUMNS
from tests.cli.cli_store import Filled
from tests.new_store import on_sqlite
from tests.report.conftest import Query

WORKED = Path(notebook.__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def sweep(report_url: str, filled: Filled) -> NotebookSweep:
    return open_store(report_url).sweep("scaling")


def test_the_best_are_those_of_the_view(sweep: NotebookSweep, query: Query) -> None:
    best = sweep.best()
    expected = query("SELECT trial_id FROM v_best WHERE sweep = 'scaling' ORDER BY cell_id")
    assert [(trial_id,) for trial_id in best.trial_ids] == expected
    assert all(cell.verdict in repr(best) for cell in best)


def test_a_record_per_trial_has_the_names_of_the_columns(
    sweep: NotebookSweep, query: Query
) -> None:
    found = sweep.records()
    assert set(found[0]) == set(TRIAL_COLUMNS)
    speeds = query("SELECT tokens_per_second_per_gpu FROM v_trial WHERE sweep = 'scaling'")
    assert [(row["tokens_per_second_per_gpu"],) for row in found] == speeds
    assert not any(isinstance(value, dict | list) for row in found for value in row.values())


@pytest.mark.parametrize("library", [None, "pandas", "polars"])
def test_a_frame_is_of_the_library_that_is_installed(
    sweep: NotebookSweep, library: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stand-ins: both are large, and no dependency.
    stand_in = SimpleNamespace(
        DataFrame=lambda rows: ("pandas", rows),
        from_dicts=lambda rows, infer_schema_length: ("polars", rows),
    )
    if library is not None:
        monkeypatch.setitem(sys.modules, library, stand_in)
    monkeypatch.setattr(notebook, "find_spec", lambda name: name == library or None)
    expected = sweep.records() if library is None else (library, sweep.records())
    assert sweep.frame() == expected


def test_everything_shows_itself_and_hostile_text_is_text(report_url: str, filled: Filled) -> None:
    store = open_store(report_url)
    tiny = store.sweep("tiny")
    shown = [tiny, tiny.best(), *(tiny.trial(one.trial.id) for one in tiny.rows.trials)]
    shown += [tiny.plot(name) for name in ("scaling", "memory-timeline", "failures")]
    for one in shown:
        html = one._repr_html_()
        assert "<script" not in html
        assert repr(one)
    assert "tiny" in repr(store) and "scaling" in repr(store)


def test_a_plot_is_saved_and_one_without_data_says_why(
    sweep: NotebookSweep, report_url: str, tmp_path: Path
) -> None:
    sweep.plot("pareto").save(tmp_path / "pareto.svg")
    assert (tmp_path / "pareto.svg").stat().st_size
    empty = open_store(report_url).sweep("tiny").plot("memory-timeline")
    with pytest.raises(UsageInvalid, match="No profile has the memory"):
        empty.save(tmp_path / "x.svg")


def test_mistakes_name_what_there_is(sweep: NotebookSweep, tmp_path: Path) -> None:
    with pytest.raises(UsageInvalid, match="did you mean"):
        sweep.plot("scalin")
    with pytest.raises(UsageInvalid, match="has no trial 999"):
        sweep.trial(999)
    with pytest.raises(UsageInvalid, match="there is no store at"):
        open_store(f"sqlite:///{tmp_path}/none.sqlite")
    on_sqlite(f"sqlite:///{tmp_path}/new.sqlite").close()
    with pytest.raises(UsageInvalid, match="holds no sweep yet"):
        open_store(f"sqlite:///{tmp_path}/new.sqlite").sweep()


def test_the_worked_notebook_runs(
    report_url: str, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", report_url)
    cells = json.loads(WORKED.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    names: dict[str, Any] = {}
    shown = 0
    for source in code:
        # As Jupyter does: the last expression of a cell is shown.
        tree = ast.parse(source.replace('sweep("quickstart")', 'sweep("scaling")'))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
            shown += bool(getattr(value, "_repr_html_", lambda value=value: str(value))())
    assert shown > 5
