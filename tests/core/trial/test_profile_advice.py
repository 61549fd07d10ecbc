"""Each rule of advice fires beyond its bound, and only there."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.profile_advice import advice
from orchestrator.core.trial.trace_split import AttentionKernel, Part
from tests.core.trial.rank_profiles import rank_profile as profile

REPLICAS = Layout(data_parallel_size=8, grad_accum_steps=2)
STAGES = Layout(pipeline_parallel_size=4, grad_accum_steps=8)


def test_a_step_of_products_alone_needs_no_advice() -> None:
    assert advice(profile(), REPLICAS) == []


@pytest.mark.parametrize(
    ("layout", "part", "bound", "said"),
    [
        (REPLICAS, Part.EXPOSED_DP, 100_000, "exposed communication of data parallelism"),
        (STAGES, Part.BUBBLE, 200_000, "more micro-batches per step (now 8)"),
        (REPLICAS, Part.OPTIMIZER, 100_000, "8 replicas: ZeRO 1"),
    ],
)
def test_a_part_beyond_its_bound_gives_a_line(
    layout: Layout, part: Part, bound: int, said: str
) -> None:
    assert advice(profile({part: bound}), layout) == []
    (line,) = advice(profile({part: bound + 10_000}), layout)
    assert said in line


def test_a_host_that_takes_nine_tenths_of_the_devices_time_is_said() -> None:
    waited = {Part.HOST_BOUND: 100_000}  # so the device computed for 900,000
    assert advice(profile(waited, host_nanoseconds=810_000), REPLICAS) == []
    (line,) = advice(profile(waited, host_nanoseconds=810_001), REPLICAS)
    assert "10% of the step" in line
    assert "compile, or a larger micro-batch" in line
    compiled = profile(waited, host_nanoseconds=900_000, is_compiled=True)
    assert "compile" not in advice(compiled, REPLICAS)[0]


def test_a_busy_host_that_the_device_did_not_wait_for_is_not_said() -> None:
    found = profile({Part.HOST_BOUND: 50_000}, host_nanoseconds=1_000_000)
    assert advice(found, REPLICAS) == []


def test_on_a_cpu_nobody_measures_how_long_the_host_takes() -> None:
    found = profile({Part.HOST_BOUND: 500_000}, host_nanoseconds=None, is_on_device=False)
    assert advice(found, REPLICAS) == []


@pytest.mark.parametrize(
    ("kernel", "said"),
    [(AttentionKernel.MATH, "math fallback"), (AttentionKernel.EAGER, "single products")],
)
def test_attention_without_a_fused_kernel_is_said_first(kernel: AttentionKernel, said: str) -> None:
    found = profile({Part.EXPOSED_DP: 900_000}, attention=kernel)
    lines = advice(found, REPLICAS)
    assert said in lines[0]
    assert advice(profile(attention=None), REPLICAS) == []


def test_a_step_without_a_pipeline_has_no_bubble() -> None:
    assert advice(profile({Part.BUBBLE: 300_000}), REPLICAS) == []


def test_many_tiny_kernels_ask_for_compile_unless_it_is_on() -> None:
    others = {Part.OTHER: 300_000}
    found = profile(others, median_kernel_nanoseconds=4_000)
    (line,) = advice(found, REPLICAS)
    assert "900 kernels a step" in line
    assert advice(profile(others, median_kernel_nanoseconds=9_999), REPLICAS) != []
    assert advice(found.model_copy(update={"is_compiled": True}), REPLICAS) == []
    for other in (
        profile(others, median_kernel_nanoseconds=10_000),
        profile(others, median_kernel_nanoseconds=None),
        profile({Part.OTHER: 200_000}, median_kernel_nanoseconds=4_000),
        profile(others, median_kernel_nanoseconds=4_000, is_on_device=False),
    ):
        assert advice(other, REPLICAS) == []


def test_zero_divides_the_optimizer_only_among_replicas_that_do_not_share_it_yet() -> None:
    found = profile({Part.OPTIMIZER: 500_000})
    for layout in (Layout(), Layout(data_parallel_size=8, zero_stage=1)):
        assert advice(found, layout) == []


def test_at_most_three_lines_are_given_the_largest_shares_first() -> None:
    found = profile(
        {
            Part.EXPOSED_DP: 150_000,
            Part.BUBBLE: 250_000,
            Part.OPTIMIZER: 120_000,
            Part.OTHER: 210_000,
            Part.HOST_BOUND: 200_000,
        },
        median_kernel_nanoseconds=2_000,
        host_nanoseconds=900_000,
    )
    layout = Layout(data_parallel_size=2, pipeline_parallel_size=2, grad_accum_steps=4)
    lines = advice(found, layout)
    assert len(lines) == 3
    assert "bubble" in lines[0]
    assert "kernels a step" in lines[1]
    assert "host-bound" in lines[2]


def test_parts_that_do_not_add_up_are_no_profile() -> None:
    with pytest.raises(ValueError, match="add up to 2000000 ns, and the steps took 1000000 ns"):
        profile({Part.IDLE: 1_000_000, Part.MATMUL: 1_000_000})
