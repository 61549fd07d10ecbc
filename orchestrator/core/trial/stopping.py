"""Decides how many steps are warm-up, and when the timed steps are enough.

Ranks, programs and simulations pass the seconds of new steps to `advance_timing`, so all decide by
the same rule. Nothing here knows a clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from orchestrator.core.trial.protocol import MAX_SAMPLES, MeasurementPlan

CONFIDENCE = 0.95
# Stopping once the 95 % interval is narrow would select samples for which it is too narrow (by
# simulation, docs/decisions).
STOPPING_CONFIDENCE = 0.99
# Numbers of timed steps after which timing may stop: 8, 12, 16, 24, 32, 48, ...
_STOPPING_COUNTS = tuple(sorted(first << doublings for first in (8, 12) for doublings in range(12)))
# A trend counts if chance shows it in less than 1 of 100 series (Mann-Kendall test).
_TREND_Z = 2.58
# Most values of the test, which is quadratic in them; more samples are medians of blocks.
_TREND_VALUES = 48
_FEWEST_FOR_TREND = 6
# A trial is ended early if even its fastest step is this many times slower than the best layout's
# usual one: clocks and most drift of a machine account for less. If repeats show more drift than
# that, it runs again (winner.ended_early_that_could_win).
TOO_SLOW = 1.25
# Timed steps, after the warm-up, at which that is judged first.
_FIRST_JUDGED = 2
# A device that has not settled after this many times `min_seconds` will not settle.
PATIENCE = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The progress of timing a layout's steps. Steps count from the first of the program."""

    num_warmup: int | None  # None: the warm-up goes on
    # The number of steps at which to check again.
    next_check: int
    is_enough: bool = False
    # Seconds of the fastest step, if that shows that the layout cannot be the best.
    bound: float | None = None

    @property
    def is_timed(self) -> bool:
        """True if the next step is one of the timed ones."""
        return self.num_warmup is not None


def begin(plan: MeasurementPlan) -> Timing:
    """Return the state before the first step."""
    return Timing(num_warmup=None, next_check=plan.warmup_steps)


def advance_timing(timing: Timing, samples: Sequence[float], plan: MeasurementPlan) -> Timing:
    """Return the state after these steps, in seconds of the slowest rank, the first one included.

    Steps that come several at a time are judged as if they came one by one, but the caller may take
    steps that are no longer needed: `next_check` says how many are.
    """
    while not timing.is_enough and len(samples) >= timing.next_check:
        seen = samples[: timing.next_check]
        if timing.num_warmup is None:
            timing = _check_warmup(timing, seen, plan)
        else:
            timing = _check_timed(timing, seen, timing.num_warmup, plan)
    return timing


def _check_warmup(timing: Timing, samples: Sequence[float], plan: MeasurementPlan) -> Timing:
    """The warm-up takes `warmup_seconds`, without the first step, which may compile."""
    num, after_first = len(samples), samples[1:]
    missing = plan.warmup_seconds - sum(after_first)
    if missing > 0 and num < MAX_SAMPLES:
        usual = statistics.median(after_first or samples)
        more = min(math.ceil(missing / usual), num, MAX_SAMPLES - num)
        return replace(timing, next_check=num + more)
    return replace(timing, num_warmup=num, next_check=num + _next_count(0, plan))


def _check_timed(
    timing: Timing, samples: Sequence[float], num_warmup: int, plan: MeasurementPlan
) -> Timing:
    bound = bound_if_too_slow(samples, plan)
    if bound is not None:
        return replace(timing, is_enough=True, bound=bound)
    timed = samples[num_warmup:]
    num, seconds = len(timed), sum(timed)
    if num >= MAX_SAMPLES:
        return replace(timing, is_enough=True)
    if seconds < plan.min_seconds:
        return replace(timing, next_check=num_warmup + _next_count(num, plan))
    if has_trend(timed, plan) and not _is_patience_over(samples, plan):
        # The device had not settled: the first third was warm-up, too.
        num_warmup += num // 3
        next_count = _next_count(num - num // 3, plan)
        return replace(timing, num_warmup=num_warmup, next_check=num_warmup + next_count)
    confidence = relative_confidence(timed, level=STOPPING_CONFIDENCE)
    is_precise = confidence is not None and confidence <= plan.relative_confidence
    if is_precise or num >= plan.max_steps:
        return replace(timing, is_enough=True)
    return replace(timing, next_check=num_warmup + _next_count(num, plan))


def _is_patience_over(samples: Sequence[float], plan: MeasurementPlan) -> bool:
    num_after, seconds = len(samples) - plan.warmup_steps, sum(samples[1:])
    return num_after >= plan.max_steps and seconds >= PATIENCE * plan.min_seconds


def _next_count(num: int, plan: MeasurementPlan) -> int:
    """The next number of timed steps, above `num`, at which timing may stop.

    There are few, and precision is judged at a higher confidence than is reported: a test after
    every step stops by luck.
    """
    if plan.beat_seconds is not None and num < _FIRST_JUDGED:
        return _FIRST_JUDGED
    counts = (count for count in _STOPPING_COUNTS if count > num and count >= plan.min_steps)
    count = next(counts, MAX_SAMPLES)
    return min(count, plan.max_steps if num < plan.max_steps else MAX_SAMPLES)


def bound_if_too_slow(samples: Sequence[float], plan: MeasurementPlan) -> float | None:
    """Return the fastest step if even that shows that the layout cannot be the best; else None.

    The first step does not count: it may compile.
    """
    if plan.beat_seconds is None:
        return None
    fastest = min(samples[1:])
    return fastest if fastest > TOO_SLOW * plan.beat_seconds else None


# --- trend ----------------------------------------------------------------------------------------


def has_trend(samples: Sequence[float], plan: MeasurementPlan) -> bool:
    """Return whether steps became slower or faster while they were timed.

    That is by more than half the precision, first third against last third, and by more than
    chance. Only a plan that asks for seconds of work asks for this as well: it times a device whose
    clock settles.
    """
    if not plan.min_seconds or len(samples) < _FEWEST_FOR_TREND:
        return False
    is_large = abs(relative_trend(samples)) > plan.relative_confidence / 2
    return is_large and abs(_mann_kendall(_blocks(samples))) > _TREND_Z


def relative_trend(samples: Sequence[float]) -> float:
    """Return the median of the last third less that of the first, over that of all."""
    third = len(samples) // 3
    first, last = statistics.median(samples[:third]), statistics.median(samples[-third:])
    return (last - first) / statistics.median(samples)


def _blocks(samples: Sequence[float]) -> list[float]:
    """At most _TREND_VALUES medians of consecutive samples."""
    size = math.ceil(len(samples) / _TREND_VALUES)
    return [
        statistics.median(samples[start : start + size]) for start in range(0, len(samples), size)
    ]


def _mann_kendall(values: Sequence[float]) -> float:
    """The z score of the Mann-Kendall test: positive if values rise."""
    num = len(values)
    rises = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    variance = num * (num - 1) * (2 * num + 5) / 18
    return math.copysign(max(abs(rises) - 1, 0), rises) / math.sqrt(variance)


# --- the interval of the median -------------------------------------------------------------------


def relative_confidence(samples: Sequence[float], *, level: float = CONFIDENCE) -> float | None:
    """Return half the median's interval over the median; None: too few samples for an interval."""
    rank = _median_interval_rank(len(samples), level)
    if rank is None:
        return None
    ordered = sorted(samples)
    return (ordered[len(ordered) - 1 - rank] - ordered[rank]) / 2 / statistics.median(ordered)


@lru_cache(maxsize=1024)
def _median_interval_rank(n: int, level: float = CONFIDENCE) -> int | None:
    """The largest k with P(x[k] < median < x[n-1-k]) >= level for sorted x, by Binomial(n, 1/2)."""
    # The logarithm: of 2,000 steps the binomial coefficient is no float.
    tail, best = 0.0, None
    for k in range(n // 2):
        log_term = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        tail += math.exp(log_term - n * math.log(2))
        if 1 - 2 * tail < level:
            break
        best = k
    return best
