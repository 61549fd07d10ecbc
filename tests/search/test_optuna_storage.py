"""A cell's trials in an Optuna storage, read back by Optuna."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.sections import Strategy
from orchestrator.search.optuna_storage import export_study
from orchestrator.search.searcher import Condemned, Known, Measured, UnderWay
from tests.search.planted_cell import TOKENS, drive, planted, searcher


def test_an_exported_study_holds_every_outcome_readably(tmp_path: Path) -> None:
    cell = planted()
    asked, _ = drive(searcher(cell, Strategy.RANDOM), cell, 12)
    others = [layout for layout in cell.value if layout not in asked]
    known: list[tuple[Layout, Known]] = [(layout, cell.outcome(layout)) for layout in asked]
    known += [(layout, Condemned()) for layout in others[:3]] + [(others[3], UnderWay())]
    url = f"sqlite:///{tmp_path}/optuna.db"
    assert export_study(url, "cell", known, objective=TOKENS) == 15

    study = optuna.load_study(storage=url, study_name="cell")
    measured = [layout for layout in asked if cell.excess[layout] <= 0]
    assert len(study.trials) == 15
    assert study.best_trial.user_attrs["layout"] == max(measured, key=cell.value.__getitem__).key
    assert study.best_trial.params["recompute"] in {
        "none",
        "selective_ops",
        "full",
        "full:8",
        "full:24",
    }
    with pytest.raises(UsageInvalid, match="another name"):
        export_study(url, "cell", known, objective=TOKENS)


def test_an_exported_study_has_options_that_vary_as_parameters_of_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db"
    layouts = [
        Layout(),
        Layout(options=(("kernel", "a"), ("threads", 2))),
        Layout(options=(("kernel", "b"), ("threads", 2))),
    ]
    assert (
        export_study(
            url, "cell", [(layout, Measured(value=1.0)) for layout in layouts], objective=TOKENS
        )
        == 3
    )
    study = optuna.load_study(storage=url, study_name="cell")
    assert [trial.params.get("kernel") for trial in study.trials] == [None, "a", "b"]
    assert [trial.params.get("threads") for trial in study.trials] == [None, 2, 2]
    assert all("options" not in trial.params for trial in study.trials)
