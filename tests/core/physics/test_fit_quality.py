"""Predicted against measured, and what was learned of each constant."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.fit_quality import Agreement, agreement, fitted_memory, fitted_times
from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

H100 = DEVICES["h100-sxm"]
CELL = Cell(model=PRESETS["llama-3.2-1b"], num_gpus=8, sequence_length=4096, global_batch_size=64)
LAYOUTS = [
    Layout(data_parallel_size=8, micro_batch_size=size, grad_accum_steps=8 // size, zero_stage=1)
    for size in (1, 2)
]
OOM = Layout(data_parallel_size=8, micro_batch_size=8, grad_accum_steps=1)


def observations(slower: float = 1.0, more: float = 1.0) -> list[Observation]:
    table = LayoutTable.of(LAYOUTS)
    seconds = predict_step_time(table, CELL, H100, gpus_per_node=8).total * slower
    memory = predict_memory(table, CELL, Trainer()).total * more
    measured = [
        Observation(
            cell=CELL,
            layout=row,
            hardware=H100,
            gpus_per_node=8,
            step_seconds=float(s),
            peak_memory_bytes=float(m),
        )
        for row, s, m in zip(LAYOUTS, seconds, memory, strict=True)
    ]
    return [
        Observation(cell=CELL, layout=OOM, hardware=H100, gpus_per_node=8, out_of_memory=True),
        *measured,
    ]


def test_ratios_are_predicted_over_measured_and_out_of_memories_are_counted_apart() -> None:
    found = agreement(observations(slower=2.0, more=1.25), Calibration.prior())
    assert found.step_time.ratios == pytest.approx([0.5, 0.5])
    assert found.memory.ratios == pytest.approx([0.8, 0.8])
    assert found.foretold == [
        bool(predict_memory(LayoutTable.of([OOM]), CELL, Trainer()).total[0] > H100.memory_bytes)
    ]
    quantiles = found.memory.quantiles()
    assert quantiles is not None
    assert quantiles["median"] == quantiles["p10"] == pytest.approx(0.8)
    assert (quantiles["median_error"], quantiles["within_15_percent"]) == (pytest.approx(0.2), 0.0)


def test_the_worst_are_named_by_their_place_among_all_observations() -> None:
    rows = observations()
    rows[1] = Observation(
        cell=CELL, layout=LAYOUTS[0], hardware=H100, gpus_per_node=8, step_seconds=1000.0
    )
    found = agreement(rows, Calibration.prior()).step_time
    place, predicted, measured = found.worst(1)[0]
    assert (place, measured) == (1, 1000.0)
    assert predicted < 10.0
    assert len(found.worst(5)) == 2


def test_nothing_measured_has_no_quantiles() -> None:
    found = agreement([], Calibration.prior())
    assert found.step_time.quantiles() is None
    assert found.step_time.worst(3) == []


def test_of_a_constant_is_shown_what_trials_have_taken_of_its_uncertainty() -> None:
    prior = Calibration.prior()
    fitted = calibrate(observations(slower=1.3), prior)
    untouched = {one.name: one for one in fitted_times(prior, prior)}
    assert all(one.from_data == pytest.approx(0.0) for one in untouched.values())
    assert (
        untouched["peak_efficiency"].prior
        == untouched["peak_efficiency"].fitted
        == pytest.approx(0.6)
    )
    constants = {one.name: one for one in fitted_times(prior, fitted)}
    assert 0 < constants["peak_efficiency"].from_data < 1
    assert constants["peak_efficiency"].fitted < 0.6
    memory = {one.name: one for one in fitted_memory(prior, fitted)}
    assert memory["logit_bytes"].is_factor
    assert memory["logit_bytes"].prior == pytest.approx(
        exp(float(prior.memory_values[list(memory).index("logit_bytes")]))
    )
    # Factors end where the amounts begin: two shares, and a reserve.
    amounts = ("gathered_inputs", "gathered_inputs_in_pipeline", "reserve_bytes")
    assert [name for name in memory if not memory[name].is_factor] == [*amounts]
    believed = {one.name: one for one in fitted_memory(prior, prior)}
    assert [(believed[name].prior, believed[name].fitted) for name in amounts] == [
        (1.0, 1.0),
        (1.0, 1.0),
        (0.0, 0.0),
    ]


def test_quantiles_leave_a_tenth_of_the_ratios_on_either_side() -> None:
    """Eleven ratios, a tenth apart: three of them are within 15 %."""
    ratios = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    found = Agreement(
        layouts=LAYOUTS[:1] * 11,
        places=range(11),
        predicted=[10.0 * one for one in ratios],
        measured=[10.0] * 11,
    ).quantiles()
    assert found == pytest.approx(
        {"median": 1.0, "p10": 0.6, "p90": 1.4, "median_error": 0.3, "within_15_percent": 3 / 11}
    )


def test_what_is_predicted_to_fill_the_memory_was_not_foretold_to_exceed_it() -> None:
    prior = Calibration.prior()
    table = LayoutTable.of([OOM])
    (peak,) = prior.expect(table, CELL, H100, gpus_per_node=8)[1]

    def foretold(limit: float) -> list[bool]:
        row = Observation(
            cell=CELL,
            layout=OOM,
            hardware=H100,
            gpus_per_node=8,
            out_of_memory=True,
            memory_limit_bytes=limit,
        )
        return [*agreement([row], prior).foretold]

    assert foretold(float(peak)) == [False]
    assert foretold(float(np.nextafter(peak, 0.0))) == [True]
