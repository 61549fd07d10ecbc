"""What the formula misses of a kind of layout is carried to other cells; one run alone is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.fit_quality import agreement
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.residual import MOST, Residual, places_of
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

H100 = DEVICES["h100-sxm"]
# Groups of four are so much slower on the machine of these tests: the formula does not know it.
SLOW = 1.4


def cell(num_gpus: int) -> Cell:
    return Cell(
        model=PRESETS["llama-3.2-3b"],
        num_gpus=num_gpus,
        sequence_length=4096,
        global_batch_size=128,
    )


def layouts(num_gpus: int) -> list[Layout]:
    return [
        Layout(
            data_parallel_size=num_gpus // tp,
            tensor_parallel_size=tp,
            micro_batch_size=mbs,
            grad_accum_steps=128 // (mbs * num_gpus // tp),
            zero_stage=zero,
        )
        for tp in (1, 2, 4, 8)
        for mbs in (1, 2)
        for zero in (0, 1)
        if 128 % (mbs * num_gpus // tp) == 0
    ]


def seconds(problem: Cell) -> np.ndarray:
    table = LayoutTable.of(layouts(problem.num_gpus))
    formula = predict_step_time(table, problem, H100, gpus_per_node=8).total
    return formula * np.where(table.tensor_parallel_size == 4, SLOW, 1.0)


def observed(problem: Cell) -> list[Observation]:
    return [
        Observation(
            cell=problem, layout=layout, hardware=H100, gpus_per_node=8, step_seconds=float(taken)
        )
        for layout, taken in zip(layouts(problem.num_gpus), seconds(problem), strict=True)
    ]


def errors_of_fours(calibration: Calibration, problem: Cell) -> np.ndarray:
    table = LayoutTable.of(layouts(problem.num_gpus))
    predicted = calibration.predict(table, problem, H100, gpus_per_node=8).log_step_seconds
    return (predicted - np.log(seconds(problem)))[table.tensor_parallel_size == 4]


def test_what_is_missed_of_a_kind_of_layout_is_known_in_the_next_cell() -> None:
    calibration = calibrate(
        [row for gpus in (8, 16, 64) for row in observed(cell(gpus))], Calibration.prior()
    )
    constants_alone = dataclasses.replace(calibration, residuals={})
    without, carried = (
        np.median(errors_of_fours(found, cell(32))) for found in (constants_alone, calibration)
    )
    assert without < -0.8 * np.log(SLOW)
    # Twos and eights are one doubling away and not slow: a smooth function goes a part of the way.
    assert 0.8 * without < carried < 0


def test_of_one_cell_alone_nothing_is_carried() -> None:
    assert not calibrate(observed(cell(16)), Calibration.prior()).residuals


def test_what_was_learned_first_is_not_learned_again() -> None:
    rows = [row for gpus in (8, 16, 64) for row in observed(cell(gpus))]
    once = calibrate(rows, Calibration.prior())
    twice = calibrate(rows, once)
    (first,), (_, second) = once.residuals[H100.name], twice.residuals[H100.name]
    places = places_of(LayoutTable.of(layouts(32)), cell(32))
    assert np.abs(second.at(places)).max() < 0.5 * np.abs(first.at(places)).max()


def test_constants_are_held_against_measurements_without_what_those_taught_of_themselves() -> None:
    rows = [row for gpus in (8, 16, 64) for row in observed(cell(gpus))]
    found = calibrate(rows, Calibration.prior())
    bare = dataclasses.replace(found, residuals={})
    assert agreement(rows, found).step_time.ratios == agreement(rows, bare).step_time.ratios


def test_one_run_far_off_its_neighbours_is_taken_as_disturbed() -> None:
    places = np.stack([np.repeat(np.arange(5.0), 5), np.tile(np.arange(5.0), 5)], axis=1)
    errors = np.full(25, 0.1)
    # Seven times as slow as the eight around it.
    errors[12] = 2.0
    assert Residual.fit(places, errors).at(places[12:13])[0] == pytest.approx(0.1, abs=0.1)


def test_far_from_every_run_nothing_is_said() -> None:
    residual = Residual.fit(np.zeros((3, 2)), np.full(3, 0.3))
    near, far = residual.at(np.array([[0.0, 0.0], [40.0, 0.0]]))
    assert near > 0.2
    assert abs(far) < 1e-3


def test_of_more_runs_than_it_can_hold_it_takes_an_even_spread() -> None:
    places = np.linspace(0.0, 30.0, MOST + 500)[:, None]
    residual = Residual.fit(places, np.where(places[:, 0] > 15.0, 0.2, -0.2))
    assert len(residual.weights) == MOST
    assert residual.at(np.array([[1.0], [29.0]])) == pytest.approx([-0.2, 0.2], abs=0.03)


@pytest.mark.parametrize(
    ("change", "doublings"),
    [
        ({"tensor_parallel_size": 4}, 1.0),
        ({"micro_batch_size": 4}, 2.0),
        ({"zero_stage": 1}, 2.0),
        (
            {"recompute": Recompute.parse("full")},
            1.5,
            # A third more FLOPs of the layers, none of the head.
        ),
    ],
)
def test_layouts_lie_apart_by_doublings(change: dict[str, Any], doublings: float) -> None:
    layout = Layout(tensor_parallel_size=2)
    table = LayoutTable.of([layout, dataclasses.replace(layout, **change)])
    places = places_of(table, cell(8))
    assert np.linalg.norm(places[1] - places[0]) == pytest.approx(doublings, abs=0.3)
