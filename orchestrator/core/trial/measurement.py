"""Computes the numbers of an attempt from its step samples.

The confidence interval of the median comes from order statistics (the sign test's inverse), so it
assumes nothing about the distribution of step times. With fewer than six samples no 95 % interval
exists, and none is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import MFU_FORMULA, ModelShape
from orchestrator.core.trial.extra import bounded_extra
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import DriverMemoryKind, MeasurementPlan, RankResult
from orchestrator.core.trial.stopping import has_trend, relative_confidence, relative_trend

# A 95 % interval needs this many. Even the full range of fewer holds the median less often.
FEWEST_STEPS = 6

# What a trial on GPUs takes besides its steps, until measured: start, rendezvous, first step,
# clean-up.
LAUNCH_SECONDS = 60.0


class ImplausibleMeasurement(ValueError):
    """The numbers break physics: a bug in a formula, a peak or a clock, never a result."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the timed optimizer steps, each the slowest rank's."""

    median: float
    iqr: float
    num_steps: int
    # Half-width of the median's 95 % interval over the median; None below 6 samples.
    relative_confidence: float | None


class Unsure(StrEnum):
    """The reasons why a measurement is less precise than the plan asks, in words."""

    ONE_NUMBER = "the run reported one number, so the spread of its steps is unknown"
    FEW_STEPS = (
        f"too few timed steps for a 95 % interval, which takes {FEWEST_STEPS} "
        "(measurement.max_steps, or a program that reports more)"
    )
    ENDED_EARLY = "ended early: even its fastest step was far slower than the best layout's"
    VARIED = (
        "the steps varied too much for the precision asked for (measurement.precision, max_steps)"
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The headline numbers of an attempt. Unknown is None."""

    tokens_per_second: float
    tokens_per_second_per_gpu: float
    step_time: StepTime
    step_seconds: tuple[float, ...]  # every sample, of the slowest rank
    confident: bool  # False: max_steps was reached first
    mfu: float | None
    hfu: float | None
    mfu_formula: str
    peak_flops: float | None
    peak_flops_source: str | None
    peak_memory_allocated_bytes: int | None  # worst rank
    peak_memory_reserved_bytes: int | None
    device_memory_bytes: int | None
    allocator_retries: int | None
    thrashing: bool
    loss_first: float | None
    loss_last: float | None
    # As the allocator of the worst rank's GPU counts; `device_used_bytes` is that of all processes.
    peak_memory_active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    device_used_bytes: int | None = None
    allocator_ooms: int | None = None
    # As the driver or the kernel saw it, with its kind; kept apart from the allocator's bytes.
    peak_memory_driver_bytes: int | None = None
    peak_memory_driver_kind: DriverMemoryKind | None = None
    # The program's own fields, as JSON; None: it reported none.
    extra: Mapping[str, Any] | None = None
    # Why the numbers cannot be true (plausibility.py), with the fix; None: nothing shows it.
    implausible: str | None = None
    # The kernel that ran, as the program names it.
    attention_kernel: str | None = None
    # Within the phases, of the slowest rank.
    compile_seconds: float | None = None
    # Why the steps do not show the speed of a long run; None: nothing shows it.
    unsteady: str | None = None
    # What nothing checks of the step times (unchecked.py), or of what reaches the program, with the
    # fix.
    unchecked: str | None = None
    # A step takes at least so long: the trial was ended early, since it cannot be the best. Its
    # other numbers are of a few steps, and are not ranked. None: it was timed to its end.
    step_seconds_bound: float | None = None


def why_unsure(
    *,
    confident: bool | None,
    num_steps: int | None,
    relative_confidence: float | None,
    implausible: str | None = None,
    unsteady: str | None = None,
    step_seconds_bound: float | None = None,
) -> str | None:
    """Return why a measurement is less sure than the plan asks; None: it is not."""
    if confident is not False:
        return None
    if implausible is not None:
        return f"its numbers cannot be true: {implausible}"
    if step_seconds_bound is not None:
        return Unsure.ENDED_EARLY
    if num_steps == 1:
        return Unsure.ONE_NUMBER
    if relative_confidence is None:
        return Unsure.FEW_STEPS
    return unsteady or Unsure.VARIED


def why_unsteady(samples: Sequence[float], plan: MeasurementPlan) -> str | None:
    """Return why timed steps do not show the speed of a long run; None: nothing shows it."""
    if has_trend(samples, plan):
        change = relative_trend(samples)
        return (
            f"its steps became {abs(change):.1%} {'slower' if change > 0 else 'faster'} while they"
            " were timed (measurement.max_steps, or a device that does not settle)"
        )
    # One number may be the median of any number of steps.
    if len(samples) > 1 and sum(samples) < plan.min_seconds:
        return (
            f"its timed steps took {sum(samples):.2g} s of the {plan.min_seconds:g} s that a device"
            " needs to settle (measurement.max_steps, min_seconds)"
        )
    return None


def summarise_steps(samples: Sequence[float]) -> StepTime:
    """Median, interquartile range and confidence of step samples (at least one)."""
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    else:
        low = high = samples[0]
    return StepTime(
        median=statistics.median(samples),
        iqr=high - low,
        num_steps=len(samples),
        relative_confidence=relative_confidence(samples),
    )


def measure(
    results: Sequence[RankResult],
    *,
    model: ModelShape,
    sequence_length: int,
    layout: Layout,
    plan: MeasurementPlan,
) -> Measurement:
    """Merge the results of all ranks: each step as the slowest, memory as the worst has it.

    Ranks without steps report their memory. Raises ImplausibleMeasurement if the others have
    different numbers of steps, or MFU or HFU exceeds 1.
    """
    timed = [r for r in results if r.step_seconds]
    slowest = _slowest_steps(timed)
    bounds = [r.step_seconds_bound for r in results if r.step_seconds_bound is not None]
    bound = max(bounds, default=None)
    step_time = summarise_steps(slowest)
    unsteady = why_unsteady(slowest, plan) if bound is None else None
    tokens = timed[0].tokens_per_step or layout.global_batch_size * sequence_length
    per_gpu = tokens / step_time.median / layout.world_size
    utilisation = _utilisation(
        results, per_gpu, model=model, sequence_length=sequence_length, layout=layout
    )
    retries = _worst(r.allocator_retries for r in results)
    capacities = [r.device_memory_bytes for r in results if r.device_memory_bytes is not None]
    return Measurement(
        tokens_per_second=tokens / step_time.median,
        tokens_per_second_per_gpu=per_gpu,
        step_time=step_time,
        step_seconds=slowest,
        confident=step_time.relative_confidence is not None
        and step_time.relative_confidence <= plan.relative_confidence
        and unsteady is None
        and bound is None,
        mfu=utilisation.mfu,
        hfu=utilisation.hfu,
        mfu_formula=MFU_FORMULA,
        peak_flops=utilisation.peak_flops,
        peak_flops_source=utilisation.peak_flops_source,
        peak_memory_allocated_bytes=_worst(r.peak_memory_allocated_bytes for r in results),
        peak_memory_reserved_bytes=_worst(r.peak_memory_reserved_bytes for r in results),
        peak_memory_active_bytes=_worst(r.peak_memory_active_bytes for r in results),
        inactive_split_bytes=_worst(r.inactive_split_bytes for r in results),
        device_used_bytes=_worst(r.device_used_bytes for r in results),
        allocator_ooms=_worst(r.allocator_ooms for r in results),
        device_memory_bytes=min(capacities, default=None),
        allocator_retries=retries,
        # The allocator retries only if the device is full, however much of it NCCL and others use.
        thrashing=bool(retries),
        loss_first=timed[0].loss_first,
        loss_last=timed[0].loss_last,
        extra=_merged_extra([*timed, *results]),
        attention_kernel=next(
            (r.attention_kernel for r in results if r.attention_kernel is not None), None
        ),
        compile_seconds=max(
            (r.compile_seconds for r in results if r.compile_seconds is not None), default=None
        ),
        unsteady=unsteady,
        step_seconds_bound=bound,
    )


def _slowest_steps(timed: Sequence[RankResult]) -> tuple[float, ...]:
    """Return each step's seconds on its slowest rank. Raises ImplausibleMeasurement."""
    counts = {len(r.step_seconds) for r in timed}
    if len(counts) != 1:
        raise ImplausibleMeasurement(f"ranks timed different numbers of steps: {sorted(counts)}")
    return tuple(max(step) for step in zip(*(r.step_seconds for r in timed), strict=True))


@dataclass(frozen=True, kw_only=True)
class _Utilisation:
    """The use of a device's FLOP/s; None: no rank knows their peak."""

    mfu: float | None = None
    hfu: float | None = None
    peak_flops: float | None = None
    peak_flops_source: str | None = None


def _utilisation(
    results: Sequence[RankResult],
    per_gpu: float,
    *,
    model: ModelShape,
    sequence_length: int,
    layout: Layout,
) -> _Utilisation:
    """Return MFU and HFU at `per_gpu` tokens per second. Raises ImplausibleMeasurement above 1."""
    peak, source = min(
        ((r.peak_flops, r.peak_flops_source) for r in results if r.peak_flops is not None),
        key=lambda peak: peak[0],
        default=(None, None),
    )
    if peak is None:
        return _Utilisation()
    model_flops = model.flops_per_token(sequence_length)
    flops = hardware_flops_per_token(model, sequence_length=sequence_length, layout=layout)
    mfu, hfu = per_gpu * model_flops / peak, per_gpu * flops / peak
    if hfu > 1:
        raise ImplausibleMeasurement(
            f"MFU {mfu:.1%}, HFU {hfu:.1%}: more than the device can do. {per_gpu:.0f} "
            f"tokens/s/GPU at {model_flops:.3g} FLOPs a token, peak {peak:.3g} FLOP/s "
            f"({source or 'unknown source'}). The reported steps are too short (call "
            "torch.cuda.synchronize() before you read the clock), or the peak or the sizes of "
            "`model` are wrong"
        )
    return _Utilisation(mfu=mfu, hfu=hfu, peak_flops=peak, peak_flops_source=source)


def with_driver_memory(measurement: Measurement, reports: Sequence[NodeReport]) -> Measurement:
    """Add the highest memory that a driver or kernel saw: of the devices, else of processes.

    The driver also says how much memory a device has, if no rank told it and the devices have
    the same.
    """
    used = _worst(report.gpu.peak_memory_bytes for report in reports)
    kind = DriverMemoryKind.NVML
    if used is None:
        kind = DriverMemoryKind.RSS
        outcomes = [outcome.result for report in reports for outcome in report.ranks]
        used = _worst(r.peak_memory_resident_bytes for r in outcomes if r is not None)
    sizes = {size for report in reports if (size := report.device_memory_bytes) is not None}
    told = measurement.device_memory_bytes
    return replace(
        measurement,
        device_memory_bytes=sizes.pop() if told is None and len(sizes) == 1 else told,
        peak_memory_driver_bytes=used,
        peak_memory_driver_kind=kind if used is not None else None,
    )


def hardware_flops_per_token(model: ModelShape, *, sequence_length: int, layout: Layout) -> float:
    """Return the FLOPs of a device per token, with recomputation: what HFU counts."""
    return model.flops_per_token(sequence_length) + model.recomputed_flops_per_token(
        sequence_length, layout.recompute
    )


def _merged_extra(results: Sequence[RankResult]) -> dict[str, Any] | None:
    """Return the fields of all ranks; of one that several ranks have, the first rank's."""
    merged: dict[str, Any] = {}
    for result in reversed(results):
        merged |= result.extra
    return bounded_extra(merged) or None


def _worst(values: Iterable[int | None]) -> int | None:
    return max((v for v in values if v is not None), default=None)
