"""Why a layout is illegal, does not fit, or is slow; and the smallest change that helps."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.search.explanation import Explanation, explain
from orchestrator.core.search.planner import CellPlan, plan_cell, trainer_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device

H100 = DEVICES["h100-sxm"]
FULL = Recompute.parse("full")


def spec(**changes: Any) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-3.1-8b",
            "sequence_length": 4096,
            "global_batch_size": 64,
            "gpus": 8,
            "device": "h100-sxm",
            "axes": {
                "micro_batch_size": [1, 2, 4, 8],
                "recompute": ["none", "full"],
                "zero_stage": [0, 1],
            },
        }
        | changes
    )


def plan(chosen: SweepSpec) -> CellPlan:
    return plan_cell(chosen, chosen.cells()[0], hardware=H100, gpus_per_node=8, device=Device.CPU)


def explained(layout: Layout, **changes: Any) -> Explanation:
    chosen = spec(**changes)
    calibration = Calibration.prior(trainer_of(chosen, device=Device.CPU))
    planned = plan(chosen)
    return explain(
        planned,
        layout,
        illegal=planned.space.reason(layout),
        calibration=calibration,
        hardware=H100,
        gpus_per_node=8,
    )


def layout(micro_batch_size: int, recompute: Recompute = FULL, zero_stage: int = 1) -> Layout:
    return Layout(
        data_parallel_size=8,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=8 // micro_batch_size,
        recompute=recompute,
        zero_stage=zero_stage,
    )


def test_parts_add_up_to_what_the_plan_predicts() -> None:
    planned = plan(spec())
    for row in range(len(planned.candidates)):
        found = explained(planned.candidates.table.layout(row))
        assert found.memory_bytes == pytest.approx(planned.candidates.memory_bytes[row])
        assert found.step_seconds == pytest.approx(planned.candidates.step_seconds[row])
        assert found.tokens_per_second_per_gpu == pytest.approx(
            planned.candidates.tokens_per_second_per_gpu[row]
        )
        assert found.fits == planned.candidates.fits[row]


def test_what_fills_the_limit_fits() -> None:
    found = explained(layout(1))
    exactly = replace(found, memory_limit_bytes=found.memory_bytes)
    assert exactly.fits
    assert not replace(found, memory_limit_bytes=np.nextafter(found.memory_bytes, 0.0)).fits


def test_the_utilisation_is_known_where_time_and_peak_are() -> None:
    """6 and more FLOPs a weight and token, at 989 TFLOP/s."""
    found = explained(layout(1))
    speed = found.tokens_per_second_per_gpu
    assert speed is not None
    flops = found.cell.model.flops_per_token(4096)
    assert found.mfu == pytest.approx(speed * flops / 989e12, rel=1e-3)
    assert replace(found, peak_flops=None).mfu is None
    assert replace(found, seconds_by_part=None).mfu is None


def test_a_cell_that_takes_twice_as_long_as_its_formula_is_explained_so() -> None:
    chosen = spec()
    planned = plan(chosen)
    prior = Calibration.prior(trainer_of(chosen, device=Device.CPU))
    twice = replace(prior, cell_offsets={(planned.space.cell, H100.name): float(np.log(2.0))})
    once, slower = (
        explain(
            planned,
            layout(1),
            illegal=None,
            calibration=calibration,
            hardware=H100,
            gpus_per_node=8,
        ).step_seconds
        for calibration in (prior, twice)
    )
    assert once is not None
    assert slower == pytest.approx(2 * once)


def test_states_are_16_bytes_a_weight_and_shards_are_their_own_masters() -> None:
    weights = spec().cells()[0].model.num_parameters
    parts = explained(layout(1, zero_stage=0)).memory_by_part
    assert parts["parameters"] == parts["gradients"] == 2 * weights
    assert parts["optimizer"] == 12 * weights
    # Fp32 weights and both moments, over 8 ranks.
    shards = explained(layout(1)).memory_by_part
    assert shards["parameters"] == 4 * weights / 8
    assert shards["optimizer"] == 8 * weights / 8


def test_what_does_not_fit_is_told_the_smallest_change_that_makes_it_fit() -> None:
    found = explained(layout(1, zero_stage=0))  # 120 GiB of states
    assert not found.fits
    assert found.to_fit is not None
    assert found.to_fit.fits
    assert set(found.to_fit.differs) == {"zero_stage"}


def test_a_micro_batch_and_the_accumulation_that_follows_from_it_are_one_change() -> None:
    # 40.8 GiB, or 38.3 with half the micro-batch.
    found = explained(layout(8), device_memory_gib=40)
    assert not found.fits
    assert found.to_fit is not None
    assert set(found.to_fit.differs) == {"micro_batch_size", "grad_accum_steps"}


def test_where_nothing_fits_no_change_is_told() -> None:
    found = explained(layout(1), device_memory_gib=1.0)
    assert not found.fits
    assert found.to_fit is None
    assert found.faster == ()


def test_what_is_told_to_be_faster_is_one_choice_away_fits_and_is_ordered() -> None:
    found = explained(layout(1))
    assert found.faster
    own = found.step_seconds
    seconds = [change.step_seconds for change in found.faster]
    assert own is not None
    assert all(second is not None and second < own for second in seconds)
    assert seconds == sorted(seconds, key=lambda second: second or 0.0)
    for change in found.faster:
        assert change.fits
        assert len(set(change.differs) - {"data_parallel_size", "grad_accum_steps"}) == 1


def test_a_size_between_two_legal_ones_is_told_both() -> None:
    found = explained(
        layout(8).__class__(
            data_parallel_size=8,
            micro_batch_size=3,
            grad_accum_steps=1,
            recompute=FULL,
            zero_stage=1,
        )
    )
    sizes = [change.layout.micro_batch_size for change in found.nearest]
    assert sizes[:2] == [4, 2]


def test_the_best_predicted_layout_has_nothing_faster_beside_it() -> None:
    planned = plan(spec())
    assert explained(planned.candidates.table.layout(int(planned.candidates.order[0]))).faster == ()


def test_an_illegal_layout_is_told_its_rule_and_the_nearest_legal_ones() -> None:
    found = explained(
        layout(8).__class__(
            data_parallel_size=8,
            micro_batch_size=16,
            grad_accum_steps=1,
            recompute=FULL,
            zero_stage=1,
        )
    )
    assert found.illegal is not None
    assert "micro_batch_size 16" in found.illegal
    nearest = found.nearest[0].layout
    assert (nearest.micro_batch_size, nearest.recompute, nearest.zero_stage) == (8, FULL, 1)
    doublings = [
        log2(16 / change.layout.micro_batch_size)
        for change in found.nearest
        if set(change.differs) == {"micro_batch_size"}
    ]
    assert doublings == sorted(doublings)


def test_on_unknown_hardware_only_memory_is_explained() -> None:
    chosen = spec(device="cpu")
    planned = plan_cell(
        chosen, chosen.cells()[0], hardware=None, gpus_per_node=8, device=Device.CPU
    )
    found = explain(
        planned,
        layout(1),
        illegal=None,
        calibration=Calibration.prior(),
        hardware=None,
        gpus_per_node=8,
    )
    assert (
        found.seconds_by_part,
        found.step_seconds,
        found.tokens_per_second_per_gpu,
        found.probability_of_fitting,
    ) == (None,) * 4
    assert found.memory_bytes > 0


def test_the_chance_to_fit_is_that_of_the_usable_memory() -> None:
    chosen = spec()
    calibration = Calibration.prior(trainer_of(chosen, device=Device.CPU))
    (cell,) = chosen.cells()
    for one in (layout(8, Recompute()), layout(2, Recompute())):
        predicted = calibration.predict(LayoutTable.of([one]), cell, H100, gpus_per_node=8)
        wanted = predicted.probability_of_fitting(0.98 * H100.memory_bytes)[0]
        assert explained(one).probability_of_fitting == pytest.approx(wanted)
        assert 0.0 < wanted < 1.0


@pytest.mark.parametrize(("share", "is_told"), [(1.004, False), (0.996, False), (0.994, True)])
def test_a_layout_is_faster_from_half_a_percent_on(share: float, *, is_told: bool) -> None:
    chosen = spec()
    planned, one = plan(chosen), layout(1)
    own = explained(one).step_seconds
    assert own is not None
    seconds = np.full(len(planned.candidates), share * own)
    planned = replace(planned, candidates=replace(planned.candidates, step_seconds=seconds))
    found = explain(
        planned,
        one,
        illegal=None,
        calibration=Calibration.prior(trainer_of(chosen, device=Device.CPU)),
        hardware=H100,
        gpus_per_node=8,
    )
    assert bool(found.faster) is is_told
