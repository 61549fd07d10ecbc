"""The Pareto front against a comparison of all pairs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.report.pictures import pareto
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_the_front_is_the_one_that_comparing_all_pairs_finds(
    scaling: SweepRows, query: Query
) -> None:
    # They differ by more than noise: the speeds by a tenth or more.
    rows = query(
        "SELECT trial_id, tokens_per_second_per_gpu, peak_memory_reserved_bytes FROM v_trial"
        " WHERE sweep = 'scaling' AND state = 'measured'"
    )
    front = {
        trial_id
        for trial_id, speed, peak in rows
        if not any(
            other >= speed and less <= peak and (other, less) != (speed, peak)
            for _, other, less in rows
        )
    }
    found = pareto.candidates([scaling])
    assert {one.trial_id for one in found if one.is_on_front} == front
    assert not any(one.may_be_on_front for one in found)
    assert 0 < len(front) < len(found) == len(rows) == 6
    assert "On the front by tokens/s/GPU, memory free: 3 of 6" in pareto.picture([scaling]).caption


def test_each_point_of_the_front_has_its_interval(scaling: SweepRows) -> None:
    figure = pareto.picture([scaling]).figure
    assert figure is not None
    dominated, on = figure["data"]
    assert "error_y" not in dominated
    # Their texts have the intervals of their runs.
    own = {one.trial.id: one.trial.relative_confidence for one in scaling.trials}
    for trial_id, text in zip(dominated["customdata"], dominated["text"], strict=True):
        assert text.endswith(f" tokens/s/GPU ±{own[trial_id]:.1%} in its run")
    points = {point.trial.id: point for front in scaling.fronts for point in front.points}
    ends = zip(on["customdata"], on["y"], on["error_y"]["array"], strict=True)
    for trial_id, speed, above in ends:
        (valued,) = (
            value for name, value in points[trial_id].values.items() if name.startswith("tokens")
        )
        assert (speed, speed + above) == (valued.value, valued.high)
        assert above > 0


def test_a_layout_that_is_dominated_by_less_than_noise_has_a_symbol_of_its_own(
    scaling: SweepRows,
) -> None:
    (front,) = scaling.fronts
    first, *others = front.points
    changed = replace(front, points=[replace(first, is_on_front=False), *others])
    picture = pareto.picture([replace(scaling, fronts=[changed])])
    assert picture.figure is not None
    names = {trace["name"]: trace for trace in picture.figure["data"]}
    assert names["could be on the front"]["customdata"] == [first.trial.id]
    assert names["could be on the front"]["marker"]["symbol"] == "circle-open"
    assert "2 of 6 layouts; 1 more is dominated by less than noise" in picture.caption


def test_energy_and_dollars_are_drawn_where_they_are_known_each_point_with_its_interval(
    scaling: SweepRows, query: Query
) -> None:
    first = scaling.trials[0]
    assert scaling.sessions == [] and first.trial.joules_per_token is None
    text = pareto.picture([scaling]).caption
    assert "Energy is not shown" in text and "Dollars are not shown" in text
    trials = [
        replace(one, trial=replace(one.trial, joules_per_token=0.01 * one.trial.id))
        for one in scaling.trials
    ]
    session = SimpleNamespace(price_per_gpu_hour=2.0)
    rows: Any = replace(scaling, trials=trials, sessions=[session])
    picture = pareto.picture([rows])
    assert picture.figure is not None and "not shown" not in picture.caption
    panels: dict[str, dict[int, tuple[float, ...]]] = {"x": {}, "x2": {}, "x3": {}}
    for trace in picture.figure["data"]:
        for place, trial_id in enumerate(trace["customdata"]):
            errors = [trace.get(f"error_{letter}") for letter in "xy"]
            widths = [0.0 if one is None else one["array"][place] for one in errors]
            panels[trace["xaxis"]][trial_id] = (trace["x"][place], trace["y"][place], *widths)
    front = {point.trial.id: point.values for front in scaling.fronts for point in front.points}
    sql = query(
        "SELECT trial_id, tokens_per_second_per_gpu, num_gpus,"
        " 1e9 / tokens_per_second_per_gpu / 3600 * 2.0 FROM v_trial"
        " WHERE sweep = 'scaling' AND state = 'measured'"
    )
    assert all(set(panel) == {row[0] for row in sql} for panel in panels.values())
    for trial_id, speed, num_gpus, dollars in sql:
        joules, _, wide_joules, wide_speed = panels["x2"][trial_id]
        assert joules == pytest.approx(0.01 * trial_id)
        if trial_id in front:
            # As much energy in less time: the ends of one interval are those of the other.
            assert wide_joules / joules == pytest.approx(wide_speed / speed, rel=0.05)
        total, cost, wide_total, wide_cost = panels["x3"][trial_id]
        assert total == pytest.approx(speed * num_gpus, rel=0.01)
        assert cost == pytest.approx(dollars, rel=0.01)
        is_compared = trial_id in front
        widths = (wide_joules, wide_speed, wide_total, wide_cost)
        assert all((width > 0) is is_compared for width in widths)
    # The parts of the picture stand below each other, and share one legend.
    layout = picture.figure["layout"]
    domains = [layout[name]["domain"] for name in ("yaxis", "yaxis2", "yaxis3")]
    assert domains[0][0] > domains[1][1] > domains[1][0] > domains[2][1]
    legend = [trace["name"] for trace in picture.figure["data"] if trace["showlegend"]]
    assert len(legend) == len(set(legend))
