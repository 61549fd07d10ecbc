"""Calibration finds known constants from noisy measurements, bad runs and out-of-memories."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate, with_memory_of
from orchestrator.core.physics.memory import Stage, predict_memory
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.step_time_constants import CONSTANTS, StepTimeConstants
from orchestrator.core.physics.trainer import MEMORY_CONSTANTS, Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

H100 = DEVICES["h100-sxm"]
TRUE_CONSTANTS = StepTimeConstants(
    peak_efficiency=0.5, inter_node_share=0.2, bubble_factor=1.4, exposed_data_parallel_share=0.8
)
TRUE_TRAINER = Trainer(
    activation_factor=1.2, pipeline_activation_factor=1.3, reserve_bytes=1.5 * 2**30
)
GIB = 2**30


def cell(num_gpus: int, model: str = "llama-3.1-8b") -> Cell:
    return Cell(
        model=PRESETS[model], num_gpus=num_gpus, sequence_length=4096, global_batch_size=128
    )


def layouts(num_gpus: int) -> list[Layout]:
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for mbs in (1, 2, 4):
                for zero in (0, 1):
                    dp = num_gpus // (tp * pp)
                    if dp and dp * tp * pp == num_gpus and 128 % (dp * mbs) == 0:
                        found.append(
                            Layout(
                                data_parallel_size=dp,
                                tensor_parallel_size=tp,
                                pipeline_parallel_size=pp,
                                micro_batch_size=mbs,
                                grad_accum_steps=128 // (dp * mbs),
                                zero_stage=zero,
                            )
                        )
    return found


def observed(
    problem: Cell,
    *,
    noise: float = 0.03,
    bad_share: float = 0.0,
    trainer: Trainer = TRUE_TRAINER,
    seed: int = 0,
) -> list[Observation]:
    """What a machine with the true constants measures.

    An out-of-memory beyond its limit, and some runs far slower than they should be.
    """
    rng = np.random.default_rng(seed)
    rows = layouts(problem.num_gpus)
    table = LayoutTable.of(rows)
    seconds = predict_step_time(
        table, problem, H100, gpus_per_node=8, constants=TRUE_CONSTANTS
    ).total
    seconds = seconds * np.exp(rng.normal(0, noise, len(rows)))
    seconds[rng.random(len(rows)) < bad_share] *= 6.0
    peaks = predict_memory(table, problem, trainer).total * np.exp(rng.normal(0, 0.02, len(rows)))
    return [
        Observation(
            cell=problem,
            layout=layout,
            hardware=H100,
            gpus_per_node=8,
            step_seconds=float(seconds[row]) if peaks[row] < H100.memory_bytes else None,
            peak_memory_bytes=float(peaks[row]) if peaks[row] < H100.memory_bytes else None,
            out_of_memory=bool(peaks[row] >= H100.memory_bytes),
        )
        for row, layout in enumerate(rows)
    ]


def everything(bad_share: float = 0.0) -> list[Observation]:
    cells = [cell(8), cell(16), cell(64), cell(16, "llama-3.2-3b"), cell(64, "llama-3.2-3b")]
    return [
        row
        for seed, problem in enumerate(cells)
        for row in observed(problem, bad_share=bad_share, seed=seed)
    ]


def error(calibration: Calibration, problem: Cell) -> float:
    table = LayoutTable.of(layouts(problem.num_gpus))
    true = predict_step_time(table, problem, H100, gpus_per_node=8, constants=TRUE_CONSTANTS).total
    predicted = calibration.predict(table, problem, H100, gpus_per_node=8)
    return float(np.median(np.abs(predicted.log_step_seconds - np.log(true))))


def test_of_nothing_the_prior_comes_back() -> None:
    prior = Calibration.prior()
    assert calibrate([], prior).log_constants is prior.log_constants
    assert prior.constants.peak_efficiency == pytest.approx(StepTimeConstants().peak_efficiency)
    assert prior.trainer.reserve_bytes == 0


def test_a_prior_predicts_what_the_formulas_do() -> None:
    table = LayoutTable.of(layouts(16))
    predicted = Calibration.prior().predict(table, cell(16), H100, gpus_per_node=8)
    assert predicted.memory_bytes == pytest.approx(predict_memory(table, cell(16), Trainer()).total)
    assert predicted.step_seconds == pytest.approx(
        predict_step_time(table, cell(16), H100, gpus_per_node=8).total
    )


@pytest.mark.parametrize("bad_share", [0.0, 0.15])
def test_times_of_other_cells_are_predicted_from_what_was_measured(bad_share: float) -> None:
    new = cell(32)
    calibration = calibrate(everything(bad_share), Calibration.prior())
    assert error(Calibration.prior(), new) > 0.15
    assert error(calibration, new) < 0.06


def test_known_constants_come_back_within_their_uncertainty() -> None:
    calibration = calibrate(everything(0.1), Calibration.prior())
    for name in ("peak_efficiency", "inter_node_share", "bubble_factor"):
        at = CONSTANTS.index(name)
        sd = float(np.sqrt(calibration.step_covariance[at, at]))
        assert (
            abs(calibration.log_constants[at] - np.log(getattr(TRUE_CONSTANTS, name)))
            < 4 * sd + 0.05
        )
        assert sd < 0.9 * float(np.sqrt(Calibration.prior().step_covariance[at, at]))


def test_a_cell_that_is_slower_as_a_whole_is_not_blamed_on_the_constants() -> None:
    rows = everything()
    faulty = [
        dataclasses.replace(row, step_seconds=3 * row.step_seconds)
        if row.cell == cell(64) and row.step_seconds
        else row
        for row in rows
    ]
    assert error(calibrate(faulty, Calibration.prior()), cell(32)) < 0.1


def test_memory_of_a_foreign_trainer_is_learned() -> None:
    calibration = calibrate(everything(), Calibration.prior())
    new = cell(32)
    table = LayoutTable.of(layouts(32))
    true = predict_memory(table, new, TRUE_TRAINER).total
    before = Calibration.prior().predict(table, new, H100, gpus_per_node=8).memory_bytes / true
    after = calibration.predict(table, new, H100, gpus_per_node=8).memory_bytes / true
    assert np.median(np.abs(before - 1)) > 0.06
    assert np.median(np.abs(after - 1)) < 0.03
    assert calibration.memory_residual_sd < 0.08


def test_peaks_of_a_model_count_for_it_and_little_for_another() -> None:
    small = "llama-3.2-3b"
    rows = [row for gpus in (8, 16) for row in observed(cell(gpus, small))]
    prior = Calibration.prior(is_known=True)

    def errors(of: Calibration, model: str) -> float:
        problem = cell(32, model)
        table = LayoutTable.of(layouts(32))
        true = predict_memory(table, problem, TRUE_TRAINER).total
        predicted = of.predict(table, problem, H100, gpus_per_node=8).memory_bytes
        return float(np.median(np.abs(predicted / true - 1)))

    own = calibrate(rows, prior, model=cell(8, small).model)
    other = calibrate(rows, prior, model=cell(8).model)
    assert errors(own, small) < 0.03 < 0.06 < errors(prior, small)
    # It moves towards what the other model showed, but not all the way.
    moved = np.abs(other.memory_values - prior.memory_values)
    assert np.all(moved <= np.abs(own.memory_values - prior.memory_values) + 0.01)
    assert errors(own, small) < errors(other, small) < errors(prior, small)
    again = with_memory_of(cell(8, small).model, other, rows, prior)
    assert again.memory_values == pytest.approx(own.memory_values, abs=1e-3)
    assert again.log_constants is other.log_constants


def test_an_out_of_memory_is_a_lower_bound() -> None:
    problem = cell(8)
    rows = [row for row in observed(problem) if row.out_of_memory]
    only_failures = calibrate(rows, Calibration.prior())
    assert only_failures.num_out_of_memory == len(rows) > 3
    assert only_failures.num_times == only_failures.num_peaks == 0
    table = LayoutTable.of([row.layout for row in rows])
    before = Calibration.prior().predict(table, problem, H100, gpus_per_node=8)
    after = only_failures.predict(table, problem, H100, gpus_per_node=8)
    fits_before, fits_after = (p.probability_of_fitting(H100.memory_bytes) for p in (before, after))
    assert np.all(after.memory_bytes >= before.memory_bytes * (1 - 1e-9))
    assert fits_after.max() < fits_before.max()


def test_an_out_of_memory_that_was_predicted_teaches_nothing() -> None:
    row = next(row for row in observed(cell(8)) if row.out_of_memory)
    sure = dataclasses.replace(row, memory_limit_bytes=1.0 * GIB)
    assert calibrate([sure], Calibration.prior()).memory_values == pytest.approx(
        Calibration.prior().memory_values, abs=1e-9
    )


def test_a_run_at_the_edge_of_memory_says_nothing_of_time() -> None:
    row = observed(cell(64))[0]
    edge = dataclasses.replace(row, peak_memory_bytes=0.97 * H100.memory_bytes, step_seconds=1000.0)
    assert edge.thrashes
    assert calibrate([edge], Calibration.prior()).num_times == 0


def test_what_is_measured_in_a_cell_makes_its_predictions_surer() -> None:
    problem = cell(16)
    table = LayoutTable.of(layouts(16))
    prior = Calibration.prior().predict(table, problem, H100, gpus_per_node=8)
    posterior = calibrate(observed(problem), Calibration.prior()).predict(
        table, problem, H100, gpus_per_node=8
    )
    assert posterior.step_jacobian.shape == (len(table), len(CONSTANTS))
    assert posterior.memory_jacobian.shape == (len(table), len(MEMORY_CONSTANTS))
    assert np.all(posterior.log_step_sd < prior.log_step_sd)
    assert np.all(posterior.memory_relative_sd < prior.memory_relative_sd)
    widened = (
        calibrate(observed(problem), Calibration.prior())
        .widened()
        .predict(table, problem, H100, gpus_per_node=8)
    )
    assert np.all(widened.log_step_sd > posterior.log_step_sd)


def test_the_probability_of_fitting_falls_with_memory() -> None:
    table = LayoutTable.of(layouts(16))
    predicted = Calibration.prior().predict(table, cell(16), H100, gpus_per_node=8)
    fits = predicted.probability_of_fitting(float(H100.memory_bytes))
    assert np.all((fits >= 0) & (fits <= 1))
    assert fits[np.argmin(predicted.memory_bytes)] > 0.9
    assert np.all(fits[predicted.memory_bytes > H100.memory_bytes] < 0.5)


def test_peaks_of_the_first_stage_are_compared_with_the_first_stage() -> None:
    problem = cell(16)
    rows = [layout for layout in layouts(16) if layout.pipeline_parallel_size > 1]
    table = LayoutTable.of(rows)
    first = predict_memory(table, problem, Trainer(), stage=Stage.FIRST).total
    told = [
        Observation(
            cell=problem,
            layout=layout,
            hardware=H100,
            gpus_per_node=8,
            peak_memory_bytes=float(peak),
            stage=Stage.FIRST,
        )
        for layout, peak in zip(rows, first, strict=True)
    ]
    assert calibrate(told, Calibration.prior()).memory_values == pytest.approx(
        Calibration.prior().memory_values, abs=1e-3
    )


@pytest.mark.parametrize("name", ["step_seconds", "peak_memory_bytes", "memory_limit_bytes"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_without_a_logarithm_is_no_observation(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} {value}.*not read is None"):
        dataclasses.replace(observed(cell(8))[0], **{name: value})  # type: ignore[arg-type]
