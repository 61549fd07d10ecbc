"""A cell's trials in an Optuna storage, read back by Optuna."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.search.optuna_storage import StudyState, StudyTrial, export_study
from tests.search.planted_cell import TOKENS

BEGAN = dt.datetime(2026, 11, 20, 12, 0, tzinfo=dt.UTC)


def shown(layout: Layout, value: float | None = 1.0, state: str = "complete") -> StudyTrial:
    return StudyTrial(
        layout=layout,
        state=StudyState(state),
        values=None if value is None else (value,),
        started_at=BEGAN,
        ended_at=BEGAN + dt.timedelta(seconds=90),
        attributes={"trial_id": 7, "mfu": 0.4},
    )


def export(tmp_path: Path, *trials: StudyTrial) -> optuna.Study:
    url = f"sqlite:///{tmp_path}/optuna.db"
    attributes = {"sweep": "mine", "left_out": {"not ended": 1}}
    count = export_study(url, "cell", trials, objectives=[TOKENS], attributes=attributes)
    assert count == len(trials)
    return optuna.load_study(storage=url, study_name="cell")


def test_an_exported_study_tells_values_states_times_and_what_was_left_out(tmp_path: Path) -> None:
    study = export(
        tmp_path,
        shown(Layout(micro_batch_size=1), 100.0),
        shown(Layout(micro_batch_size=2), 300.0),
        shown(Layout(micro_batch_size=4), None, "fail"),
        shown(Layout(micro_batch_size=8), None, "pruned"),
    )
    assert [(trial.state.name, trial.value) for trial in study.trials] == [
        ("COMPLETE", 100.0),
        ("COMPLETE", 300.0),
        ("FAIL", None),
        ("PRUNED", None),
    ]
    best = study.best_trial
    assert best.user_attrs == {
        "layout": Layout(micro_batch_size=2).key,
        "trial_id": 7,
        "mfu": 0.4,
    }
    assert best.duration == dt.timedelta(seconds=90)
    assert best.datetime_start is not None and best.datetime_start.astimezone() == BEGAN
    assert study.user_attrs == {
        "objective": TOKENS.value,
        "sweep": "mine",
        "left_out": {"not ended": 1},
    }
    with pytest.raises(UsageInvalid, match="another name"):
        export(tmp_path)


def test_numbers_are_ordered_and_words_are_not(tmp_path: Path) -> None:
    options = (("fused", True), ("kernel", "a"), ("threads", 3))
    study = export(
        tmp_path,
        shown(Layout(micro_batch_size=2, zero_stage=0)),
        shown(Layout(micro_batch_size=8, zero_stage=3, options=options)),
        shown(Layout(micro_batch_size=4, recompute=Recompute.parse("full:8"))),
    )
    ways = study.trials[1].distributions
    assert ways["micro_batch_size"] == IntDistribution(2, 8, log=True)
    assert ways["zero_stage"] == IntDistribution(0, 3)
    assert ways["threads"] == IntDistribution(3, 3)
    assert ways["recompute"] == CategoricalDistribution(("full:8", "none"))
    assert ways["fused"] == CategoricalDistribution(("True",))
    assert [trial.params.get("kernel") for trial in study.trials] == [None, "a", None]
    assert all("options" not in trial.params for trial in study.trials)
