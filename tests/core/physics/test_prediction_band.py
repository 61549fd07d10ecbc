"""The bands of predicted step times: wider across nodes, narrower after measurements, and true for
made-up measurements.
"""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.prediction_band import FORMULA_SD, FitErrors, step_spreads
from orchestrator.core.physics.residual import Residual, left_out_errors
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.quantile import Z90

H100 = DEVICES["h100-sxm"]


def cell(num_gpus: int, length: int = 4096) -> Cell:
    return Cell(
        model=PRESETS["llama-3.1-8b"],
        num_gpus=num_gpus,
        sequence_length=length,
        global_batch_size=256,
    )


def layouts(num_gpus: int) -> list[Layout]:
    return [
        Layout(
            data_parallel_size=num_gpus // (tp * pp),
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=m,
            grad_accum_steps=256 * tp * pp // (num_gpus * m),
        )
        for tp in (1, 2, 8)
        for pp in (1, 2)
        for m in (1, 2)
        if num_gpus % (tp * pp) == 0 and 256 * tp * pp % (num_gpus * m) == 0
    ]


def measured(
    one: Cell, *, factor: float, rng: np.random.Generator, noise: float
) -> list[Observation]:
    """As if each layout had taken its predicted time, times a factor of the cell and noise."""
    table = LayoutTable.of(layouts(one.num_gpus))
    seconds = Calibration.prior().predict(table, one, H100, gpus_per_node=8).step_seconds
    return [
        Observation(
            cell=one,
            layout=table.layout(row),
            hardware=H100,
            gpus_per_node=8,
            step_seconds=float(seconds[row]) * factor * exp(noise * rng.standard_normal()),
        )
        for row in range(len(table))
    ]


def test_a_pipeline_over_many_nodes_is_known_least_and_only_in_one_direction() -> None:
    def above(num_gpus: int, **sizes: int) -> float:
        table = LayoutTable.of(
            [Layout(data_parallel_size=num_gpus // np.prod(list(sizes.values()) or [1]), **sizes)]
        )
        below, found = step_spreads(table, cell(num_gpus), H100, gpus_per_node=8)
        assert below[0] == FORMULA_SD
        return float(found[0])

    assert above(8) == above(8, pipeline_parallel_size=2) == FORMULA_SD  # nothing leaves the node
    assert (
        above(8)
        < above(64)
        < above(64, tensor_parallel_size=16)
        < above(64, pipeline_parallel_size=2)
    )
    assert above(16, pipeline_parallel_size=2) < above(64, pipeline_parallel_size=2)


def test_a_device_that_the_constants_are_not_known_from_is_known_less() -> None:
    table = LayoutTable.of([Layout(data_parallel_size=8)])
    spreads = [
        step_spreads(table, cell(8), DEVICES[name], gpus_per_node=8)
        for name in ("h100-sxm", "v100-32gb")
    ]
    assert spreads[1][0][0] > spreads[0][0][0]


def test_before_anything_is_measured_the_band_is_the_spread_of_published_estimators() -> None:
    table = LayoutTable.of([Layout(data_parallel_size=8)])
    low, high = Calibration.prior().predict(table, cell(8), H100, gpus_per_node=8).step_band()
    assert (low[0], high[0]) == pytest.approx((exp(-Z90 * FORMULA_SD), exp(Z90 * FORMULA_SD)))


@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_after_a_fit_four_of_five_measurements_of_another_cell_lie_in_the_band(
    noise: float,
) -> None:
    rng = np.random.default_rng(1)
    cells = [cell(8, length) for length in (1024, 1536, 2048, 3072, 4096, 6144, 8192)]
    inside = []
    for _ in range(4):
        rows = {
            one: measured(one, factor=exp(0.05 * rng.standard_normal()), rng=rng, noise=noise)
            for one in cells
        }
        for left in cells[::3]:
            found = calibrate(
                [row for one in cells if one is not left for row in rows[one]], Calibration.prior()
            )
            predicted = found.predict(
                LayoutTable.of(row.layout for row in rows[left]), left, H100, gpus_per_node=8
            )
            low, high = predicted.step_band()
            ratios = np.array([row.step_seconds for row in rows[left]]) / predicted.step_seconds
            inside += list((ratios >= low) & (ratios <= high))
    # With few cells the widths of before still count.
    assert 0.7 <= float(np.mean(inside)) <= 0.97


def test_what_was_measured_narrows_the_band_or_widens_it() -> None:
    rng = np.random.default_rng(2)
    table = LayoutTable.of([Layout(data_parallel_size=8, micro_batch_size=2, grad_accum_steps=16)])
    widths = []
    for noise in (0.01, 0.6):
        cells = [cell(8, length) for length in (1024, 1536, 2048, 3072, 4096, 6144)]
        rows = [row for one in cells for row in measured(one, factor=1.0, rng=rng, noise=noise)]
        low, high = (
            calibrate(rows, Calibration.prior())
            .predict(table, cell(8, 8192), H100, gpus_per_node=8)
            .step_band()
        )
        widths.append(float(high[0] / low[0]))
    assert widths[0] < exp(2 * Z90 * FORMULA_SD) < widths[1]


def test_an_error_that_is_left_out_is_what_the_others_do_not_tell() -> None:
    """The errors of a left-out cell are those of a fit without it."""
    rng = np.random.default_rng(3)
    places, cells = rng.normal(size=(30, 3)), np.repeat(np.arange(3), 10)
    errors = np.where(cells == 2, 0.4, 0.0) + 0.02 * rng.standard_normal(30)
    _, left = left_out_errors(places, errors, cells)
    mine = cells == 2
    expected = errors[mine] - Residual.fit(places[~mine], errors[~mine]).at(places[mine])
    # Noise is weighed with all of them.
    assert left[mine] == pytest.approx(expected, abs=0.05)
    alone = left_out_errors(places, errors, np.zeros(30, dtype=np.intp))[1]
    assert np.array_equal(alone, errors)


def test_memory_is_known_better_of_a_trainer_that_is_named() -> None:
    table = LayoutTable.of([Layout(data_parallel_size=8, tensor_parallel_size=1)])
    bands = [
        Calibration.prior(is_known=known)
        .predict(table, cell(8), H100, gpus_per_node=8)
        .memory_band()
        for known in (True, False)
    ]
    assert bands[0][1][0] < bands[1][1][0]
    assert bands[0][0][0] == bands[1][0][0]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_band_of_many_cells_whose_errors_have_one_sign_ends_at_the_prediction(
    sign: int,
) -> None:
    """A prediction lies within its own band, also where all were too low or too high."""
    num = 2000
    errors = sign * np.full(num, 0.5)
    fit = FitErrors(
        places=np.zeros((num, 1)),
        errors=errors,
        offsets=np.zeros(num),
        cells=np.arange(num),
        below=np.full(num, 0.1),
        above=np.full(num, 0.25),
    )
    low, high = fit.quantiles_within
    if sign > 0:
        assert low == 0.0 and high == pytest.approx(0.5 / 0.25, rel=0.02)
    else:
        assert high == 0.0 and low == pytest.approx(-0.5 / 0.1, rel=0.02)
