from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.measurement import (
    FEWEST_STEPS,
    ImplausibleMeasurement,
    Measurement,
    Unsure,
    measure,
    relative_confidence,
    summarise_steps,
    why_unsteady,
    why_unsure,
    with_driver_memory,
)
from orchestrator.core.trial.node_report import GpuUsage, NodeReport, RankOutcome
from orchestrator.core.trial.protocol import DriverMemoryKind, MeasurementPlan, RankResult

MODEL = PRESETS["llama-3.1-8b"]
PLAN = MeasurementPlan(warmup_steps=2, min_steps=5, max_steps=20, relative_confidence=0.02)
LAYOUT = Layout(data_parallel_size=2, micro_batch_size=1, grad_accum_steps=4)


def result(*seconds: float, **known: Any) -> RankResult:
    return RankResult(step_seconds=list(seconds), **known)


def measured(*results: RankResult, layout: Layout = LAYOUT) -> Measurement:
    return measure(results, model=MODEL, sequence_length=4096, layout=layout, plan=PLAN)


# --- numbers of an attempt ------------------------------------------------------------------------


def test_the_slowest_rank_of_each_step_counts() -> None:
    found = measured(result(1.0, 2.0, 1.0), result(3.0, 1.0, 1.5))
    assert found.step_seconds == (3.0, 2.0, 1.5)
    assert found.step_time.median == 2.0


def test_throughput_is_tokens_of_the_global_batch_over_the_median_step() -> None:
    found = measured(result(*[0.5] * 6), result(*[0.5] * 6))
    # dp 2 x mbs 1 x ga 4 sequences.
    assert found.tokens_per_second == 8 * 4096 / 0.5
    assert found.tokens_per_second_per_gpu == found.tokens_per_second / 2
    assert found.confident
    assert found.mfu is found.hfu is found.peak_flops is None  # nobody knows the device


def test_several_steps_that_took_less_than_the_seconds_of_the_plan_show_no_long_run() -> None:
    """One number may be the median of any number of steps."""
    plan = PLAN.model_copy(update={"min_seconds": 5.0})
    assert why_unsteady([1.0], plan) is None
    for samples in ([1.0, 1.0], [1.0] * 4):
        reason = why_unsteady(samples, plan)
        assert reason is not None
        assert reason.startswith(f"its timed steps took {len(samples)} s of the 5 s that")
    assert why_unsteady([1.0] * 5, plan) is None
    assert why_unsteady([1.0, 1.0], PLAN) is None


def test_a_program_may_say_its_own_tokens_per_step() -> None:
    assert measured(result(1.0, tokens_per_step=1000)).tokens_per_second == 1000


def test_mfu_is_model_flops_over_the_peak_and_hfu_adds_what_was_recomputed() -> None:
    peak = 989e12
    full = Layout(
        data_parallel_size=2,
        micro_batch_size=1,
        grad_accum_steps=4,
        recompute=Recompute.parse("full"),
    )
    found = measured(
        result(*[3.0] * 6, peak_flops=peak, peak_flops_source="table: h100-sxm"), layout=full
    )
    per_gpu = 8 * 4096 / 3.0 / 2
    assert found.mfu == pytest.approx(per_gpu * MODEL.flops_per_token(4096) / peak)
    assert found.hfu == pytest.approx(
        found.mfu + per_gpu * MODEL.recomputed_flops_per_token(4096, full.recompute) / peak
    )
    assert 0 < found.mfu < found.hfu < 1
    assert found.peak_flops_source == "table: h100-sxm"


def test_the_peak_is_that_of_the_slowest_node_with_its_source() -> None:
    slow = result(*[3.0] * 6, peak_flops=9e14, peak_flops_source="measured: slow")
    found = measured(
        result(*[3.0] * 6, peak_flops=1e15, peak_flops_source="measured: fast"),
        slow,
        result(*[3.0] * 6),
    )
    assert (found.peak_flops, found.peak_flops_source) == (9e14, "measured: slow")


def test_more_than_the_device_can_do_is_refused_as_a_bug() -> None:
    with pytest.raises(ImplausibleMeasurement, match="more than the device can do"):
        measured(result(*[0.01] * 6, peak_flops=989e12))


def test_an_hfu_above_one_is_refused_even_where_the_mfu_is_not() -> None:
    peak, per_gpu = 1e15, 8 * 4096 / 2
    seconds = (
        per_gpu * MODEL.flops_per_token(4096) / (0.9 * peak)
        # An MFU of 90 %; with a third more it cannot be.
    )
    full = Layout(
        data_parallel_size=2,
        micro_batch_size=1,
        grad_accum_steps=4,
        recompute=Recompute.parse("full"),
    )
    assert measured(result(seconds, peak_flops=peak)).mfu == pytest.approx(0.9)
    with pytest.raises(ImplausibleMeasurement):
        measured(result(seconds, peak_flops=peak), layout=full)


def test_ranks_that_timed_different_steps_are_refused() -> None:
    with pytest.raises(ImplausibleMeasurement, match=r"different numbers of steps: \[1, 2\]"):
        measured(result(1.0), result(1.0, 1.0))


def test_memory_is_that_of_the_worst_rank_and_unknown_stays_unknown() -> None:
    found = measured(
        result(
            1.0, peak_memory_allocated_bytes=5, peak_memory_reserved_bytes=9, device_memory_bytes=80
        ),
        result(1.0, peak_memory_allocated_bytes=7, device_memory_bytes=81),
    )
    assert (
        found.peak_memory_allocated_bytes,
        found.peak_memory_reserved_bytes,
        found.device_memory_bytes,
    ) == (7, 9, 80)
    assert found.allocator_retries is None
    assert measured(result(1.0)).peak_memory_allocated_bytes is None


def test_compiling_takes_as_long_as_on_the_slowest_rank() -> None:
    assert measured(result(1.0)).compile_seconds is None
    found = measured(result(1.0, compile_seconds=2.0), result(1.0, compile_seconds=7.5))
    assert found.compile_seconds == 7.5


def test_a_rank_may_tell_its_memory_and_no_steps() -> None:
    found = measured(
        result(1.0, 3.0, peak_memory_allocated_bytes=5),
        RankResult(step_seconds=[], peak_memory_allocated_bytes=9),
    )
    assert (found.peak_memory_allocated_bytes, found.step_seconds) == (9, (1.0, 3.0))


def test_own_fields_are_those_of_the_first_rank_that_has_them() -> None:
    assert measured(result(1.0)).extra is None
    found = measured(
        RankResult(step_seconds=[], extra={"a": 1, "b": 2}),
        result(1.0, extra={"b": 3}),
        RankResult(step_seconds=[], extra={"a": 4}),
    )
    assert found.extra == {"a": 1, "b": 3}


def test_what_a_driver_saw_is_kept_apart_from_what_ranks_told() -> None:
    def report(driver: int | None, resident: int | None) -> NodeReport:
        told = result(1.0, peak_memory_resident_bytes=resident)
        return NodeReport(
            node="a",
            ranks=[RankOutcome(rank=0, result=told)],
            gpu=GpuUsage(peak_memory_bytes=driver),
        )

    def seen(*reports: NodeReport) -> tuple[int | None, DriverMemoryKind | None, int | None]:
        found = with_driver_memory(measured(result(1.0)), reports)
        return (
            found.peak_memory_driver_bytes,
            found.peak_memory_driver_kind,
            found.peak_memory_allocated_bytes,
        )

    assert seen(report(7, 100), report(9, None)) == (9, DriverMemoryKind.NVML, None)
    assert seen(report(None, 100), report(None, 120)) == (120, DriverMemoryKind.RSS, None)
    assert seen(report(None, None)) == (None, None, None)


def test_a_device_has_the_memory_that_its_driver_says_unless_a_rank_told_it() -> None:
    def capacity(told: int | None, *drivers: int | None) -> int | None:
        reports = [NodeReport(node="a", ranks=[], device_memory_bytes=one) for one in drivers]
        measurement = measured(result(1.0, device_memory_bytes=told))
        return with_driver_memory(measurement, reports).device_memory_bytes

    assert capacity(None, 80, None, 80) == 80
    assert capacity(79, 80) == 79
    # The peak may be of either device.
    assert capacity(None, 80, 40) is None
    assert capacity(None, None) is None


@pytest.mark.parametrize(("retries", "thrashes"), [(3, True), (1, True), (0, False), (None, False)])
def test_retries_of_the_allocator_while_steps_run_are_thrashing(
    retries: int | None, thrashes: bool
) -> None:
    # The allocator has 22.5 of 24 GiB; CUDA's context, NCCL's buffers and the display, the rest.
    found = measured(
        result(
            1.0,
            allocator_retries=retries,
            peak_memory_reserved_bytes=int(22.5 * 2**30),
            device_memory_bytes=24 * 2**30,
        )
    )
    assert found.thrashing is thrashes


def test_a_noisy_measurement_is_not_called_confident() -> None:
    assert not measured(result(*[1.0, 2.0] * 10)).confident
    assert not measured(result(*[1.0] * 5)).confident  # too few for an interval


@given(samples=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_a_summary_lies_within_its_samples(samples: list[float]) -> None:
    summary = summarise_steps(samples)
    assert summary.num_steps == len(samples)
    assert summary.median == statistics.median(samples)
    assert 0 <= summary.iqr <= max(samples) - min(samples) + 1e-9


@pytest.mark.parametrize(
    ("confident", "num_steps", "relative_confidence", "why"),
    [
        (True, 20, 0.01, None),
        (None, None, None, None),
        (False, 1, None, Unsure.ONE_NUMBER),
        (False, FEWEST_STEPS - 1, None, Unsure.FEW_STEPS),
        (False, 40, 0.15, Unsure.VARIED),
    ],
)
def test_why_a_number_is_less_sure_than_asked_for(
    confident: bool | None,
    num_steps: int | None,
    relative_confidence: float | None,
    why: Unsure | None,
) -> None:
    assert (
        why_unsure(
            confident=confident, num_steps=num_steps, relative_confidence=relative_confidence
        )
        is why
    )


def test_the_fewest_steps_that_have_an_interval_are_those_that_are_named() -> None:
    assert relative_confidence([1.0] * (FEWEST_STEPS - 1)) is None
    assert relative_confidence([1.0] * FEWEST_STEPS) is not None


def test_an_interval_as_narrow_as_asked_for_is_narrow_enough() -> None:
    steps = [1.0, 1.01, 1.02, 1.0, 1.03, 1.01]
    width = relative_confidence(steps)
    assert width is not None

    def is_confident(asked: float) -> bool:
        plan = PLAN.model_copy(update={"relative_confidence": asked})
        found = measure(
            [result(*steps)], model=MODEL, sequence_length=4096, layout=LAYOUT, plan=plan
        )
        return found.confident

    assert is_confident(width) and not is_confident(width * 0.999)


# --- what a measurement does not show -------------------------------------------------------------


GPU_PLAN = PLAN.model_copy(update={"min_seconds": 5.0, "warmup_seconds": 2.0})


def on_gpu(*seconds: float, **known: Any) -> Measurement:
    return measure(
        [result(*seconds, **known)],
        model=MODEL,
        sequence_length=4096,
        layout=LAYOUT,
        plan=GPU_PLAN,
    )


def why(measurement: Measurement) -> str | None:
    return why_unsure(
        confident=measurement.confident,
        num_steps=measurement.step_time.num_steps,
        relative_confidence=measurement.step_time.relative_confidence,
        implausible=measurement.implausible,
        unsteady=measurement.unsteady,
        step_seconds_bound=measurement.step_seconds_bound,
    )


def test_steps_that_become_slower_while_they_are_timed_are_no_confident_measurement() -> None:
    found = on_gpu(*[1.0 + place / 500 for place in range(20)])
    assert not found.confident
    assert found.unsteady == why(found)
    assert "its steps became 2.7% slower while they were timed" in str(found.unsteady)
    assert measured(result(*[1.0 + place / 500 for place in range(20)])).unsteady is None


def test_a_program_that_ran_too_few_seconds_on_a_gpu_is_told_what_to_change() -> None:
    found = on_gpu(*[0.06] * 20)
    assert not found.confident
    assert found.unsteady is not None
    assert "1.2 s of the 5 s" in found.unsteady
    assert "max_steps" in found.unsteady
    assert on_gpu(*[0.5] * 10).confident
    assert on_gpu(0.5).unsteady is None, "one number of a table may stand for many steps"


def test_numbers_of_a_trial_that_was_ended_early_are_bounds() -> None:
    found = on_gpu(1.5, 1.6, step_seconds_bound=1.4)
    assert found.step_seconds_bound == 1.4
    assert not found.confident
    assert found.unsteady is None
    assert why(found) == Unsure.ENDED_EARLY


def test_a_range_of_quartiles_lies_between_the_steps_of_each_half() -> None:
    """From two to four, of one to five seconds; half of what is between two numbers."""
    assert summarise_steps([5.0, 1.0, 2.0, 4.0, 3.0]).iqr == pytest.approx(2.0)
    assert summarise_steps([1.0, 3.0]).iqr == pytest.approx(1.0)
    assert summarise_steps([7.0]).iqr == 0.0


def test_the_kernel_of_attention_is_the_first_that_a_rank_tells() -> None:
    silent, one, other = (
        result(1.0, attention_kernel=name) for name in (None, "flash", "efficient")
    )
    assert measured(silent, one, other).attention_kernel == "flash"
    assert measured(silent).attention_kernel is None


def test_six_steps_have_an_interval() -> None:
    assert relative_confidence([1.0] * 5) is None
    assert relative_confidence([1.0] * 6) == 0.0
