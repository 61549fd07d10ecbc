"""Measurements that contradict physics: a layout does less work for a token than another, and is
slower. One of the two is wrong.

Only layouts are compared, so it holds for any program. A layout at the edge of its memory
(thrashing) may well be slower: that is no contradiction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf, log, sqrt

from orchestrator.core.problem.layout import NO_RECOMPUTE, Layout, Recompute, RecomputeMode

# How much slower, beyond noise, a layout that does less work may be, relative.
RECOMPUTE_MARGIN = 0.05
# Larger products seldom are slower, but caches have sizes.
MICRO_BATCH_MARGIN = 0.15
SURE = 2.8  # standard deviations of the difference
# Relative: only a result so near to the best matters.
NEAR_BEST = 0.10


@dataclass(frozen=True, kw_only=True)
class TimedLayout:
    """The measurement of a layout."""

    layout: Layout
    seconds: float  # of a step
    sd: float  # relative
    thrashing: bool


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """Two measurements, one of them wrong."""

    less: int  # does less work, and was slower
    more: int
    slower: float  # relative


def contradictions(
    measured: Mapping[int, TimedLayout], among: Collection[int], *, best_seconds: float
) -> list[Contradiction]:
    """Pairs in which one is of `among` and the faster is near the best, the plainest first."""
    groups: dict[Layout, list[int]] = defaultdict(list)
    for key, taken in measured.items():
        for shape in shapes(taken.layout):
            groups[shape].append(key)
    found: dict[tuple[int, int], Contradiction] = {}
    for key in among:
        for other in (other for shape in shapes(measured[key].layout) for other in groups[shape]):
            for less, more in ((key, other), (other, key)):
                is_near = measured[more].seconds <= best_seconds * (1 + NEAR_BEST)
                if is_near and (slower := _slower(measured[less], measured[more])) is not None:
                    found[less, more] = Contradiction(less=less, more=more, slower=slower)
    return sorted(found.values(), key=lambda one: (-one.slower, one.less, one.more))


def shapes(layout: Layout) -> list[Layout]:
    """Keys shared by comparable layouts: without recomputation, and without micro-batches."""
    found = [replace(layout, recompute=NO_RECOMPUTE)]
    if layout.pipeline_parallel_size == 1:  # fewer micro-batches leave a larger bubble
        sequences = layout.micro_batch_size * layout.grad_accum_steps
        found.append(replace(layout, micro_batch_size=1, grad_accum_steps=sequences))
    return found


def _slower(less: TimedLayout, more: TimedLayout) -> float | None:
    """The relative excess of `less` over `more`, if physics rules it out; else None."""
    margin = _margin(less.layout, more.layout)
    if margin is None or less.thrashing:
        return None
    off = log(less.seconds / more.seconds)
    if off <= log(1 + margin) + SURE * sqrt(less.sd**2 + more.sd**2):
        return None
    return less.seconds / more.seconds - 1


def _margin(less: Layout, more: Layout) -> float | None:
    """Return how much slower the first may be, relative, if it does less work than the second.

    None: it does not, or they differ in more.
    """
    if replace(less, recompute=more.recompute) == more:
        return RECOMPUTE_MARGIN if recomputes_less(less.recompute, more.recompute) else None
    resized = replace(
        less, micro_batch_size=more.micro_batch_size, grad_accum_steps=more.grad_accum_steps
    )
    same_work = less.global_batch_size == more.global_batch_size
    if less.pipeline_parallel_size == 1 and same_work and resized == more:
        return MICRO_BATCH_MARGIN if less.micro_batch_size > more.micro_batch_size else None
    return None


_ORDER = (RecomputeMode.NONE, RecomputeMode.SELECTIVE, RecomputeMode.FULL)


def recomputes_less(first: Recompute, second: Recompute) -> bool:
    """True if the second recomputes all that the first does, and more."""
    layers = [inf if one.num_layers is None else one.num_layers for one in (first, second)]
    if first.mode is RecomputeMode.NONE:
        return second.mode is not RecomputeMode.NONE
    if first.mode is second.mode:
        return first.policy is second.policy and layers[0] < layers[1]
    return _ORDER.index(first.mode) < _ORDER.index(second.mode) and layers[0] <= layers[1]
