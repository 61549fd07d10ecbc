"""Predicted step time: what must cost more, costs more. Absolute numbers are for the benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.physics.step_time import StepTimePrediction, predict_step_time
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

H100 = DEVICES["h100-sxm"]


def predict(*layouts: Layout, model: str = "llama-3.1-8b") -> StepTimePrediction:
    cell = Cell(
        model=PRESETS[model],
        num_gpus=layouts[0].world_size,
        sequence_length=4096,
        global_batch_size=layouts[0].global_batch_size,
    )
    return predict_step_time(LayoutTable.of(layouts), cell, H100, gpus_per_node=8)


def test_compute_is_at_least_the_flops_at_the_best_efficiency() -> None:
    layout = Layout(data_parallel_size=8, micro_batch_size=4, grad_accum_steps=4)
    flops = 4 * 4 * 4096 * PRESETS["llama-3.1-8b"].flops_per_token(4096)
    assert predict(layout).compute[0] >= flops / (
        H100.peak_flops[Precision.BF16] * StepTimeConstants().peak_efficiency
    )


def test_full_recomputation_adds_about_a_third_of_the_compute() -> None:
    base = Layout(data_parallel_size=8, micro_batch_size=4, grad_accum_steps=4)
    full = Layout(
        data_parallel_size=8,
        micro_batch_size=4,
        grad_accum_steps=4,
        recompute=Recompute.parse("full"),
    )
    times = predict(base, full)
    assert times.recompute[0] == 0
    assert 0.2 < times.recompute[1] / times.compute[1] < 0.35


def test_the_bubble_is_p_minus_1_micro_batches() -> None:
    times = predict(
        Layout(
            pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=1, grad_accum_steps=16
        )
    )
    assert times.bubble[0] / times.compute[0] == pytest.approx(
        StepTimeConstants().bubble_factor * 3 / 16
    )


def test_a_larger_micro_batch_is_not_slower_at_the_same_global_batch() -> None:
    layouts = [
        Layout(data_parallel_size=8, micro_batch_size=m, grad_accum_steps=16 // m)
        for m in (1, 2, 4, 8, 16)
    ]
    total = predict(*layouts).total
    assert list(total) == sorted(total, reverse=True)


def test_one_rank_sends_nothing() -> None:
    times = predict(Layout(micro_batch_size=4, grad_accum_steps=4))
    assert times.data_parallel[0] == times.tensor_parallel[0] == times.pipeline[0] == 0


def test_a_group_that_leaves_the_node_pays_for_the_slower_link() -> None:
    inside = predict(
        Layout(tensor_parallel_size=8, data_parallel_size=2, micro_batch_size=2, grad_accum_steps=8)
    )
    across = predict(
        Layout(
            tensor_parallel_size=16, data_parallel_size=1, micro_batch_size=4, grad_accum_steps=8
        )
    )
    # Each of the 8 members in a node brings a network card.
    assert across.tensor_parallel[0] > 2 * inside.tensor_parallel[0]


def test_a_context_group_that_leaves_the_node_pays_for_the_slower_link() -> None:
    inside = Layout(
        context_parallel_size=8, data_parallel_size=8, micro_batch_size=1, grad_accum_steps=1
    )
    across = Layout(context_parallel_size=64, micro_batch_size=1, grad_accum_steps=8)
    beside_tensor = Layout(
        context_parallel_size=8, tensor_parallel_size=8, micro_batch_size=1, grad_accum_steps=8
    )
    slower = replace(H100, inter_node_bandwidth=H100.inter_node_bandwidth / 1000)
    cell = Cell(
        model=PRESETS["llama-3.1-8b"], num_gpus=64, sequence_length=131_072, global_batch_size=8
    )
    table = LayoutTable.of([inside, across, beside_tensor])
    fast, slow = (
        predict_step_time(table, cell, hardware, gpus_per_node=8).tensor_parallel
        for hardware in (H100, slower)
    )
    assert slow[0] == fast[0]
    assert slow[1] > 100 * fast[1]
    # The group has eight ranks too, but each in a node of its own.
    assert slow[2] > 100 * fast[2]


@pytest.mark.parametrize(
    ("zero_stage", "collectives"),
    [
        # An all-reduce is two passes; gradients are in bf16, in buckets of 25 MiB.
        (0, 2 * PRESETS["llama-3.1-8b"].num_parameters * 2 / (25 * 2**20)),
        (1, 3 * PRESETS["llama-3.1-8b"].num_parameters * 2 / (25 * 2**20)),
        # 32 layers and the head: gradients once, weights twice for each of 4 micro-batches.
        (3, (1 + 2 * 4) * 33),
    ],
)
def test_each_bucket_of_gradients_and_each_gathered_layer_pays_the_latency_of_a_collective(
    zero_stage: int, collectives: float
) -> None:
    table = LayoutTable.of(
        [
            Layout(
                data_parallel_size=16,
                micro_batch_size=1,
                grad_accum_steps=4,
                zero_stage=zero_stage,
            )
        ]
    )
    cell = Cell(
        model=PRESETS["llama-3.1-8b"], num_gpus=16, sequence_length=4096, global_batch_size=64
    )
    all_exposed = StepTimeConstants(exposed_data_parallel_share=1.0, exposed_zero_1_share=1.0)
    seconds = [
        predict_step_time(
            table,
            cell,
            H100,
            gpus_per_node=8,
            constants=replace(all_exposed, inter_node_collective_seconds=latency),
        ).data_parallel[0]
        for latency in (3e-4, 6e-4)
    ]
    # Between nodes: one hop of a third of the constant per doubling of the 16 members.
    assert seconds[1] - seconds[0] == pytest.approx(collectives * 4 * 1e-4)


def test_zero_3_gathers_weights_for_each_micro_batch() -> None:
    layouts = [
        Layout(data_parallel_size=64, micro_batch_size=1, grad_accum_steps=8, zero_stage=z)
        for z in (0, 3)
    ]
    times = predict(*layouts)
    assert times.data_parallel[1] > times.data_parallel[0]


def test_a_precision_that_the_device_lacks_is_never_fast() -> None:
    a100 = DEVICES["a100-80gb"]
    cell = Cell(
        model=PRESETS["llama-3.2-1b"], num_gpus=1, sequence_length=4096, global_batch_size=1
    )
    times = predict_step_time(
        LayoutTable.of([Layout(precision=Precision.FP8)]), cell, a100, gpus_per_node=8
    )
    assert times.total[0] > 1e9
