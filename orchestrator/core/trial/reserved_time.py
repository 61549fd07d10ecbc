"""Divides a sweep's GPU-seconds: timed steps, the time around them, lost attempts, idleness.

The parts always add up to the reserved GPU time. docs/measuring.md explains each of them; the view
v_gpu_seconds computes the same in SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from typing import Self

from orchestrator.core.trial.failure_kinds import LOST_KINDS, OUT_OF_MEMORY_KINDS, FailureKind
from orchestrator.core.trial.protocol import Phase, RankResult


class Outcome(StrEnum):
    """The result of an attempt, for the account of its cost."""

    COUNTS = "counts"  # its measurement counts
    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"  # with node or orchestrator, or preempted
    CANCELLED = "cancelled"  # on request: the trial waits again
    FAILED = "failed"  # any other, invalidated ones included


@dataclass(frozen=True, kw_only=True, slots=True)
class Leased:
    """GPU-seconds that a scheduler's gangs have reserved since it was opened."""

    reserved: float  # from reservation to return of slots
    idle: float  # part of `reserved`: without an attempt
    # All slots of the cluster since the scheduler was opened; None: its time is not the cluster's.
    capacity: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedGpuSeconds:
    """Reserved GPU-seconds by use. The parts do not overlap."""

    useful: float = 0.0  # timed steps of measurements that count
    warmup: float = 0.0  # the untimed steps of these attempts
    startup: float = 0.0  # the rest of these attempts
    profile: float = 0.0  # profiles, which measure nothing that counts
    failed: float = 0.0
    out_of_memory: float = 0.0
    lost: float = 0.0
    cancelled: float = 0.0
    under_way: float = 0.0  # attempts that have not ended
    idle: float = 0.0  # leased, without an attempt

    @property
    def reserved(self) -> float:
        return fsum(self.parts.values())

    def dollars(self, price_per_gpu_hour: float) -> float:
        """Return what the reserved GPU-seconds cost."""
        return self.reserved / 3600 * price_per_gpu_hour

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, in the order above."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{name: value + getattr(other, name) for name, value in self.parts.items()}
        )


def outcome_of(failure_kind: FailureKind | None, *, counts: bool) -> Outcome:
    """Return the outcome of an attempt. `counts`: it has a measurement that counts."""
    if counts:
        return Outcome.COUNTS
    if failure_kind in OUT_OF_MEMORY_KINDS:
        return Outcome.OUT_OF_MEMORY
    if failure_kind is FailureKind.CANCELLED:
        return Outcome.CANCELLED
    return Outcome.LOST if failure_kind in LOST_KINDS else Outcome.FAILED


def of_attempt(
    gpu_seconds: float,
    *,
    num_gpus: int,
    outcome: Outcome,
    timed_seconds: float | None,
    warmup_seconds: float | None,
) -> ReservedGpuSeconds:
    """Return the parts of an ended attempt. Step seconds are those of `step_seconds_within`."""
    if outcome is not Outcome.COUNTS:
        return ReservedGpuSeconds(**{outcome.value: gpu_seconds})
    useful, warmup = (timed_seconds or 0.0) * num_gpus, (warmup_seconds or 0.0) * num_gpus
    return ReservedGpuSeconds(useful=useful, warmup=warmup, startup=gpu_seconds - useful - warmup)


def step_seconds_within(
    reserved_seconds: float,
    *,
    timed: Sequence[float],
    results: Sequence[RankResult],
    phases: Mapping[Phase, float],
) -> tuple[float, float | None]:
    """Return the slowest rank's seconds in timed steps, and in the steps before (None: unknown).

    A sample that a program printed may cover several steps. Never more than was reserved:
    workload synthetic does not wait for its steps, and a clock may be wrong.
    """
    every = max((r.seen.every for r in results if r.step_seconds and r.seen is not None), default=1)
    timed_seconds = min(every * fsum(timed), reserved_seconds)
    warmups = [r.warmup_seconds for r in results if r.step_seconds]
    if all(warmups) and len({len(steps) for steps in warmups}) == 1:
        warmup: float | None = every * fsum(max(step) for step in zip(*warmups, strict=True))
    else:
        warmup = phases.get(Phase.FIRST_STEP)  # a foreign program's warm-up is untimed
    return timed_seconds, None if warmup is None else min(warmup, reserved_seconds - timed_seconds)
