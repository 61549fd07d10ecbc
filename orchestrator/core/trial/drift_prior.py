"""The hypotheses of how a machine's speed drifts, and their prior probabilities.

Drift wanders (an Ornstein-Uhlenbeck process), swings (a smooth process), or steps once or twice.
How much, how quickly and when is unknown: each hypothesis is one combination of a few values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import sqrt
from typing import TypeVar

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints

_T = TypeVar("_T")

# Values with their prior probabilities. A quiet machine drifts by about 1 %.
DRIFT_SDS = ((0.003, 0.40), (0.01, 0.33), (0.03, 0.14), (0.1, 0.08), (0.3, 0.04), (0.6, 0.01))
# Correlation times of drift, over the time from the first run to the last.
LENGTHS = ((0.05, 0.25), (0.3, 0.35), (2.0, 0.40))
# Smooth changes (heat, the load of a day), and the probability that there are any.
SWING_SDS = ((0.03, 0.50), (0.1, 0.30), (0.3, 0.20))
SWING_LENGTHS = ((0.04, 0.35), (0.12, 0.35), (0.4, 0.30))
SWINGS = 0.08
# Probability of a step between the first run and the last: others' job begins, a GPU cools.
STEPS = 0.20
TWO_STEPS = 0.06
USUAL_DRIFT_SD, STEP_LENGTH = 0.01, 0.3  # of the drift besides steps
# A step between two runs of repeated layouts may be anywhere there: such an interval is one place.
MOST_STEPS = 40  # intervals for one step
MOST_OF_TWO = 12  # intervals for two steps
# Places within the intervals of one hypothesis, for runs that were not repeated.
MOST_PLACES = 16
# Below it, an interval stays one place.
PLACED_WEIGHT = 0.01
NODE_SDS = ((0.0, 0.70), (0.05, 0.18), (0.2, 0.12))
# The part of the load's possible effect (Run.load_sd) that runs show. A program that does not wait
# for cores shows little.
LOAD_SCALES = ((0.03, 0.20), (0.3, 0.35), (1.0, 0.45))
# How much runs of one layout directly after each other differ.
RUN_SDS = ((0.005, 0.30), (0.012, 0.50), (0.03, 0.20))
# The same before any repeat shows it.
ASSUMED_RUN_SD = sqrt(sum(share * sd**2 for sd, share in RUN_SDS))
SEEN = 0.03  # relative: smaller changes are not reported

_COLUMNS = (
    *("drift_sd", "length", "is_smooth", "step_at", "next_step_at"),
    *("node_sd", "run_sd", "load_scale", "weights"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypotheses:
    """One row per hypothesis; the span is the time from the first run to the last."""

    drift_sd: Floats
    length: Floats  # in spans
    is_smooth: Floats  # 1 or 0
    step_at: Floats  # in spans; below 0: no step
    next_step_at: Floats
    node_sd: Floats
    run_sd: Floats
    load_scale: Floats
    weights: Floats
    span: tuple[float, float]  # the first and the last time
    # By the place that represents an interval: all places in it, which repeats cannot tell apart.
    intervals: Mapping[float, Sequence[float]]

    def take(self, rows: Ints) -> Hypotheses:
        """Return these rows, with weights that sum to 1."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        columns["weights"] = columns["weights"] / columns["weights"].sum()
        return replace(self, **columns)

    def placed(self) -> Hypotheses:
        """Return the same with one row for each place that a step may have in its interval."""
        rows: list[int] = []
        places: list[tuple[float, ...]] = []
        shares: list[float] = []
        pairs = zip(self.step_at.tolist(), self.next_step_at.tolist(), strict=True)
        for row, pair in enumerate(pairs):
            choices: list[Sequence[float]] = [(place,) for place in pair]
            if self.weights[row] >= PLACED_WEIGHT:
                choices = [self.intervals.get(place, (place,)) for place in pair]
            some = evenly(list(product(*choices)), MOST_PLACES)
            rows += [row] * len(some)
            places += some
            shares += [1 / len(some)] * len(some)
        first, then = np.array(places).T
        weights = self.weights[rows] * np.array(shares)
        return replace(
            self.take(np.array(rows)),
            step_at=first,
            next_step_at=then,
            weights=weights / weights.sum(),
        )


def prior(
    times: Sequence[float],
    *,
    repeated: Collection[float],
    is_one_place: bool,
    is_load_repeated: bool,
) -> Hypotheses:
    """Return every combination with its prior probability.

    `times`: of all runs, ascending; `repeated`: those of repeated layouts. `is_one_place`: all runs
    had the same nodes, so the nodes' effect is in every run. `is_load_repeated`: a repeat on a busy
    machine shows the effect of the load; without one, all of the possible effect is allowed for.
    """
    nodes = ((0.0, 1.0),) if is_one_place else NODE_SDS
    loads = LOAD_SCALES if is_load_repeated else ((1.0, 1.0),)
    intervals = _step_intervals(times, repeated)
    found = np.array(
        [
            (*course[:5], node, run, load, course[5] * a * b * c)
            for course, (node, a), (run, b), (load, c) in product(
                _courses(times, intervals), nodes, RUN_SDS, loads
            )
        ]
    )
    return Hypotheses(
        **dict(zip(_COLUMNS, found.T, strict=True)),
        span=(times[0], times[-1]) if times else (0.0, 0.0),
        intervals={_middle(places): places for places in intervals},
    )


def _courses(
    times: Sequence[float], intervals: Sequence[Sequence[float]]
) -> list[tuple[float, float, float, float, float, float]]:
    """The courses that drift may have: the first five columns, and the prior probability."""
    if len(times) < 2:
        return [(USUAL_DRIFT_SD, 1.0, 0.0, -1.0, -1.0, 1.0)]  # without times drift stays unknown
    once = evenly(intervals, MOST_STEPS)
    twice = list(combinations(evenly(intervals, MOST_OF_TWO), 2))
    num_once, num_twice = sum(map(len, once)), sum(len(first) * len(then) for first, then in twice)
    quiet = [(sd, weight) for sd, weight in DRIFT_SDS if sd <= SEEN]
    share = 1 / sum(weight for _, weight in quiet)
    wanders = 1 - SWINGS - (STEPS if once else 0) - (TWO_STEPS if twice else 0)
    found = [
        (sd, length, 0.0, -1.0, -1.0, a * b * wanders)
        for (sd, a), (length, b) in product(DRIFT_SDS, LENGTHS)
    ]
    found += [
        (sd, length, 1.0, -1.0, -1.0, a * b * SWINGS)
        for (sd, a), (length, b) in product(SWING_SDS, SWING_LENGTHS)
    ]
    found += [
        (sd, STEP_LENGTH, 0.0, _middle(places), -1.0, a * share * STEPS * len(places) / num_once)
        for (sd, a), places in product(quiet, once)
    ]
    for first, then in twice:
        weight = TWO_STEPS * len(first) * len(then) / num_twice
        found.append((USUAL_DRIFT_SD, STEP_LENGTH, 0.0, _middle(first), _middle(then), weight))
    return found


def _step_intervals(times: Sequence[float], repeated: Collection[float]) -> list[list[float]]:
    """The places of possible steps, in spans: between two consecutive runs.

    Those between two runs of repeated layouts form one interval.
    """
    if len(times) < 3:
        return []
    found: list[list[float]] = [[]]
    for before, after in pairwise(times):
        found[-1].append(((before + after) / 2 - times[0]) / (times[-1] - times[0]))
        if after in repeated:
            found.append([])
    return [places for places in found if places]


def _middle(places: Sequence[float]) -> float:
    return places[len(places) // 2]


def evenly(values: Sequence[_T], most: int) -> list[_T]:
    """Return at most `most` values: the first, the last, and evenly spaced ones between."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in sorted({round(i) for i in np.linspace(0, len(values) - 1, most)})]
