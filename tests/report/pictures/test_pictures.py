"""The values of each picture are those that SQL computes from the same store."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.trial.reserved_time import ReservedGpuSeconds
from orchestrator.report.comparison import Change, Compared, speed_of
from orchestrator.report.pictures import (
    best_so_far,
    compared,
    efficiency,
    failures,
    gantt,
    heat_map,
    importance,
    memory_bars,
    memory_boundary,
    parallel,
    pareto,
    prediction,
    profiles,
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
        assert sum(bar.predicted_parts.values()) == pytest.approx(bar.predicted_bytes)


def test_a_sweep_with_a_file_has_the_parts_of_its_predictions(scaling: SweepRows) -> None:
    spec = load(
        "name: mine\nmodel: llama-tiny\ngpus: 2\nsequence_length: 128\nglobal_batch_size: 64\n",
        source="test",
    )
    row = replace(scaling.sweep, spec_json=spec.model_dump_json())
    for bar in memory_bars.bars([replace(scaling, sweep=row)]):
        assert {"parameters", "gradients", "optimizer", "activations"} <= set(bar.predicted_parts)
        assert sum(bar.predicted_parts.values()) == pytest.approx(bar.predicted_bytes)


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


def test_efficiency_is_that_of_the_view(scaling: SweepRows, query: Query) -> None:
    strong = [line for line in efficiency.lines([scaling]) if not line.is_weak]
    expected = query(
        "SELECT trial_id, num_gpus, efficiency FROM v_scaling WHERE sweep = 'scaling' ORDER BY 2"
    )
    [line] = strong
    assert [(it.trial_id, it.num_gpus) for it in line.points] == [row[:2] for row in expected]
    assert [it.efficiency for it in line.points] == pytest.approx([row[2] for row in expected])


def test_the_front_is_the_one_that_comparing_all_pairs_finds(
    scaling: SweepRows, tiny: SweepRows
) -> None:
    found = pareto.candidates([scaling])

    def beats(a: pareto.Candidate, b: pareto.Candidate) -> bool:
        ours = (-a.tokens_per_second_per_gpu, a.memory_bytes, a.num_gpus)
        theirs = (-b.tokens_per_second_per_gpu, b.memory_bytes, b.num_gpus)
        return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))

    front = {one.trial_id for one in found if not any(beats(other, one) for other in found)}
    assert {one.trial_id for one in found if one.is_on_front} == front
    assert 0 < len(front) < len(found) == 6
    # Power is known there: 612 W at the measured speed.
    [joules] = {
        round(it.joules_per_token * it.tokens_per_second_per_gpu)
        for it in pareto.candidates([tiny])
        if it.joules_per_token is not None
    }
    assert joules == 612


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6), st.integers(1, 6), st.sampled_from([8, 16]), st.integers(1, 4)
        ),
        max_size=30,
    )
)
def test_the_front_of_any_layouts_is_that_of_all_pairs(
    rows: list[tuple[int, int, int, int]],
) -> None:
    some = [
        pareto.Candidate(
            trial_id=number,
            problem="one",
            tokens_per_second_per_gpu=float(speed),
            memory_bytes=memory,
            num_gpus=gpus,
            joules_per_token=float(joules),
        )
        for number, (speed, memory, gpus, joules) in enumerate(rows)
    ]

    def is_beaten(mine: tuple[int, int, int, int]) -> bool:
        return any(
            other != mine
            and other[0] >= mine[0]
            and other[1:] <= mine[1:]
            and all(a <= b for a, b in zip(other[1:], mine[1:], strict=True))
            for other in rows
        )

    front = {number for number, row in enumerate(rows) if not is_beaten(row)}
    assert {one.trial_id for one in pareto.front(some)} == front


def test_the_caption_of_the_boundary_counts_as_sql_does(
    scaling: SweepRows, tiny: SweepRows, query: Query
) -> None:
    points = memory_boundary.points([scaling, tiny])
    found = memory_boundary.foretold(points)
    assert sum(one.is_wrong for one in points) == found.missed + found.false_alarms
    [(fits, alarms)] = query(
        "SELECT sum(predicted_memory_bytes <= device_memory_bytes),"
        " sum(predicted_memory_bytes > device_memory_bytes) FROM v_trial WHERE state = 'measured'"
    )
    assert (found.fits, found.false_alarms) == (fits, alarms)
    [(missed, caught)] = query(
        "SELECT sum(predicted_memory_bytes <= failure_device_memory_bytes),"
        " sum(predicted_memory_bytes > failure_device_memory_bytes) FROM v_oom"
        " WHERE state = 'out_of_memory'"
    )
    assert (found.missed, found.caught) == (missed or 0, caught or 0)
    drawn = query(
        "SELECT count(*) FROM v_trial WHERE state IN ('measured', 'out_of_memory', 'pruned')"
    )
    assert [(len(points),)] == drawn


def test_an_axis_that_decides_everything_has_all_of_the_importance(scaling: SweepRows) -> None:
    found = {one.axis: one.share for one in importance.importances([scaling])}
    # Micro-batch and accumulation follow from each other here.
    assert found == {"mbs": pytest.approx(1.0), "ga": pytest.approx(1.0)}


def test_chance_alone_has_no_importance() -> None:
    groups = [[0.1, -0.1], [0.1, -0.1], [-0.1, 0.1]]
    assert importance.between(groups, 0.06) == 0.0


def test_parallel_coordinates_have_a_line_for_each_layout(scaling: SweepRows) -> None:
    figure = parallel.picture([scaling]).figure
    assert figure is not None
    ends = [trace["x"].count(None) for trace in figure["data"]]
    assert sum(ends) == 6


def test_the_parts_of_a_step_add_up_to_it(scaling: SweepRows) -> None:
    [split] = profiles.splits([scaling])
    assert split.rank == 1  # the slowest
    assert sum(split.seconds.values()) == pytest.approx(1e-3)
    figure = profiles.step_split([scaling]).figure
    assert figure is not None
    assert sum(trace["x"][0] for trace in figure["data"]) == pytest.approx(1.0)


def test_the_peak_of_the_memory_timeline_is_named(scaling: SweepRows) -> None:
    found = profiles.memory_timeline([scaling])
    assert "the peak of 5.0 GiB is in backward of step 2" in found.caption
    assert found.num_marks == 4


def test_two_sweeps_are_compared_by_the_layouts_of_both(
    scaling: SweepRows, tiny: SweepRows
) -> None:
    found = compared.comparison([scaling, scaling])
    assert found is not None
    assert len(found.layouts) == 6
    assert {one.change for one in found.layouts} == {Change.NOISE}
    assert "6 noise" in compared.picture([scaling, scaling]).caption
    of_one = compared.comparison([tiny])
    assert of_one is not None
    assert of_one.changed == "torch 2.9.0 -> 2.13.0"


@pytest.mark.parametrize(
    ("after", "change"),
    [
        (1000.0, Change.NOISE),
        (1070.0, Change.NOISE),
        (1090.0, Change.FASTER),
        (900.0, Change.SLOWER),
    ],
)
def test_a_difference_within_the_intervals_is_noise(after: float, change: Change) -> None:
    # Two single runs of 2 % each: their intervals of 95 % touch at 1.96 * 2 * 2 % = 8 %.
    one = Compared(
        cell="c",
        layout="l",
        before=speed_of(1, [(1000.0, None)]),
        after=speed_of(2, [(after, 0.01)]),
    )
    assert one.change is change
    assert one.ratio == pytest.approx(after / 1000)
