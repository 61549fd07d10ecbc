"""Computes how long a rank may stay in each phase: the sweep file's seconds, or `auto`.

An `auto` limit has a minimum, and follows the predicted step time and the step times seen so far.
Launchers, simulations and plans use the same functions. Nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from orchestrator.core.problem.quantile import Z90
from orchestrator.core.trial.measurement import LAUNCH_SECONDS
from orchestrator.core.trial.protocol import (
    MAX_SECONDS,
    LimitName,
    MeasurementPlan,
    PhaseLimits,
    TrialRequest,
)

MINIMUM_SECONDS: Mapping[LimitName, float] = {
    LimitName.START: 120.0,
    LimitName.RENDEZVOUS: 120.0,
    LimitName.FIRST_STEP: 300.0,  # a program may compile for minutes
    LimitName.STEADY: 60.0,
    LimitName.TEARDOWN: 20.0,
    LimitName.TOTAL: 1800.0,
}
# Process groups of 2,048 ranks took 1,047 s to build over torch's store (MegaScale, Jiang et al.,
# NSDI 2024, section 3.5).
RENDEZVOUS_SECONDS_PER_RANK = 0.5
# More for the first step if layers are known to be compiled: on a node, each of its ranks compiles
# for itself, with its share of the cores.
COMPILE_SECONDS = 300.0
# A rank without a new step for this many step times hangs.
STEP_MULTIPLE = 5.0
TOTAL_MULTIPLE = 2.0  # of all steps of the plan
NEAR_MULTIPLE = 2.0  # of the longest predicted step
LONGEST_SDS = Z90  # nine of ten steps are shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """The time of one optimizer step before it has run."""

    seconds: float
    log_sd: float  # standard deviation of its logarithm

    @property
    def longest_seconds(self) -> float:
        """The time under which nine of ten steps stay."""
        return min(self.seconds * exp(min(LONGEST_SDS * self.log_sd, 100.0)), MAX_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenSteps:
    """The step times of an attempt so far. None: no such step has ended."""

    first_seconds: float | None = None  # with compilation
    slowest_seconds: float | None = None  # of the later ones

    @property
    def step_seconds(self) -> float | None:
        """The step time that limits follow. The first step may compile: it counts only alone."""
        return self.slowest_seconds if self.slowest_seconds is not None else self.first_seconds


NOTHING_SEEN = SeenSteps()


def resolve_limits(
    asked: Mapping[LimitName, float | None],
    *,
    plan: MeasurementPlan,
    num_ranks: int,
    predicted: PredictedStep | None,
    compiles: bool = False,
) -> PhaseLimits:
    """Return the limits of an attempt before it starts.

    `asked`: seconds in the file; None: auto. `compiles`: its layers are compiled.
    """
    longest = predicted.longest_seconds if predicted is not None else None

    def limit(name: LimitName, *, more: float = 0.0, at_least: float = 0.0) -> float:
        seconds = asked[name]
        if seconds is None:
            seconds = max(MINIMUM_SECONDS[name] + more, at_least)
        return min(seconds, MAX_SECONDS)

    hang = STEP_MULTIPLE * (longest or 0.0)
    start = limit(LimitName.START)
    rendezvous = limit(LimitName.RENDEZVOUS, more=RENDEZVOUS_SECONDS_PER_RANK * num_ranks)
    to_compile = COMPILE_SECONDS if compiles and asked[LimitName.FIRST_STEP] is None else 0.0
    first_step = limit(LimitName.FIRST_STEP, more=hang + to_compile)
    teardown = limit(LimitName.TEARDOWN)
    total = 0.0
    if longest is not None:
        around = start + rendezvous + first_step + teardown
        total = around + TOTAL_MULTIPLE * _num_steps(plan) * longest
    return PhaseLimits(
        start=start,
        rendezvous=rendezvous,
        first_step=first_step,
        steady=limit(LimitName.STEADY, at_least=hang),
        teardown=teardown,
        total=limit(LimitName.TOTAL, more=to_compile, at_least=total),
        auto=tuple([name for name, seconds in asked.items() if seconds is None]),
        predicted_step_seconds=longest,
        compile_seconds=to_compile,
    )


def limit_seconds(request: TrialRequest, name: LimitName, seen: SeenSteps) -> float:
    """Return the limit in force. The steps seen so far only ever raise it, if it is `auto`."""
    limits = request.limits
    at_start: float = getattr(limits, name)
    step = seen.step_seconds
    if step is None or name not in limits.auto:
        return at_start
    match name:
        case LimitName.STEADY:
            by_steps = STEP_MULTIPLE * step
        case LimitName.TOTAL:
            around = limits.start + limits.rendezvous + limits.first_step + limits.teardown
            by_steps = around + TOTAL_MULTIPLE * _num_steps(request.measurement) * step
        case _:
            return at_start
    return max(at_start, min(by_steps, MAX_SECONDS))


def passed_message(
    request: TrialRequest, name: LimitName, seen: SeenSteps, *, step: int | None = None
) -> str:
    """Return a message: which limit has passed, its source, and what to change.

    `step`: the last one that began, if any.
    """
    seconds = limit_seconds(request, name, seen)
    after = f" without a new step after step {step}" if step is not None else ""
    return f"{name} limit of {seconds:.4g} s passed{after}{_source(request, name, seen)}"


def longest_safe_step(
    name: LimitName, seconds: float, *, plan: MeasurementPlan, log_sd: float
) -> float | None:
    """Return the longest predicted step for which a limit of `seconds` is wide enough.

    It is wide enough for NEAR_MULTIPLE of the longest step, or for all the steps of the plan.
    None: the limit does not depend on steps.
    """
    match name:
        case LimitName.FIRST_STEP | LimitName.STEADY:
            return seconds / NEAR_MULTIPLE / exp(LONGEST_SDS * log_sd)
        case LimitName.TOTAL:
            return max(seconds - LAUNCH_SECONDS, 0.0) / _num_steps(plan)
        case _:
            return None


def _source(request: TrialRequest, name: LimitName, seen: SeenSteps) -> str:
    limits, key = request.limits, f"measurement.limits.{name}"
    if not limits.in_file:
        return ""
    if name not in limits.auto:
        return f" ({key} of the sweep file; if this is no hang, raise it or write auto)"
    return f" (auto: {_reason(request, name, seen)}; if this is no hang, set {key})"


def _reason(request: TrialRequest, name: LimitName, seen: SeenSteps) -> str:
    """Describe the rule that an `auto` limit follows."""
    limits, least = request.limits, MINIMUM_SECONDS[name]
    in_force = limit_seconds(request, name, seen)
    if name is LimitName.RENDEZVOUS:
        return f"{least:g} s and {RENDEZVOUS_SECONDS_PER_RANK:g} s a rank"
    if name in (LimitName.FIRST_STEP, LimitName.TOTAL):
        least += limits.compile_seconds
    step, source = limits.predicted_step_seconds, "predicted to take at most"
    if in_force > getattr(limits, name):
        step = seen.step_seconds
        source = "the first took" if seen.slowest_seconds is None else "the slowest so far took"
    if step is None or in_force == least:
        return "the minimum"
    num_steps = _num_steps(request.measurement)
    compiling = " to compile" if limits.compile_seconds else ""
    rule = {
        LimitName.FIRST_STEP: f"{least:g} s{compiling} and {STEP_MULTIPLE:g} x a step",
        LimitName.STEADY: f"{STEP_MULTIPLE:g} x a step",
        LimitName.TOTAL: f"{TOTAL_MULTIPLE:g} x {num_steps} steps and what is around them",
    }[name]
    return f"{rule}, {source} {step:.3g} s"


def _num_steps(plan: MeasurementPlan) -> int:
    return plan.warmup_steps + plan.max_steps
