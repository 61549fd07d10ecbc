"""Where the GPU-seconds of a sweep went: into timed steps, around them, into attempts that brought no number, or nowhere.

The parts add up to what was held, always. What each means in words stands in docs/measuring.md; the view v_gpu_seconds adds up the same in SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from math import fsum
from typing import Self

from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, FailureKind
from orchestrator.core.trial.protocol import Phase, RankResult


class Outcome(StrEnum):
    """What an attempt came to, as far as its cost is concerned."""

    COUNTS = "counts"  # its measurement is its trial's, or one of those whose median is
    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"  # with its node or its orchestrator, or preempted
    CANCELLED = (
        "cancelled"  # somebody asked for its end: the trial waits, and nothing is wrong with it
    )
    FAILED = "failed"  # any other that brought no number that counts, invalidated ones included


LOST_KINDS = frozenset(
    {FailureKind.NODE_LOST, FailureKind.ORCHESTRATOR_LOST, FailureKind.PREEMPTED}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leased:
    """What the gangs of a scheduler have held since it was opened, in GPU-seconds."""

    held: float  # from the moment that a gang's slots were reserved until they were given back
    idle: float  # of it, while no attempt was on them
    capacity: (
        float | None
    )  # all slots of the cluster, as long as the scheduler was open; None: its time is not the cluster's


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldGpuSeconds:
    """GPU-seconds by what they went into. No two parts share any."""

    useful: float = 0.0  # timed steps of measurements that count
    warmup: float = 0.0  # their first step, and the steps before the timed ones
    startup: float = 0.0  # the rest of these attempts: what is around and between their steps
    failed: float = 0.0
    out_of_memory: float = 0.0
    lost: float = 0.0
    cancelled: float = 0.0
    in_flight: float = 0.0  # of attempts that have not ended
    idle: float = 0.0  # leased, and no attempt on them

    @property
    def held(self) -> float:
        return fsum(astuple(self))

    @property
    def parts(self) -> dict[str, float]:
        """By name, in the order above."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{name: value + getattr(other, name) for name, value in self.parts.items()}
        )


def outcome_of(failure_kind: FailureKind | None, *, counts: bool) -> Outcome:
    """`counts`: it has a measurement that counts. An out-of-memory that is tried again cost one all the same."""
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
) -> HeldGpuSeconds:
    """The parts of one attempt that has ended; seconds of steps as `step_seconds_within` bounds them, None: not known."""
    match outcome:
        case Outcome.COUNTS:
            useful, warmup = (timed_seconds or 0.0) * num_gpus, (warmup_seconds or 0.0) * num_gpus
            return HeldGpuSeconds(
                useful=useful, warmup=warmup, startup=gpu_seconds - useful - warmup
            )
        case Outcome.OUT_OF_MEMORY:
            return HeldGpuSeconds(out_of_memory=gpu_seconds)
        case Outcome.LOST:
            return HeldGpuSeconds(lost=gpu_seconds)
        case Outcome.CANCELLED:
            return HeldGpuSeconds(cancelled=gpu_seconds)
        case Outcome.FAILED:
            return HeldGpuSeconds(failed=gpu_seconds)


def step_seconds_within(
    held_seconds: float,
    *,
    timed: Sequence[float],
    results: Sequence[RankResult],
    phases: Mapping[Phase, float],
) -> tuple[float, float | None]:
    """Seconds of the timed steps and of those before them, the slowest rank's; the second None where no rank says.

    Never more than was held: workload synthetic tells of steps that it did not wait for, and a clock may be wrong.
    """
    timed_seconds = min(fsum(timed), held_seconds)
    warmups = [r.warmup_seconds for r in results]
    if all(warmups) and len({len(steps) for steps in warmups}) == 1:
        told: float | None = fsum(max(step) for step in zip(*warmups, strict=True))
    else:
        told = phases.get(Phase.FIRST_STEP)  # a foreign program need not time its warm-up
    return timed_seconds, None if told is None else min(told, held_seconds - timed_seconds)
