"""The benchmark of prediction, on a table whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.prediction import measure, relatives, score_times
from benchmarks.prediction_bands import Coverage, bands_of_all
from benchmarks.prediction_problem import read_problems
from orchestrator.core.physics.calibration import Calibration
from tests import measured_table


def test_every_way_of_calibrating_is_scored(tmp_path: Path) -> None:
    found = read_problems(_folder(tmp_path), None)
    result = measure(found)
    assert set(result) == {
        "uncalibrated",
        "leave_one_table_out",
        "leave_one_model_out",
        "after_5_trials",
        "after_5_trials_alone",
    }
    assert result["leave_one_table_out"] == {"tables": 0}  # there is no other
    uncalibrated = result["uncalibrated"]
    assert isinstance(uncalibrated, dict)
    assert 0 <= uncalibrated["memory"]["out_of_memory"]["auc"] <= 1
    assert uncalibrated["step_time"]["tables"] == 1
    assert (
        uncalibrated["bands"]["step_time"]["rows"]
        == uncalibrated["step_time_by_table"].popitem()[1]["rows"]
    )
    assert uncalibrated["bands"]["fits"]["at_least"] <= uncalibrated["bands"]["fits"]["at_most"]


def test_bands_of_all_files_count_all_their_rows() -> None:
    def scored(within: int, above: int) -> dict[str, object]:
        return {
            "uncalibrated": {
                "bands": {"memory": Coverage(below=1, within=within, above=above).as_json}
            },
            "leave_one_table_out": {"tables": 0},
        }

    assert bands_of_all([scored(8, 1), scored(4, 6)]) == {
        "uncalibrated": {"memory": Coverage(below=2, within=12, above=7).as_json}
    }


def test_a_band_counts_rows_that_were_measured_and_no_others() -> None:
    band = (np.full(5, 0.9), np.full(5, 1.2))
    found = Coverage.of(np.array([0.8, 0.95, 1.0, 1.3, np.nan]), band)
    assert found == Coverage(below=1, within=2, above=1)
    assert found.as_json == {"rows": 4, "below": 1, "within": 2, "above": 1, "share_within": 0.5}


def test_the_same_problem_under_another_id_is_left_out_with_the_table(tmp_path: Path) -> None:
    twin = (
        measured_table.text()
        .replace("formula-8gpu,", "twin,")
        .replace("Formula-8B", "Another-name")
    )
    other = (
        measured_table.text()
        .replace("formula-8gpu,", "other,")
        .replace(",32,4096,32,8,", ",16,4096,32,8,")
    )
    for name, text in (("twin", twin), ("other", other)):
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    problems = {problem.table_id: problem for problem in read_problems(_folder(tmp_path), None)}
    found = relatives(problems["formula-8gpu"], list(problems.values()), same_model=True)
    assert [problem.table_id for problem in found] == ["other"]


def test_a_perfect_order_has_no_regret(tmp_path: Path) -> None:
    (problem,) = read_problems(_folder(tmp_path), None)
    calibrations = {trainer: Calibration.prior(trainer) for trainer in problem.trainers}
    # As if every prediction had been measured exactly.
    problem.__dict__["seconds"] = np.exp(problem.log_seconds(calibrations))
    scores = score_times(problem, calibrations, np.ones(len(problem.runs), dtype=np.bool_))
    assert scores is not None
    assert scores["regret_1"] == 0
    assert scores["log_error"] == pytest.approx(0, abs=1e-12)
    assert scores["spearman"] == pytest.approx(1)


def _folder(path: Path) -> Path:
    (path / "runs.csv").write_text(measured_table.text(), encoding="utf-8")
    return path
