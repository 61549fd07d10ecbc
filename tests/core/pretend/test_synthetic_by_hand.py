"""The closed forms of workload synthetic, by arithmetic.

h = 6, k = 2, f = 10, 3 heads, V = 50, 4 layers: 1,758 weights. 8 tokens a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp
from statistics import NormalDist, fmean, pstdev

import pytest

from orchestrator.core.pretend.synthetic import (
    chance,
    log_normal,
    memory,
    out_of_memory_text,
    step_seconds,
)
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from tests.core import by_hand
from tests.core.by_hand import MODEL, WEIGHTS

GIB = 1 << 30
FLOPS = 10_728
MACHINE = replace(by_hand.MACHINE, memory_bandwidth=1.0)
# A micro-batch of 8 tokens reaches 8 / (8 + 1024) of 0.6.
RATE = 1e6 * 0.6 * 8 / 1032
KERNELS = 4 * 60e-6


def layout(recompute: str = "none", **sizes: int) -> Layout:
    return Layout(**sizes, recompute=Recompute.parse(recompute))


def seconds(of: Layout) -> float:
    return step_seconds(MODEL, of, 8, MACHINE)


@pytest.mark.parametrize(
    ("of", "weights", "gradients", "states"),
    [
        (layout(), 2, 2, 12),
        (replace(layout(), precision=Precision.FP32), 4, 4, 8),
        (layout(data_parallel_size=4), 2, 2, 12),
        (layout(data_parallel_size=4, zero_stage=1), 2, 2, 3),
        (layout(data_parallel_size=4, zero_stage=2), 2, 0.5, 3),
        (layout(data_parallel_size=2, context_parallel_size=2, zero_stage=3), 0.5, 0.5, 3),
        (layout(tensor_parallel_size=2, pipeline_parallel_size=2), 0.5, 0.5, 3),
    ],
)
def test_states_take_their_bytes_a_weight(
    of: Layout, weights: float, gradients: float, states: float
) -> None:
    found = memory(MODEL, of, 8)
    assert found.init == int(GIB + weights * WEIGHTS)
    assert found.step_2 - found.forward == pytest.approx(states * WEIGHTS, abs=1)
    activations = found.forward - found.init - gradients * WEIGHTS
    none = memory(MODEL, replace(of, zero_stage=0), 8)
    width = 4 if of.precision is Precision.FP32 else 2
    parts = of.tensor_parallel_size * of.pipeline_parallel_size
    assert activations == pytest.approx(none.forward - none.init - width * WEIGHTS / parts, abs=1)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        # 34 h a token and layer; 6 V a token.
        (layout(), 8 * (4 * 204 + 300)),
        (layout("full"), 8 * (4 * 12 + 300)),
        (layout("full:1"), 8 * (12 + 3 * 204 + 300)),
        (layout("selective_ops"), 8 * (4 * 0.6 * 204 + 300)),
        (layout(micro_batch_size=2), 16 * (4 * 204 + 300)),
        (layout(context_parallel_size=2), 4 * (4 * 204 + 300)),
        (layout(tensor_parallel_size=2), 8 * (4 * 102 + 150)),
        (layout(pipeline_parallel_size=2, grad_accum_steps=4), 8 * (2 * 204 * 2 + 300)),
        (layout(pipeline_parallel_size=4, grad_accum_steps=2), 8 * (204 * 2 + 300)),
    ],
)
def test_activations_take_their_bytes_a_token(of: Layout, expected: float) -> None:
    found = memory(MODEL, of, 8)
    gradients = 2 * WEIGHTS / (of.tensor_parallel_size * of.pipeline_parallel_size)
    assert found.forward - found.init - gradients == pytest.approx(expected, abs=2)


def test_a_step_computes_at_the_rate_of_its_micro_batch() -> None:
    one = 8 * FLOPS / RATE + KERNELS
    assert seconds(layout()) == pytest.approx(one)
    assert seconds(layout(grad_accum_steps=3)) == pytest.approx(3 * one)
    fp32 = replace(layout(), precision=Precision.FP32)
    assert seconds(fp32) == pytest.approx(2 * (one - KERNELS) + KERNELS)
    full = 8 * (FLOPS + 4 * 624) / RATE + KERNELS
    assert seconds(layout("full")) == pytest.approx(full)
    # Twice the tokens, at twice the rate but for the tokens themselves.
    two = 16 * FLOPS / (0.6e6 * 16 / 1040) + KERNELS
    assert seconds(layout(micro_batch_size=2)) == pytest.approx(two)


def test_tensor_parallel_ranks_all_reduce_four_times_a_layer() -> None:
    """4 layers, 4 rings of 2 (n - 1) / n of 8 * 6 values of 2 bytes."""
    rate = 0.6e6 * 8 / (8 + 2048)
    traffic = 4 * 4 * 2 * (1 / 2) * 48 * 2 / 2e4
    expected = 8 * FLOPS / 2 / rate + traffic + KERNELS
    assert seconds(layout(tensor_parallel_size=2)) == pytest.approx(expected)


def test_a_pipeline_waits_for_its_stages() -> None:
    one = 8 * FLOPS / 2 / RATE + KERNELS / 2
    of = layout(pipeline_parallel_size=2, grad_accum_steps=4)
    assert seconds(of) == pytest.approx(5 * one)
    turns = replace(of, pipeline_schedule=PipelineSchedule.parse("interleaved:2"))
    assert seconds(turns) == pytest.approx(4.5 * one)


def test_gradients_are_reduced_and_weights_gathered_three_tenths_of_them_unhidden() -> None:
    one = 8 * FLOPS / RATE + KERNELS
    # Two passes over 2 bytes a weight, of which (n - 1) / n is sent.
    ring = 2 * 2 * WEIGHTS * 3 / 4 / 2e4
    assert seconds(layout(data_parallel_size=4)) == pytest.approx(one + 0.3 * ring)
    assert seconds(layout(data_parallel_size=4, zero_stage=2)) == pytest.approx(one + 0.3 * ring)
    gathered = layout(data_parallel_size=4, zero_stage=3, grad_accum_steps=3)
    assert seconds(gathered) == pytest.approx(3 * one + 0.3 * ring * (1 + 3))
    half = layout(data_parallel_size=2, context_parallel_size=2)
    at_half = 0.6e6 * 4 / (4 + 1024)
    assert seconds(half) == pytest.approx(4 * FLOPS / at_half + KERNELS + 0.3 * ring)
    two = 2 * 2 * WEIGHTS / 2 / 2e4
    assert seconds(layout(data_parallel_size=2)) == pytest.approx(one + 0.3 * two)
    # More than eight ranks are in several nodes.
    assert seconds(layout(data_parallel_size=8)) == pytest.approx(
        one + 0.3 * 2 * 2 * WEIGHTS * 7 / 8 / 2e4
    )
    assert seconds(layout(data_parallel_size=9)) == pytest.approx(
        one + 0.3 * 2 * 2 * WEIGHTS * 8 / 9 / 1e4
    )


def test_chances_are_uniform_over_names() -> None:
    drawn = [chance("a", number) for number in range(4000)]
    assert len(set(drawn)) == 4000
    assert fmean(drawn) == pytest.approx(0.5, abs=0.02)
    assert pstdev(drawn) == pytest.approx(12**-0.5, abs=0.01)
    assert 0 < min(drawn) < 0.002
    assert 0.998 < max(drawn) < 1
    assert chance("a", "b") == chance("a", "b") != chance("b", "a")


def test_noise_is_log_normal() -> None:
    assert log_normal(0.0, "x") == 1.0
    assert log_normal(0.5, "x") == pytest.approx(exp(0.5 * NormalDist().inv_cdf(chance("x"))))


def test_an_out_of_memory_tells_what_is_free() -> None:
    text = out_of_memory_text(
        3, wanted_bytes=3 * GIB // 2, used_bytes=7 * GIB, capacity_bytes=8 * GIB
    )
    assert text == (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 8.00 GiB"
        " of which 1.00 GiB is free."
    )
    full = out_of_memory_text(0, wanted_bytes=GIB, used_bytes=9 * GIB, capacity_bytes=8 * GIB)
    assert full.endswith("of which 0.00 GiB is free.")
