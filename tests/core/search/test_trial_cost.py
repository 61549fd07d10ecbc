"""The cost of a plan: closed forms for the median, and a spread that grows with ignorance."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest

from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.search.planner import CellPlan, plan_cell
from orchestrator.core.search.trial_cost import (
    TIMED_STEPS,
    Z90,
    PlannedCost,
    TrialCost,
    cost_of,
    total,
)
from orchestrator.core.sweepfile.measurement_section import Measuring
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.measurement import LAUNCH_SECONDS
from orchestrator.core.trial.protocol import Device

TRIAL = TrialCost(launch_seconds=30.0, launch_sd=0.0, num_steps=20.0, num_steps_sd=0.0)


def plan(device: str | None = "h100-sxm", **changes: Any) -> CellPlan:
    spec = SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-3.1-8b",
            "sequence_length": 4096,
            "global_batch_size": 64,
            "gpus": 8,
            "axes": {"micro_batch_size": [1, 2, 4], "recompute": ["full"], "zero_stage": [0, 1]},
        }
        | changes
    )
    return plan_cell(
        spec,
        spec.cells()[0],
        hardware=DEVICES[device] if device else None,
        gpus_per_node=8,
        device=Device.CPU,
    )


def cost(
    planned: CellPlan, num_trials: int, trial: TrialCost = TRIAL, **choice: Any
) -> PlannedCost:
    found = cost_of(
        planned.candidates, planned.space.cell, num_trials=num_trials, trial=trial, **choice
    )
    assert found is not None
    return found


def test_the_median_is_steps_and_launches_on_all_gpus() -> None:
    planned = plan()
    candidates = planned.candidates
    fitting = candidates.order[: int(candidates.fits.sum())]
    held = sum(20.0 * candidates.step_seconds[row] + 30.0 for row in fitting)
    assert cost(planned, len(fitting)).gpu_hours == pytest.approx(8 * held / 3600)


def test_what_is_predicted_not_to_fit_holds_a_launch() -> None:
    planned = plan()
    num_fitting = int(planned.candidates.fits.sum())
    assert 0 < num_fitting < len(planned.candidates)
    more = cost(planned, num_fitting + 1).gpu_hours - cost(planned, num_fitting).gpu_hours
    assert more == pytest.approx(8 * 30.0 / 3600)


def test_ninety_per_cent_of_a_log_normal_lie_below_p90() -> None:
    found = PlannedCost(gpu_hours=100.0, shared_sd=0.3, own_sd=0.4)
    assert found.sd == pytest.approx(0.5)
    assert found.gpu_hours_p90 == pytest.approx(100.0 * exp(Z90 * 0.5))
    draws = 100.0 * np.exp(0.5 * np.random.default_rng(0).standard_normal(100_000))
    assert float((draws < found.gpu_hours_p90).mean()) == pytest.approx(0.9, abs=0.005)


def test_what_is_not_known_of_launches_steps_and_the_cell_widens_the_spread() -> None:
    planned = plan()
    least = cost(planned, 3, knows_cell=True).sd
    assert cost(planned, 3).sd > least
    assert cost(planned, 3, replace(TRIAL, launch_sd=0.6), knows_cell=True).sd > least
    assert cost(planned, 3, replace(TRIAL, num_steps_sd=0.3), knows_cell=True).sd > least


def test_launches_alone_spread_as_launches_do() -> None:
    planned = plan(device_memory_gib=1.0)  # nothing fits
    found = cost(planned, 2, replace(TRIAL, launch_sd=0.6))
    assert found.gpu_hours == pytest.approx(2 * 8 * 30.0 / 3600)
    assert found.sd == pytest.approx(0.6)


def test_errors_that_cells_share_add_up_and_those_of_their_own_partly_even_out() -> None:
    cells = [PlannedCost(gpu_hours=10.0, shared_sd=0.2, own_sd=0.4)] * 4
    found = total(cells)
    assert found is not None
    assert found.gpu_hours == 40.0
    assert found.shared_sd == pytest.approx(0.2)
    assert found.own_sd == pytest.approx(0.4 / sqrt(4))


def test_without_predicted_times_there_is_no_cost() -> None:
    planned = plan(device=None)
    assert cost_of(planned.candidates, planned.space.cell, num_trials=3, trial=TRIAL) is None
    assert total([None, PlannedCost(gpu_hours=1.0, shared_sd=0.1, own_sd=0.1)]) is None
    assert total([]) is None


def test_steps_of_a_trial_stay_within_what_the_file_allows() -> None:
    plan = Measuring(warmup_steps=3, min_steps=5, max_steps=10)
    usual = TrialCost.of(plan, launch_seconds=None, timed_steps=None)
    assert TIMED_STEPS > 10
    assert (usual.num_steps, usual.launch_seconds) == (13.0, LAUNCH_SECONDS)
    measured = TrialCost.of(plan, launch_seconds=4.0, timed_steps=6.0)
    assert (measured.num_steps, measured.launch_seconds) == (9.0, 4.0)
    assert measured.launch_sd < usual.launch_sd
    assert measured.num_steps_sd < usual.num_steps_sd


def test_short_steps_on_a_gpu_are_timed_for_seconds_and_cost_them() -> None:
    usual = TrialCost.of(Measuring(), launch_seconds=60.0, timed_steps=None, device=Device.CUDA)
    # 2 s of warm-up and 5 s of timed steps.
    assert usual.seconds(0.06) == 60.0 + 7.0
    assert usual.seconds(10.0) == 60.0 + usual.num_steps * 10.0
    on_cpu = TrialCost.of(Measuring(), launch_seconds=60.0, timed_steps=None)
    assert on_cpu.seconds(0.06) == pytest.approx(60.0 + on_cpu.num_steps * 0.06)


def test_a_plan_counts_the_seconds_that_short_steps_are_timed_for() -> None:
    planned, num = plan(), 5
    longest = float(planned.candidates.step_seconds.max())
    least = replace(TRIAL, least_seconds=3 * TRIAL.num_steps * longest)
    found = cost_of(planned.candidates, planned.space.cell, num_trials=num, trial=least)
    assert found is not None
    rows = planned.candidates.order[:num]
    seconds = num * TRIAL.launch_seconds + planned.candidates.fits[rows].sum() * least.least_seconds
    assert found.gpu_hours == pytest.approx(seconds * planned.space.cell.num_gpus / 3600)
    by_steps = cost(planned, num)
    assert found.own_sd < by_steps.own_sd, "their own errors no longer matter"


def test_the_spread_of_one_trial_is_that_of_its_steps_and_its_launch() -> None:
    """The share of the steps times the constants' spread, the formula's, and the cell's 15 %."""
    planned = plan()
    candidates = planned.candidates
    row = candidates.order[:1]
    assert candidates.predict is not None
    predicted = candidates.predict(candidates.table.take(row))
    steps = 20.0 * float(candidates.step_seconds[row[0]])
    share = steps / (steps + 30.0)
    slope = share * predicted.step_jacobian[0]
    constants = float(slope @ predicted.step_covariance @ slope)
    trial = replace(TRIAL, launch_sd=0.6, num_steps_sd=0.3)
    found = cost(planned, 1, trial)
    assert found.shared_sd == pytest.approx(
        sqrt(constants + ((1 - share) * 0.6) ** 2 + (share * 0.3) ** 2)
    )
    residual = predicted.step_residual_sd
    assert residual == 0.2
    assert found.own_sd == pytest.approx(sqrt((share * residual) ** 2 + (share * 0.15) ** 2))
    known = cost(planned, 1, trial, knows_cell=True)
    assert known.own_sd == pytest.approx(share * residual)
    # Two alike even out what each has of its own.
    twice = replace(candidates, order=np.array([row[0], row[0]]))
    both = cost_of(twice, planned.space.cell, num_trials=2, trial=trial, knows_cell=True)
    assert both is not None
    assert both.own_sd == pytest.approx(share * residual / sqrt(2))


def test_usual_launches_and_steps_are_less_known_than_measured_ones() -> None:
    plan = Measuring(warmup_steps=3, min_steps=5, max_steps=100)
    usual = TrialCost.of(plan, launch_seconds=None, timed_steps=None)
    measured = TrialCost.of(plan, launch_seconds=4.0, timed_steps=6.0)
    assert (usual.launch_sd, usual.num_steps_sd, usual.num_steps) == (0.6, 0.3, 25.0)
    assert (measured.launch_sd, measured.num_steps_sd) == (0.2, 0.1)
    assert (usual.is_launch_measured, measured.is_launch_measured) == (False, True)
    assert measured.seconds(2.0) == 4.0 + 9.0 * 2.0
