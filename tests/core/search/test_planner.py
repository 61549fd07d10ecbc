"""The order in which layouts are tried: likely ones first, unlikely ones last, none dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestrator.core.problem.hardware import DEVICES, GIB
from orchestrator.core.search.planner import (
    NUM_UNCERTAIN,
    memory_limit_bytes,
    plan_cell,
    rank_candidates,
    rank_space,
    trainer_of,
)
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device


def spec(**changes: Any) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-3.1-8b",
            "sequence_length": 4096,
            "global_batch_size": 256,
            "gpus": 64,
            "gpus_per_node": 8,
            "device": "h100-sxm",
            "workload": "synthetic",
            "axes": {
                "zero_stage": [0, 1, 3],
                "tensor_parallel_size": [1, 2, 4, 8],
                "pipeline_parallel_size": [1, 2],
                "recompute": ["none", "full"],
            },
        }
        | changes
    )


def plan(chosen: SweepSpec, device: str | None = "h100-sxm") -> Any:
    hardware = DEVICES[device] if device else None
    return plan_cell(
        chosen, chosen.cells()[0], hardware=hardware, gpus_per_node=8, device=Device.CPU
    )


def test_every_legal_layout_is_in_the_order_once() -> None:
    planned = plan(spec())
    assert sorted(planned.candidates.order) == list(range(len(planned.space.legal)))


def test_a_space_that_was_enumerated_once_is_ranked_again() -> None:
    planned = plan(spec())
    again = rank_space(
        spec(), planned.space, hardware=DEVICES["h100-sxm"], gpus_per_node=8, device=Device.CPU
    )
    assert again.table is planned.candidates.table
    assert again.order.tolist() == planned.candidates.order.tolist()


def test_what_is_predicted_not_to_fit_comes_last_and_is_kept() -> None:
    candidates = plan(spec()).candidates
    fits = candidates.fits[candidates.order]
    assert 0 < fits.sum() < len(fits)
    assert not np.any(fits[int(fits.sum()) :])


def test_the_fastest_prediction_that_fits_comes_first() -> None:
    candidates = plan(spec()).candidates
    first = candidates.order[0]
    assert (
        candidates.tokens_per_second_per_gpu[first]
        == candidates.tokens_per_second_per_gpu[candidates.fits].max()
    )


def test_among_what_cannot_fit_the_nearest_to_fitting_comes_first() -> None:
    candidates = plan(spec(device_memory_gib=1.0)).candidates
    assert not candidates.fits.any()
    memory = candidates.memory_bytes[candidates.order]
    assert np.all(np.diff(memory) >= 0)


def test_on_unknown_hardware_no_time_is_made_up_but_an_order_stands() -> None:
    candidates = plan(spec(device="cpu"), device=None).candidates
    assert np.isnan(candidates.tokens_per_second_per_gpu).all()
    assert candidates.memory_limit_bytes is None
    assert candidates.fits.all()
    first = candidates.table.layout(int(candidates.order[0]))
    assert str(first.recompute) == "none"
    assert first.grad_accum_steps == candidates.table.grad_accum_steps.min()
    # Small micro-batches are a little more work; a forward pass that is computed again is a third.
    table, work = candidates.table, candidates.relative_work
    assert work is not None
    plain = np.array([str(row.recompute) == "none" for row in table.layouts()])
    few = table.grad_accum_steps == table.grad_accum_steps.min()
    assert 1.001 < work[plain].max() / work[plain].min() < 1.05
    assert 1.2 < work[~plain & few].min() / work[plain & few].min() < 1.35


def test_what_fills_the_memory_fits() -> None:
    some = plan(spec()).candidates
    largest = some.memory_bytes[some.fits].max()
    chosen = spec()
    ranked = rank_candidates(
        some.table,
        chosen.cells()[0],
        hardware=DEVICES["h100-sxm"],
        memory_limit_bytes=largest,
        gpus_per_node=8,
        trainer=trainer_of(chosen, device=Device.CPU),
    )
    assert ranked.memory_bytes[ranked.fits].max() == largest


def test_the_memory_limit_is_what_the_file_says_then_the_workload_then_the_device() -> None:
    h100 = DEVICES["h100-sxm"]
    workload = {"name": "synthetic", "options": {"device_memory_bytes": 5}}
    assert memory_limit_bytes(spec(device_memory_gib=2, workload=workload), h100) == 2 * GIB
    assert memory_limit_bytes(spec(workload=workload), h100) == 5
    assert (
        memory_limit_bytes(
            spec(workload={"options": {"memory_limit_bytes": 7}}, device="cpu"), None
        )
        == 7
    )
    assert memory_limit_bytes(spec(), h100) == h100.memory_bytes
    assert memory_limit_bytes(spec(), None) is None


@pytest.mark.parametrize("dtypes", [["fp32", "bf16"], ["bf16"]])
def test_rows_with_eager_attention_are_predicted_by_an_eager_trainer(dtypes: list[str]) -> None:
    axes = {
        "micro_batch_size": [1, 2],
        "recompute": ["none"],
        "options": {"attention": ["flash", "eager"], "gradient_dtype": dtypes},
    }
    mixed = plan(spec(workload="llama", axes=axes)).candidates
    for attention in ("flash", "eager"):
        for dtype in dtypes:
            options = {"attention": attention, "gradient_dtype": dtype}
            alone = plan(
                spec(workload={"name": "llama", "options": options}, axes=axes | {"options": {}})
            ).candidates
            code = mixed.table.option_sets.index(tuple(options.items()))
            rows = np.flatnonzero(mixed.table.options == code)
            assert mixed.memory_bytes[rows].tolist() == alone.memory_bytes.tolist()
            assert mixed.predict is not None and alone.predict is not None
            assert mixed.predict(mixed.table).memory_bytes[rows] == pytest.approx(
                alone.predict(alone.table).memory_bytes, rel=1e-12
            )
    assert len(set(mixed.memory_bytes.tolist())) == len(mixed)


def test_a_cell_without_a_layout_is_planned_as_one() -> None:
    chosen = spec(constraints=["tp > 8"])
    for among in (None, ()):
        planned = plan_cell(
            chosen,
            chosen.cells()[0],
            hardware=DEVICES["h100-sxm"],
            gpus_per_node=8,
            among=among,
            device=Device.CPU,
        )
        assert len(planned.candidates) == 0
        assert planned.candidates.predict is not None
        assert len(planned.candidates.predict(planned.candidates.table).memory_bytes) == 0


def test_the_uncertainty_of_times_is_the_largest_among_the_first_layouts() -> None:
    candidates = plan(spec()).candidates
    first = candidates.table.take(candidates.order[:NUM_UNCERTAIN])
    assert candidates.step_sd is not None
    assert candidates.step_log_sd() == max(candidates.step_sd(first))
    assert plan(spec(device="cpu"), device=None).candidates.step_log_sd() is None
    assert plan(spec(constraints=["tp > 8"])).candidates.step_log_sd() is None


@pytest.mark.parametrize(
    ("named", "device", "is_on_gpu"),
    [
        ("auto", Device.CPU, False),
        ("auto", Device.CUDA, True),
        ("cpu", Device.CPU, False),
        ("h200", Device.CUDA, True),
    ],
)
def test_layers_are_compiled_on_gpus_whether_the_file_names_the_device_or_not(
    named: str, device: Device, is_on_gpu: bool
) -> None:
    trainer = trainer_of(spec(device=named, workload="llama"), device=device)
    assert trainer.compiled is is_on_gpu
    assert (trainer.reserve_bytes > 0) is is_on_gpu


def test_a_declared_trainer_was_not_counted_and_keeps_an_option_that_everybody_knows() -> None:
    own = trainer_of(spec(workload="llama"), device=Device.CUDA)
    declared = trainer_of(spec(workload="llama", trainer="megatron"), device=Device.CUDA)
    assert (own.counted, declared.counted) == (True, False)
    command = {"name": "command", "options": {"argv": ["a"]}}
    foreign = spec(workload=command, axes={"options": {"attn_implementation": ["eager", "sdpa"]}})
    for kind in ("eager", "sdpa"):
        found = trainer_of(foreign, (("attn_implementation", kind),), device=Device.CUDA)
        assert found.eager_attention is (kind == "eager")
