"""Slices: a box for each value, against SQL, and what is left out of many."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.report.pictures import slices
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_every_measured_layout_is_once_in_each_axis(scaling: SweepRows, query: Query) -> None:
    measured = query(
        "SELECT micro_batch_size, count(*) FROM v_trial WHERE sweep = 'scaling'"
        " AND state = 'measured' GROUP BY micro_batch_size ORDER BY micro_batch_size"
    )
    found = {axis[0].axis: axis for axis in slices.slices([scaling])}
    assert set(found) == {"mbs", "ga"}
    assert [(int(one.value), len(one.layouts)) for one in found["mbs"]] == measured
    ids = [one.trial_id for axis in found.values() for part in axis for one in part.layouts]
    assert set(Counter(ids).values()) == {2}
    # Micro-batch 2 has 0.9 of the speed of micro-batch 4, in both cells.
    speeds = {one.value: [it.relative_speed for it in one.layouts] for one in found["mbs"]}
    assert speeds["2"] == [pytest.approx(0.9)] * 2 and speeds["4"] == [pytest.approx(1.0)] * 2


def test_points_lead_to_their_trials_until_they_are_too_many(
    scaling: SweepRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = slices.picture([scaling])
    ids = {one.trial.id for one in scaling.trials if one.trial.tokens_per_second_per_gpu}
    assert set(few.trial_ids) == ids and few.figure is not None
    assert all(trace["boxpoints"] == "all" for trace in few.figure["data"])
    monkeypatch.setattr(slices, "MOST_POINTS", len(ids) - 1)
    many = slices.picture([scaling])
    assert many.trial_ids == [] and many.num_marks == few.num_marks


def test_of_an_axis_with_many_values_those_with_most_layouts_are_drawn(
    scaling: SweepRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [one for one in scaling.trials if one.trial.tokens_per_second_per_gpu]
    less = [one for one in measured if one.trial.layout.micro_batch_size != 2]
    rows = replace(scaling, trials=[*measured, *less])
    monkeypatch.setattr(slices, "MOST_VALUES", 2)
    for axis in slices.slices([rows]):
        sizes = {"mbs": ["1", "4"], "ga": [str(_accumulated(one)) for one in (4, 1)]}
        assert [one.value for one in axis] == sizes[axis[0].axis]
    monkeypatch.setattr(slices, "MOST_AXES", 1)
    assert len(slices.slices([rows])) == 1
    assert "Shown are 1 of 2 axes." in slices.picture([rows]).caption


def _accumulated(micro_batch_size: int) -> int:
    return 64 // micro_batch_size // 2


def test_an_option_of_a_program_is_an_axis_too(scaling: SweepRows) -> None:
    trials = [
        replace(one, trial=replace(one.trial, layout=_with(one.trial.layout, value)))
        for one, value in zip(scaling.trials, ["<b>", "flash"] * len(scaling.trials), strict=False)
    ]
    found = slices.picture([replace(scaling, trials=trials)])
    assert found.figure is not None
    names = found.figure["layout"]["xaxis"]["categoryarray"]
    assert {"kernel <b>", "kernel flash"} <= set(names)


def _with(layout: Layout, value: str) -> Layout:
    return replace(layout, options=(("kernel", value),))
