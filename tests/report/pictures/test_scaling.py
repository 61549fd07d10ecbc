"""The scaling scatter against SQL over the same store."""

from __future__ import annotations

from orchestrator.report.pictures import scaling as scatter
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query

ENDED = "('measured', 'out_of_memory', 'failed', 'pruned')"


def test_the_scatter_has_a_point_for_every_trial_that_ended(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    points = scatter.points([tiny, scaling])
    expected = query(
        "SELECT trial_id, num_gpus, CASE WHEN state = 'measured' THEN peak_memory_allocated_bytes"
        f" END, tokens_per_second_per_gpu, mfu FROM v_trial WHERE state IN {ENDED} ORDER BY 1"
    )
    assert [
        (it.trial_id, it.num_gpus, it.memory_bytes, it.tokens_per_second_per_gpu, it.mfu)
        for it in points
    ] == expected
    figure = scatter.picture([tiny, scaling]).figure
    assert figure is not None
    drawn = [trial_id for trace in figure["data"] for trial_id in trace["customdata"]]
    assert sorted(drawn) == [row[0] for row in expected]


def test_points_of_the_scatter_stay_near_their_number_of_gpus(scaling: SweepRows) -> None:
    figure = scatter.picture([scaling]).figure
    assert figure is not None
    gpus = {point.trial_id: point.num_gpus for point in scatter.points([scaling])}
    for trace in figure["data"]:
        for trial_id, x in zip(trace["customdata"], trace["x"], strict=True):
            assert 2**-0.5 < x / gpus[trial_id] < 2**0.5
