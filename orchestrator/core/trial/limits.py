"""How long a rank may stay in each phase: what the sweep file says, or `auto`.

An `auto` limit is a floor, and a multiple of the step that is predicted and of the steps that are seen. Launchers, simulations and plans
use the same functions. Nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from orchestrator.core.problem.normal import Z90
from orchestrator.core.trial.measurement import LAUNCH_SECONDS
from orchestrator.core.trial.protocol import (
    MAX_SECONDS,
    LimitName,
    MeasurementPlan,
    PhaseLimits,
    TrialRequest,
)

FLOOR_SECONDS: Mapping[LimitName, float] = {
    LimitName.START: 120.0,
    LimitName.RENDEZVOUS: 120.0,
    LimitName.FIRST_STEP: 300.0,  # a first step may compile for minutes
    LimitName.STEADY: 60.0,
    LimitName.TEARDOWN: 20.0,
    LimitName.TOTAL: 1800.0,
}
# Process groups of 2,048 ranks took 1,047 s to build over torch's store (MegaScale, Jiang et al., NSDI 2024, section 3.5).
RENDEZVOUS_SECONDS_PER_RANK = 0.5
STEP_MULTIPLE = 5.0  # of a step, without a new one: then it is a hang
TOTAL_MULTIPLE = 2.0  # of all steps that may be asked for
NEAR_MULTIPLE = 2.0  # of the longest step that is predicted: a number below is near
LONGEST_SDS = Z90  # of the logarithm: nine of ten steps are predicted to be shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """The time of one optimizer step before it has run."""

    seconds: float
    log_sd: float  # standard deviation of its logarithm

    @property
    def longest_seconds(self) -> float:
        """The time that nine of ten steps stay under."""
        return min(self.seconds * exp(min(LONGEST_SDS * self.log_sd, 100.0)), MAX_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenSteps:
    """The step times of an attempt so far. None: no such step has ended."""

    first_seconds: float | None = None  # compilation included
    slowest_seconds: float | None = None  # of those after it

    @property
    def step_seconds(self) -> float | None:
        """The step time that limits follow. The first counts until a later one has ended, since it may have compiled."""
        return self.slowest_seconds if self.slowest_seconds is not None else self.first_seconds


NOTHING_SEEN = SeenSteps()


def resolve_limits(
    asked: Mapping[LimitName, float | None],
    *,
    plan: MeasurementPlan,
    num_ranks: int,
    predicted: PredictedStep | None,
) -> PhaseLimits:
    """The limits of an attempt before it starts. `asked` has seconds as the file says them; None: auto."""
    longest = predicted.longest_seconds if predicted is not None else None

    def of(name: LimitName, *, more: float = 0.0, at_least: float = 0.0) -> float:
        """The number, or the floor with `more`, and `at_least` so much."""
        said = asked[name]
        return min(max(FLOOR_SECONDS[name] + more, at_least) if said is None else said, MAX_SECONDS)

    of_step = STEP_MULTIPLE * (longest or 0.0)
    start = of(LimitName.START)
    rendezvous = of(LimitName.RENDEZVOUS, more=RENDEZVOUS_SECONDS_PER_RANK * num_ranks)
    first_step = of(LimitName.FIRST_STEP, more=of_step)
    teardown = of(LimitName.TEARDOWN)
    all_steps = (
        0.0
        if longest is None
        else start
        + rendezvous
        + first_step
        + teardown
        + TOTAL_MULTIPLE * _num_steps(plan) * longest
    )
    return PhaseLimits(
        start=start,
        rendezvous=rendezvous,
        first_step=first_step,
        steady=of(LimitName.STEADY, at_least=of_step),
        teardown=teardown,
        total=of(LimitName.TOTAL, at_least=all_steps),
        auto=tuple([name for name, said in asked.items() if said is None]),
        predicted_step_seconds=longest,
    )


def limit_seconds(request: TrialRequest, name: LimitName, seen: SeenSteps) -> float:
    """The limit in force. Steps that are seen can only raise it, and only where it is `auto`."""
    limits = request.limits
    said: float = getattr(limits, name)
    step = seen.step_seconds
    if step is None or name not in limits.auto:
        return said
    match name:
        case LimitName.STEADY:
            return max(said, min(STEP_MULTIPLE * step, MAX_SECONDS))
        case LimitName.TOTAL:
            around = limits.start + limits.rendezvous + limits.first_step + limits.teardown
            return max(
                said,
                min(around + TOTAL_MULTIPLE * _num_steps(request.measurement) * step, MAX_SECONDS),
            )
        case _:
            return said


def told_passed(
    request: TrialRequest, name: LimitName, seen: SeenSteps, *, step: int | None = None
) -> str:
    """Say that a limit has passed, where it comes from, and what to change. `step`: the last one that began, if any."""
    after = f" without a new step after step {step}" if step is not None else ""
    return f"{name} limit of {limit_seconds(request, name, seen):.4g} s passed{after}{_source(request, name, seen)}"


def longest_safe_step(
    name: LimitName, seconds: float, *, plan: MeasurementPlan, log_sd: float
) -> float | None:
    """The predicted seconds of a step up to which a limit of so many seconds is not near; None: the limit is of something else.

    Near is less than `NEAR_MULTIPLE` of the longest step, or less than all the steps that may be asked for.
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
    """The rule that an `auto` limit follows, in words."""
    limits, floor = request.limits, FLOOR_SECONDS[name]
    in_force, said = limit_seconds(request, name, seen), getattr(limits, name)
    if name is LimitName.RENDEZVOUS:
        return f"{floor:g} s and {RENDEZVOUS_SECONDS_PER_RANK:g} s a rank"
    step, whose = limits.predicted_step_seconds, "predicted to take at most"
    if in_force > said:
        step, whose = (
            seen.step_seconds,
            "the first took" if seen.slowest_seconds is None else "the slowest so far took",
        )
    if step is None or in_force == floor:
        return "the minimum"
    what = {
        LimitName.FIRST_STEP: f"{floor:g} s and {STEP_MULTIPLE:g} x a step",
        LimitName.STEADY: f"{STEP_MULTIPLE:g} x a step",
        LimitName.TOTAL: f"{TOTAL_MULTIPLE:g} x {_num_steps(request.measurement)} steps and what is around them",
    }[name]
    return f"{what}, {whose} {step:.3g} s"


def _num_steps(plan: MeasurementPlan) -> int:
    return plan.warmup_steps + plan.max_steps
