"""Each term of the predicted step time, by arithmetic: round constants, and a machine of round
figures.

The model is that of test_memory_by_hand.py: h = 6, k = 2, f = 10, V = 50, 4 layers, 8 tokens.
Its FLOPs per token: 6 (4 * 276 + 300) + 12 * 4 * 6 * 8 = 8,424 + 2,304 = 10,728.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.physics.collective_group import ring_seconds
from orchestrator.core.physics.step_time import StepTimeModel, StepTimePrediction, predict_step_time
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from tests.core.by_hand import MACHINE, MODEL, WEIGHTS

FLOPS = 8 * 10_728
# A kernel does 2 * 8 * 6 * 10 = 960 FLOPs: with 960 microseconds of half efficiency at 1 MFLOP/s,
# half of the peak's share.
NOTHING = StepTimeConstants(
    peak_efficiency=1.0,
    half_efficiency_seconds=0.0,
    kernel_seconds_per_layer=0.0,
    host_seconds_per_layer=0.0,
    activation_traffic_bytes=0.0,
    intra_node_share=1.0,
    inter_node_share=1.0,
    collective_seconds=0.0,
    inter_node_collective_seconds=0.0,
    exposed_data_parallel_share=1.0,
    exposed_zero_1_share=1.0,
    zero_1_passes=3.0,
    pipeline_hop_seconds=0.0,
    bubble_factor=1.0,
    optimizer_traffic_bytes=0.0,
    fixed_seconds=0.0,
    node_congestion=0.0,
)


def predict(
    *,
    per_node: int = 8,
    length: int = 8,
    of: Layout | None = None,
    trainer: Trainer | None = None,
    **constants: float,
) -> StepTimePrediction:
    of = of or Layout()
    cell = Cell(
        model=MODEL,
        num_gpus=of.world_size,
        sequence_length=length,
        global_batch_size=of.global_batch_size,
    )
    return predict_step_time(
        LayoutTable.of([of]),
        cell,
        MACHINE,
        gpus_per_node=per_node,
        constants=replace(NOTHING, **constants),
        trainer=trainer,
    )


def layout(recompute: str = "none", **sizes: int) -> Layout:
    return Layout(**sizes, recompute=Recompute.parse(recompute))


def test_compute_is_the_flops_at_the_rate_of_the_kernels() -> None:
    assert predict().compute[0] == pytest.approx(FLOPS / 1e6)
    assert predict(peak_efficiency=0.5).compute[0] == pytest.approx(FLOPS / 0.5e6)
    # A kernel of 960 microseconds at the peak reaches half of it.
    assert predict(half_efficiency_seconds=960e-6).compute[0] == pytest.approx(FLOPS / 0.5e6)
    assert predict(half_efficiency_seconds=320e-6).compute[0] == pytest.approx(FLOPS / 0.75e6)
    fp32 = Layout(precision=Precision.FP32)
    assert predict(of=fp32).compute[0] == pytest.approx(FLOPS / 0.5e6)
    # Two ranks share each kernel, which is then half as long.
    two = layout(tensor_parallel_size=2)
    assert predict(of=two).compute[0] == pytest.approx(FLOPS / 2 / 1e6)
    assert predict(of=two, half_efficiency_seconds=480e-6).compute[0] == pytest.approx(
        FLOPS / 2 / 0.5e6
    )
    # A trainer whose small products are fast reaches half of the peak with a quarter of the time.
    fast = Trainer(half_efficiency_share=0.25)
    found = predict(trainer=fast, half_efficiency_seconds=4 * 960e-6).compute[0]
    assert found == pytest.approx(FLOPS / 0.5e6)


def test_a_precision_that_the_device_lacks_takes_longer_than_any_other() -> None:
    slow = replace(MACHINE, peak_flops={Precision.BF16: 0.5})
    cell = Cell(model=MODEL, num_gpus=1, sequence_length=8, global_batch_size=1)
    table = LayoutTable.of([Layout(), Layout(precision=Precision.FP32)])
    found = predict_step_time(table, cell, slow, gpus_per_node=8, constants=NOTHING).compute
    assert found[0] == pytest.approx(FLOPS / 0.5)
    assert found[1] > 1e5 * found[0]


def test_each_micro_batch_costs_as_much() -> None:
    assert predict(of=layout(grad_accum_steps=3)).compute[0] == pytest.approx(3 * FLOPS / 1e6)
    assert predict(of=layout(micro_batch_size=3)).compute[0] == pytest.approx(3 * FLOPS / 1e6)
    # Two ranks share a sequence of 8.
    half = layout(context_parallel_size=2)
    assert predict(of=half).compute[0] == pytest.approx(FLOPS / 2 / 1e6)


def test_layers_launch_kernels_and_move_activations() -> None:
    """There are 4 layers, 8 tokens and 6 elements."""
    launches = {"kernel_seconds_per_layer": 0.5}
    traffic = {"activation_traffic_bytes": 10.0}
    base = FLOPS / 1e6
    assert predict(**launches).compute[0] - base == pytest.approx(4 * 0.5)
    assert predict(**traffic).compute[0] - base == pytest.approx(4 * 48 * 10 / 1e5)
    two = layout(tensor_parallel_size=2)
    assert predict(of=two, **traffic).compute[0] - base / 2 == pytest.approx(4 * 24 * 10 / 1e5)
    stages = layout(pipeline_parallel_size=3)
    # Two of four layers are the fullest stage: half of the FLOPs.
    assert predict(of=stages, **launches).compute[0] == pytest.approx(base / 2 + 2 * 0.5)


@pytest.mark.parametrize(
    ("recompute", "flops"),
    [
        # 2 (2h² + 2hk + 2hf) + 4hs = 2 * 216 + 192
        ("full", 4 * 624),
        ("full:2", 2 * 624),
        ("selective_attention", 4 * 192),
        # 2 (h² + hf)
        ("selective_ops", 4 * 192),
        ("none", 0),
    ],
)
def test_what_is_recomputed_is_computed_again(recompute: str, flops: int) -> None:
    of = layout(recompute)
    assert predict(of=of).recompute[0] == pytest.approx(8 * flops / 1e6)
    # The share of the other work is that of the FLOPs.
    share = flops / 10_728
    launches = predict(of=of, kernel_seconds_per_layer=0.5).recompute[0]
    assert launches == pytest.approx(8 * flops / 1e6 + share * 4 * 0.5)
    both = layout(recompute, tensor_parallel_size=2, pipeline_parallel_size=2, grad_accum_steps=3)
    assert predict(of=both).recompute[0] == pytest.approx(3 * 8 * flops / 4 / 1e6)


def test_the_bubble_is_the_fullest_stage_s_work_for_each_stage_before_it() -> None:
    of = layout("full", pipeline_parallel_size=4, tensor_parallel_size=2, grad_accum_steps=4)
    found = predict(of=of, bubble_factor=1.5)
    one = (found.compute[0] + found.recompute[0] + found.tensor_parallel[0]) / 4
    assert found.tensor_parallel[0] > 0
    assert found.bubble[0] == pytest.approx(3 * one * 1.5)


def test_tensor_parallel_ranks_pass_activations_eight_times_a_layer() -> None:
    """8 passes, 4 layers, 8 tokens, 6 elements of 2 bytes: 3,072 bytes, half over the link."""
    of = layout(tensor_parallel_size=2)
    assert predict(of=of).tensor_parallel[0] == pytest.approx(3_072 / 2 / 2e4)
    assert predict(of=of, intra_node_share=0.5).tensor_parallel[0] == pytest.approx(3_072 / 2e4)
    three = layout(tensor_parallel_size=2, grad_accum_steps=3)
    assert predict(of=three).tensor_parallel[0] == pytest.approx(3 * 3_072 / 2 / 2e4)
    four = layout(tensor_parallel_size=4)
    assert predict(of=four).tensor_parallel[0] == pytest.approx(3_072 * 3 / 4 / 2e4)
    # A group of two in two nodes, each with its own card.
    assert predict(of=of, per_node=1).tensor_parallel[0] == pytest.approx(3_072 / 2 / 1e4)
    # A group of four in two nodes, each with two cards: as fast as inside.
    assert predict(of=four, per_node=2).tensor_parallel[0] == pytest.approx(3_072 * 3 / 4 / 2e4)
    slow = predict(of=four, per_node=2, inter_node_share=0.25)
    assert slow.tensor_parallel[0] == pytest.approx(3_072 * 3 / 4 / 5e3)


def test_a_collective_has_a_third_of_its_latency_for_each_doubling_of_its_group() -> None:
    two, eight = layout(tensor_parallel_size=2), layout(tensor_parallel_size=8)
    for of, doublings in ((two, 1), (eight, 3)):
        added = [
            predict(of=of, collective_seconds=seconds).tensor_parallel[0] for seconds in (0.0, 0.3)
        ]
        assert added[1] - added[0] == pytest.approx(8 * 4 * doublings * 0.1)
    assert predict(collective_seconds=0.3).tensor_parallel[0] == 0
    added = [
        predict(of=two, per_node=1, inter_node_collective_seconds=seconds).tensor_parallel[0]
        for seconds in (0.0, 0.3)
    ]
    assert added[1] - added[0] == pytest.approx(8 * 4 * 0.1)


def test_context_parallel_ranks_exchange_keys_and_values_four_times_a_layer() -> None:
    """4 times, 4 layers, 4 tokens, keys and values of 2 elements of 2 bytes, from another rank."""
    of = layout(context_parallel_size=2)
    assert predict(of=of).tensor_parallel[0] == pytest.approx(4 * 4 * 4 * 8 / 2e4)
    four = layout(context_parallel_size=4)
    assert predict(of=four).tensor_parallel[0] == pytest.approx(4 * 4 * 2 * 8 * 3 / 2e4)
    both = layout(context_parallel_size=2, tensor_parallel_size=2)
    assert predict(of=both).tensor_parallel[0] == pytest.approx(
        (4 * 4 * 4 * 4 + 3_072 / 2 / 2) / 2e4
    )
    # The ranks of a context group are a tensor group apart: over one card of the slower link.
    assert predict(of=both, per_node=2).tensor_parallel[0] == pytest.approx(
        4 * 4 * 4 * 4 / 1e4 + 3_072 / 2 / 2 / 2e4
    )
    added = [predict(of=of, collective_seconds=s).tensor_parallel[0] for s in (0.0, 0.3)]
    assert added[1] - added[0] == pytest.approx(4 * 4 * 0.1)


@pytest.mark.parametrize(
    ("of", "passes"),
    [
        (layout(data_parallel_size=4), 2),
        (layout(data_parallel_size=4, grad_accum_steps=3), 2),
        (layout(data_parallel_size=4, zero_stage=1), 3),
        (layout(data_parallel_size=4, zero_stage=2), 3),
        # Weights for each forward and backward, gradients once.
        (layout(data_parallel_size=4, zero_stage=3), 1 + 2),
        (layout(data_parallel_size=4, zero_stage=3, grad_accum_steps=3), 1 + 2 * 3),
        (layout(context_parallel_size=4), 2),
    ],
)
def test_data_parallel_ranks_pass_the_weights(of: Layout, passes: int) -> None:
    one = WEIGHTS * 2 * 3 / 4 / 2e4
    assert predict(of=of).data_parallel[0] == pytest.approx(passes * one)


def test_the_backward_pass_hides_data_parallel_traffic() -> None:
    of = layout(data_parallel_size=4)
    traffic, work = 2 * WEIGHTS * 2 * 3 / 4 / 2e4, FLOPS / 1e6
    # A fifth is exposed; the rest hides as long as the backward pass, two thirds of the work.
    found = predict(of=of, exposed_data_parallel_share=0.2).data_parallel[0]
    assert found == pytest.approx(0.2 * traffic + 0.8 * (traffic - 2 / 3 * work))
    fast = predict(of=of, exposed_data_parallel_share=0.2, peak_efficiency=0.1).data_parallel[0]
    assert fast == pytest.approx(0.2 * traffic)
    # More than all is a trainer that waits.
    assert predict(of=of, exposed_data_parallel_share=1.5).data_parallel[0] == pytest.approx(
        1.5 * traffic
    )
    one = layout(data_parallel_size=4, zero_stage=1)
    found = predict(of=one, exposed_zero_1_share=0.2, zero_1_passes=2.0, peak_efficiency=0.1)
    assert found.data_parallel[0] == pytest.approx(0.2 * traffic)


@pytest.mark.parametrize(
    ("of", "collectives"),
    [
        # 3,516 bytes fill one bucket.
        (layout(data_parallel_size=2), 2),
        (layout(data_parallel_size=2, zero_stage=1), 3),
        # 4 layers and the head, three times.
        (layout(data_parallel_size=2, zero_stage=3), 3 * 5),
        (layout(data_parallel_size=2, zero_stage=3, pipeline_parallel_size=2), 3 * 3),
    ],
)
def test_data_parallel_collectives_have_their_latency(of: Layout, collectives: int) -> None:
    added = [predict(of=of, collective_seconds=s).data_parallel[0] for s in (0.0, 0.3)]
    assert added[1] - added[0] == pytest.approx(collectives * 0.1)


def test_data_parallel_ranks_of_other_parts_share_the_weights_and_stand_apart() -> None:
    parts = layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    one = WEIGHTS / 4 * 2 / 2
    assert predict(of=parts).data_parallel[0] == pytest.approx(2 * one / 2e4)
    # With two GPUs a node, the partner is in another one.
    assert predict(of=parts, per_node=2).data_parallel[0] == pytest.approx(2 * one / 1e4)
    assert predict(of=parts, per_node=4).data_parallel[0] == pytest.approx(2 * one / 2e4)


def test_more_nodes_slow_a_group_for_each_doubling() -> None:
    """A group of 8 nodes with one GPU each is 1 + 3 * 0.5 times as slow."""
    of = layout(data_parallel_size=8)
    one = WEIGHTS * 2 * 7 / 8 / 1e4
    found = predict(of=of, per_node=1, node_congestion=0.5).data_parallel[0]
    assert found == pytest.approx(2 * one * 2.5)
    # Four nodes with two cards each.
    found = predict(of=of, per_node=2, node_congestion=0.5).data_parallel[0]
    assert found == pytest.approx(2 * one * 2 / 2)
    # A context group of 4 nodes uses one card of each.
    ring = layout(context_parallel_size=8)
    found = predict(of=ring, per_node=2, node_congestion=0.5).tensor_parallel[0]
    assert found == pytest.approx(4 * 4 * 1 * 8 * 7 / 1e4 * 2)


def test_each_micro_batch_hops_between_stages() -> None:
    """2 * 48 * 2 bytes of activation and gradient, m + p - 1 times."""
    of = layout(pipeline_parallel_size=2, grad_accum_steps=3)
    assert predict(of=of).pipeline[0] == pytest.approx(4 * 192 / 2e4)
    assert predict(of=of, pipeline_hop_seconds=0.5).pipeline[0] == pytest.approx(
        4 * (192 / 2e4 + 0.5)
    )
    assert predict(of=of, per_node=1).pipeline[0] == pytest.approx(4 * 192 / 1e4)
    both = layout(pipeline_parallel_size=2, tensor_parallel_size=2, grad_accum_steps=3)
    assert predict(of=both).pipeline[0] == pytest.approx(4 * 96 / 2e4)
    assert predict(of=both, per_node=4).pipeline[0] == pytest.approx(4 * 96 / 2e4)
    assert predict(of=both, per_node=3).pipeline[0] == pytest.approx(4 * 96 / 1e4)
    assert predict(pipeline_hop_seconds=0.5).pipeline[0] == 0
    # A stage of two data parallel ranks, or of two that share a sequence, fills a node of two.
    for beside, num_bytes in (("data_parallel_size", 192), ("context_parallel_size", 96)):
        wide = replace(of, **{beside: 2})
        assert predict(of=wide, per_node=2).pipeline[0] == pytest.approx(4 * num_bytes / 1e4)
        assert predict(of=wide, per_node=4).pipeline[0] == pytest.approx(4 * num_bytes / 2e4)


def test_the_optimizer_moves_the_bytes_of_its_weights() -> None:
    bytes_of = {"optimizer_traffic_bytes": 10.0}
    assert predict(**bytes_of).optimizer[0] == pytest.approx(WEIGHTS * 10 / 1e5)
    four = layout(data_parallel_size=4)
    assert predict(of=four, **bytes_of).optimizer[0] == pytest.approx(WEIGHTS * 10 / 1e5)
    for stage in (1, 2, 3):
        of = layout(data_parallel_size=2, context_parallel_size=2, zero_stage=stage)
        assert predict(of=of, **bytes_of).optimizer[0] == pytest.approx(WEIGHTS * 10 / 4 / 1e5)
    parts = layout(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert predict(of=parts, **bytes_of).optimizer[0] == pytest.approx(WEIGHTS * 10 / 4 / 1e5)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert predict(fixed_seconds=0.25).fixed[0] == 0.25
    found = predict(
        of=layout(
            "full",
            data_parallel_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            grad_accum_steps=2,
        ),
        fixed_seconds=0.25,
        optimizer_traffic_bytes=10.0,
    )
    parts = [
        found.compute,
        found.recompute,
        found.bubble,
        found.data_parallel,
        found.tensor_parallel,
        found.pipeline,
        found.optimizer,
        found.fixed,
    ]
    assert all(part[0] > 0 for part in parts)
    assert found.total[0] == pytest.approx(sum(part[0] for part in parts))


def test_a_ring_passes_all_but_one_part_of_a_message() -> None:
    def seconds(ranks: float, nodes: float, **constants: float) -> float:
        found = ring_seconds(
            num_ranks=np.array([ranks]),
            num_nodes=np.array([nodes]),
            num_bytes=np.array([1e5]),
            hardware=MACHINE,
            constants=replace(NOTHING, **constants),
        )
        return float(found[0])

    assert seconds(4, 1) == pytest.approx(1e5 * 3 / 4 / 2e4)
    assert seconds(4, 4) == pytest.approx(1e5 * 3 / 4 / 1e4)
    assert seconds(4, 1, intra_node_share=0.5) == pytest.approx(1e5 * 3 / 4 / 1e4)
    assert seconds(4, 4, inter_node_share=0.5) == pytest.approx(1e5 * 3 / 4 / 5e3)
    assert seconds(4, 1, collective_seconds=0.3) == pytest.approx(1e5 * 3 / 4 / 2e4 + 0.2)
    assert seconds(4, 4, node_congestion=0.5) == pytest.approx(1e5 * 3 / 4 / 1e4 * 2)
    # One and a half nodes are 0.585 doublings.
    slowed = 2 * 1e4 / (1 + 0.5 * 0.585)
    assert seconds(3, 1.5, node_congestion=0.5) == pytest.approx(1e5 * 2 / 3 / slowed, rel=1e-4)


# Workload llama: sharded fp32 weights, gathered in bf16 and reduced in fp32.
OURS = Trainer(fully_shards=True, reduce_bytes=4.0)
WORK = FLOPS / 1e6
# Seconds of a pass over four ranks.
GATHER, SCATTER = WEIGHTS * 2 * 3 / 4 / 2e4, WEIGHTS * 4 * 3 / 4 / 2e4


@pytest.mark.parametrize(
    ("of", "trainer", "gathers", "scatters", "both", "gathers_alone"),
    [
        # Gathered once in a step; reduced after each micro-batch, or after the last.
        (layout(data_parallel_size=4, zero_stage=1), OURS, 1, 1, 0, 0),
        (layout(data_parallel_size=4, zero_stage=2, grad_accum_steps=3), OURS, 1, 3, 0, 0),
        (
            layout(data_parallel_size=4, zero_stage=1, grad_accum_steps=3),
            replace(OURS, scatters_each=False),
            1,
            1,
            0,
            0,
        ),
        # Gathered in each forward pass, and in each backward pass again.
        (layout(data_parallel_size=4, zero_stage=3, grad_accum_steps=3), OURS, 3, 0, 3, 0),
        (layout(data_parallel_size=4, zero_stage=3), OURS, 1, 0, 1, 0),
        (
            layout(data_parallel_size=4, zero_stage=3, grad_accum_steps=3),
            replace(OURS, scatters_each=False),
            3,
            0,
            1,
            2,
        ),
        (layout(context_parallel_size=4, zero_stage=1, micro_batch_size=4), OURS, 1, 1, 0, 0),
    ],
)
def test_gathers_hide_behind_forward_passes_and_reductions_behind_backward_passes(
    of: Layout, trainer: Trainer, gathers: int, scatters: int, both: int, gathers_alone: int
) -> None:
    forward, backward = WORK / 3, WORK * 2 / 3
    expected = (
        gathers * (GATHER - forward)
        + scatters * (SCATTER - backward)
        + both * (SCATTER + GATHER - backward)
        + gathers_alone * (GATHER - backward)
    )
    assert predict(of=of, trainer=trainer).data_parallel[0] == pytest.approx(expected)
    # With a slow device, all of them hide.
    assert predict(of=of, trainer=trainer, peak_efficiency=0.01).data_parallel[0] == 0


def test_two_ranks_shard_as_more_do() -> None:
    of = layout(data_parallel_size=2, zero_stage=1)
    gather, scatter = WEIGHTS * 2 / 2 / 2e4, WEIGHTS * 4 / 2 / 2e4
    assert predict(of=of, trainer=OURS).data_parallel[0] == pytest.approx(
        gather + scatter - WORK / 3 - WORK * 2 / 3
    )


def test_a_recomputed_layer_hides_more_of_the_reductions() -> None:
    of = layout("full", data_parallel_size=4, zero_stage=1)
    backward = WORK * 2 / 3 + 8 * 4 * 624 / 1e6
    expected = GATHER - WORK / 3 + SCATTER - backward
    assert predict(of=of, trainer=OURS).data_parallel[0] == pytest.approx(expected)


def test_each_layer_and_the_head_is_a_collective_of_a_pass() -> None:
    of = layout(data_parallel_size=4, zero_stage=1)
    added = [
        predict(of=of, trainer=OURS, collective_seconds=s).data_parallel[0] for s in (0.0, 0.3)
    ]
    # A gather and a scatter of 5 units, each of two doublings.
    assert added[1] - added[0] == pytest.approx(2 * 5 * 2 * 0.1)


def test_replicas_sum_up_their_shards_of_gradients() -> None:
    """Two replicas of two shards: a pass of a half, and an all-reduce of 879 fp32 numbers."""
    of = layout(data_parallel_size=4, zero_stage=1)
    two = replace(OURS, replicas=2)
    gather, scatter = WEIGHTS * 2 / 2 / 2e4, WEIGHTS * 4 / 2 / 2e4
    all_reduce = 2 * (879 * 4 / 2) / 2e4
    expected = gather - WORK / 3 + scatter + all_reduce - WORK * 2 / 3
    assert predict(of=of, trainer=two).data_parallel[0] == pytest.approx(expected)
    # Shards are neighbours; replicas are in another node.
    across = predict(of=of, trainer=two, per_node=2, inter_node_share=0.25).data_parallel[0]
    # An eighth of the bandwidth.
    assert across == pytest.approx(expected + all_reduce * 7)
    added = [predict(of=of, trainer=two, collective_seconds=s).data_parallel[0] for s in (0.0, 0.3)]
    assert added[1] - added[0] == pytest.approx((1 + 1 + 2) * 5 * 0.1)
    moved = predict(of=of, trainer=two, optimizer_traffic_bytes=10.0).optimizer[0]
    assert moved == pytest.approx(WEIGHTS / 2 * 10 / 1e5)
    # No more replicas than ranks.
    many = predict(of=of, trainer=replace(OURS, replicas=99), optimizer_traffic_bytes=10.0)
    assert many.optimizer[0] == pytest.approx(WEIGHTS * 10 / 1e5)


def test_an_all_reduce_sends_fp32_in_buckets() -> None:
    of = layout(data_parallel_size=4)
    trainer = replace(OURS, reduction_bucket_bytes=WEIGHTS * 4 / 10)
    assert predict(of=of, trainer=trainer).data_parallel[0] == pytest.approx(2 * SCATTER)
    added = [
        predict(of=of, trainer=trainer, collective_seconds=s).data_parallel[0] for s in (0.0, 0.3)
    ]
    assert added[1] - added[0] == pytest.approx(2 * 10 * 2 * 0.1)
    halves = replace(OURS, reduce_bytes=2.0)
    assert predict(of=of, trainer=halves).data_parallel[0] == pytest.approx(2 * GATHER)


def test_rows_of_several_trainers_are_joined() -> None:
    of = layout(data_parallel_size=4, zero_stage=1)
    cell = Cell(model=MODEL, num_gpus=4, sequence_length=8, global_batch_size=4)
    apart = LayoutTable.of([of, replace(of, zero_stage=0)])
    # Neighbours that differ in recomputation alone.
    alike = LayoutTable.of(
        replace(row, recompute=Recompute.parse(mode))
        for row in (replace(of, zero_stage=0), of)
        for mode in ("none", "full", "full:2")
    )
    models = [
        StepTimeModel.of(table, cell, MACHINE, gpus_per_node=8, trainer=trainer)
        for table, trainer in (
            (apart, OURS),
            (alike, Trainer()),
            (apart, replace(OURS, replicas=2)),
            (alike, OURS),
        )
    ]
    # All of them, and those with such neighbours alone.
    for some in (models, models[1::2]):
        joined = StepTimeModel.joined(some).seconds(NOTHING)
        for part in ("total", "recompute", "data_parallel", "optimizer"):
            alone = np.concatenate([getattr(model.seconds(NOTHING), part) for model in some])
            assert getattr(joined, part) == pytest.approx(alone)
    assert StepTimeModel.joined(models[1:2]).sharded is None


@pytest.mark.parametrize(
    ("recompute", "tensor_passes", "context_passes"),
    # Two gathers and a scatter again; keys and values once more.
    [("none", 8, 2), ("full", 11, 3), ("full:2", 9.5, 2.5), ("selective_ops", 8, 2)],
)
def test_layers_that_are_computed_again_pass_their_inputs_again(
    recompute: str, tensor_passes: float, context_passes: float
) -> None:
    trainer = Trainer(gathers_context=True)
    two = layout(recompute, tensor_parallel_size=2)
    one = 4 * 8 * 12 / 2 / 2e4
    assert predict(of=two, trainer=trainer).tensor_parallel[0] == pytest.approx(tensor_passes * one)
    added = [
        predict(of=two, trainer=trainer, collective_seconds=s).tensor_parallel[0]
        for s in (0.0, 0.3)
    ]
    assert added[1] - added[0] == pytest.approx(tensor_passes * 4 * 0.1)
    cp = layout(recompute, context_parallel_size=2)
    one = 4 * 4 * 8 / 2e4
    assert predict(of=cp, trainer=trainer).tensor_parallel[0] == pytest.approx(context_passes * one)


def test_a_compiled_layer_launches_fewer_kernels_and_moves_less() -> None:
    constants = {"kernel_seconds_per_layer": 0.5, "activation_traffic_bytes": 10.0}
    trainer = Trainer(launch_share=0.3, traffic_share=0.4)
    found = predict(trainer=trainer, **constants).compute[0]
    assert found == pytest.approx(WORK + 4 * (0.3 * 0.5 + 0.4 * 48 * 10 / 1e5))


@pytest.mark.parametrize(
    ("recompute", "compiled", "factor"),
    [
        ("none", False, 1.0),
        ("selective_attention", False, 1.6),
        ("full", False, 2.8),
        ("full:2", False, 1.9),
        ("selective_ops", False, 3.0),
        ("none", True, 1.0),
        ("selective_attention", True, 1.3),
        ("full", True, 1.5),
        ("selective_ops", True, 1.5),
    ],
)
def test_a_device_waits_for_a_host_that_is_slower(
    recompute: str, compiled: bool, factor: float
) -> None:
    """0.6 ms a layer in plain torch, 0.95, 1.7 and 1.8 recomputed: measured on a loaded core."""
    trainer = Trainer(host_share=0.5, compiled=compiled)
    of = layout(recompute, grad_accum_steps=3)
    found = predict(of=of, trainer=trainer, host_seconds_per_layer=0.2)
    device = (found.compute[0] + found.recompute[0]) / 3
    assert found.host[0] == pytest.approx(3 * (4 * 0.2 * 0.5 * factor - device))
    assert found.total[0] == pytest.approx(3 * 4 * 0.2 * 0.5 * factor)
    quick = predict(of=of, trainer=trainer, host_seconds_per_layer=1e-3)
    assert quick.host[0] == 0
    # Nothing is known of the hosts of other programs.
    assert predict(of=of, host_seconds_per_layer=0.2).host[0] == 0


def test_stages_wait_for_a_slow_host_as_well() -> None:
    of = layout(pipeline_parallel_size=4, grad_accum_steps=4)
    found = predict(of=of, trainer=Trainer(host_share=1.0), host_seconds_per_layer=0.2)
    assert found.bubble[0] == pytest.approx(3 * 0.2)


def test_virtual_stages_shorten_the_bubble_and_hop_more_often() -> None:
    """Two stages on each of two ranks: half the bubble, and each micro-batch hops twice."""
    plain = layout(pipeline_parallel_size=2, grad_accum_steps=4)
    two = replace(plain, pipeline_schedule=PipelineSchedule.parse("interleaved:2"))
    before, after = predict(of=plain), predict(of=two)
    assert after.bubble[0] == pytest.approx(before.bubble[0] / 2)
    assert before.pipeline[0] == pytest.approx(5 * 192 / 2e4)
    assert after.pipeline[0] == pytest.approx(9 * 192 / 2e4)
    gpipe = replace(plain, pipeline_schedule=PipelineSchedule.parse("gpipe"))
    assert predict(of=gpipe).total[0] == before.total[0]
