"""The values of each picture are those that SQL computes from the same store."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from orchestrator.core.trial.reserved_time import ReservedGpuSeconds
from orchestrator.report.pictures import (
    best_so_far,
    failures,
    gantt,
    heat_map,
    memory_bars,
    prediction,
)
from orchestrator.report.pictures import scaling as scatter
from orchestrator.report.pictures.all_pictures import PICTURES, pictures
from orchestrator.report.pictures.attempt_times import spans
from orchestrator.report.pictures.heat_map import Found
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query

ENDED = "('measured', 'out_of_memory', 'failed', 'pruned')"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_plain_values_or_says_why_it_is_empty(
    name: str, tiny: SweepRows, scaling: SweepRows, empty: SweepRows
) -> None:
    for sweeps in ([tiny], [scaling], [tiny, scaling], [empty], []):
        found = PICTURES[name](sweeps)
        assert found.name == name
        if found.figure is None:
            assert found.why_empty.endswith((".", "show."))
            assert not found.num_marks
        else:
            json.dumps(found.figure, allow_nan=False)
            assert found.num_marks
            assert found.caption and not found.why_empty


def test_without_trials_every_picture_says_what_would_fill_it(empty: SweepRows) -> None:
    assert all(one.figure is None and one.why_empty for one in pictures([empty]))


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


def test_the_heat_map_has_the_best_of_each_cell_and_tells_empty_cells_apart(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    found = heat_map.heat_cells([tiny, scaling])
    best = query(
        "SELECT trial_id, num_gpus, mfu, tokens_per_second_per_gpu FROM v_best"
        " WHERE is_current ORDER BY cell_id"
    )
    shown = [it for it in found if it.found is Found.BEST]
    assert [
        (it.trial_id, it.num_gpus, it.mfu, it.tokens_per_second_per_gpu) for it in shown
    ] == best
    assert Counter(it.found for it in found) == {Found.BEST: 3, Found.NOTHING_FITS: 1}
    figure = heat_map.picture([tiny, scaling]).figure
    assert figure is not None
    texts = [label["text"] for label in figure["layout"]["annotations"]]
    assert sum("nothing fits" in text for text in texts) == 1
    # Three problems, two of them on 2 GPUs alone.
    assert sum("not asked for" in text for text in texts) == 2


def test_the_parts_of_memory_add_up_to_the_peak(scaling: SweepRows, tiny: SweepRows) -> None:
    for bar in memory_bars.bars([scaling, tiny]):
        assert bar.measured_bytes is not None
        assert sum(bar.measured_parts.values()) == pytest.approx(bar.measured_bytes, rel=0.02)


def test_errors_of_predictions_are_those_that_sql_computes(
    scaling: SweepRows, query: Query
) -> None:
    [(speed, memory, num)] = query(
        "SELECT avg(abs(predicted_tokens_per_second_per_gpu / tokens_per_second_per_gpu - 1)),"
        " avg(abs(1.0 * predicted_memory_bytes / peak_memory_allocated_bytes - 1)), count(*)"
        " FROM v_trial WHERE sweep = 'scaling' AND state = 'measured'"
    )
    speeds, memories = prediction.speeds([scaling]), prediction.memories([scaling])
    assert len(speeds) == len(memories) == num == 6
    assert prediction.mean_error(speeds) == pytest.approx(speed)
    assert prediction.mean_error(memories) == pytest.approx(memory)
    assert f"mean absolute error {speed:.1%}" in prediction.picture([scaling]).caption


def test_the_best_so_far_rises_and_pays_for_every_attempt(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    found = best_so_far.histories([tiny, scaling])
    for history in found:
        for before, after in pairwise(history.steps):
            assert before.gpu_hours <= after.gpu_hours
            assert (before.best or 0) <= (after.best or 0)
    [(hours, attempts)] = query(
        "SELECT sum(gpu_seconds) / 3600, count(*) FROM attempt WHERE ended_at IS NOT NULL"
    )
    assert sum(one.steps[-1].gpu_hours for one in found) == pytest.approx(hours)
    assert sum(len(one.steps) for one in found) == attempts


def test_failures_are_counted_as_sql_counts_them(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    found = Counter((one.kind.value, one.node) for one in failures.failed_attempts([tiny, scaling]))
    expected = query("SELECT failure_kind, failure_node, count(*) FROM v_failure GROUP BY 1, 2")
    assert found == {(kind, node): num for kind, node, num in expected}
    figure = failures.picture([tiny, scaling]).figure
    assert figure is not None
    assert sum(value or 0 for trace in figure["data"] for value in trace["x"]) == found.total()


def test_bars_of_the_cluster_hold_exactly_the_gpu_seconds_of_the_attempts(
    scaling: SweepRows, query: Query
) -> None:
    busy = sum((it.end - it.start) * it.num_gpus for it in spans(scaling))
    [(seconds,)] = query(
        "SELECT sum(gpu_seconds) FROM attempt JOIN trial ON trial.id = attempt.trial_id"
        " JOIN sweep ON sweep.id = trial.sweep_id WHERE sweep.name = 'scaling'"
    )
    assert busy == pytest.approx(seconds)
    # Six attempts on two nodes, two on one.
    assert len(gantt.bars([scaling])) == 6 * 2 + 2


def test_gpu_seconds_by_use_are_those_of_the_view(scaling: SweepRows, query: Query) -> None:
    total, unreserved = gantt.parts([scaling])
    names = list(ReservedGpuSeconds().parts)
    columns = ", ".join(f"sum({name}_gpu_seconds)" for name in names)
    [expected] = query(f"SELECT {columns} FROM v_gpu_seconds WHERE sweep = 'scaling'")
    assert [total.parts[name] for name in names] == pytest.approx([it or 0.0 for it in expected])
    assert unreserved is None
    figure = gantt.gpu_seconds([scaling]).figure
    assert figure is not None
    drawn = sum(trace["x"][0] for trace in figure["data"])
    assert drawn == pytest.approx(total.reserved / 3600)
