"""The Pareto front against a comparison of all pairs."""

from __future__ import annotations

from dataclasses import replace

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
    beaten, on = figure["data"]
    assert "error_y" not in beaten
    points = {point.trial.id: point for front in scaling.fronts for point in front.points}
    ends = zip(on["customdata"], on["y"], on["error_y"]["array"], strict=True)
    for trial_id, speed, above in ends:
        (valued,) = (
            value for name, value in points[trial_id].values.items() if name.startswith("tokens")
        )
        assert (speed, speed + above) == (valued.value, valued.high)
        assert above > 0


def test_a_layout_that_is_beaten_by_less_than_noise_has_a_symbol_of_its_own(
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
    assert "2 of 6 layouts; 1 more is beaten by less than noise" in picture.caption
