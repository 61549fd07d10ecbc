"""Computes how much a row is expected to enlarge the measured front (numpy).

The front is that of speed, free memory and tokens per joule, all from 0 up. Memory and time are
predicted; power is learned from the rows that ran. The three errors are taken to be independent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isfinite, log

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.hypervolume import free_boxes, hypervolume, on_front
from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.search.lattice import Belief, Lattice
from orchestrator.core.search.outcome import Measured
from orchestrator.core.search.smoothness import Smoothness
from orchestrator.core.search.surrogate import Surrogate
from orchestrator.core.trial.merit import Merit

# No row counts as more than so much better than the best known or predicted: the mean of a
# log-normal belief is otherwise that of its least likely values.
MOST_BETTER = 3.0
# A row gains nothing if it is dominated even when it is better by this many standard deviations.
MOST_SDS = 4.0
# Standard deviation of log watts between layouts of a cell. An idle GPU draws a tenth of the most.
POWER_SD = 0.2


class FrontGain:
    """The merits of the rows that ran, and what the others may add to their front."""

    def __init__(self, lattice: Lattice, merits: Collection[Merit]) -> None:
        self._merits = tuple(merits)
        self._limit = lattice.memory_limit_bytes
        self._power: Surrogate | None = None
        # Row -> log power, of rows whose energy was read.
        self._known_power: dict[int, float] = {}
        if Merit.EFFICIENCY in self._merits:
            guess = Smoothness.guess(lattice, residual_sd=POWER_SD)
            self._power = Surrogate(lattice, Belief.nothing(len(lattice)), guess=guess)

    def expected(
        self, measured: Mapping[int, Measured], *, mean: Floats, sd: Floats, memory: Surrogate
    ) -> Floats:
        """Return each row's expected gain, relative to the volume of the front so far.

        `measured` has the outcomes of the rows that ran; `mean` and `sd` are of the scores of all
        rows. If nothing ran, the gain is the expected volume itself.
        """
        self._learn_power(measured)
        merits = self._used()
        points = self._points(measured, merits, memory)
        hopeful = self._hopeful(points, merits, mean=mean, sd=sd, memory=memory)
        found = np.zeros(len(mean))
        beliefs = [
            self._belief(merit, mean=mean, sd=sd, memory=memory).take(hopeful) for merit in merits
        ]
        boxes = free_boxes(points)
        gain = np.ones((len(boxes.lower), len(hopeful)))
        for place, belief in enumerate(beliefs):
            edges, inverse = np.unique(
                np.stack([boxes.lower[:, place], boxes.upper[:, place]]), return_inverse=True
            )
            excess = belief.excess(edges)
            inverse = inverse.reshape(2, -1)
            gain *= excess[inverse[0]] - excess[inverse[1]]
        found[hopeful] = gain.sum(axis=0) / (hypervolume(points) or 1.0)
        return found

    def would_be_on_it(
        self, row: int, outcome: Measured, others: Mapping[int, Measured], memory: Surrogate
    ) -> bool:
        """Return whether a row that ran belongs to the front of it and the others.

        `others`: without this row.
        """
        points = self._points({**others, row: outcome}, self._used(), memory)
        return bool(on_front(points)[-1])

    def _learn_power(self, measured: Mapping[int, Measured]) -> None:
        """Learn power from the rows that ran, if they have changed."""
        if self._power is None:
            return
        logs = ((row, _log_power(one)) for row, one in measured.items())
        known = {row: power for row, power in logs if power is not None}
        if list(known.items()) == list(self._known_power.items()):
            return
        self._known_power = known
        self._power.clear()
        for row, power in known.items():
            self._power.add(row=row, value=power)

    def _used(self) -> tuple[Merit, ...]:
        """Return the merits that are compared by now: energy only once a row has told of it."""
        unknown = set() if self._known_power else {Merit.EFFICIENCY}
        if self._limit is None:
            unknown.add(Merit.HEADROOM)
        return tuple(one for one in self._merits if one not in unknown) or (Merit.SPEED,)

    def _points(
        self, measured: Mapping[int, Measured], merits: tuple[Merit, ...], memory: Surrogate
    ) -> Floats:
        """Return the merits of the rows that ran; what was not read is as expected."""
        points = np.empty((len(measured), len(merits)))
        for place, merit in enumerate(merits):
            points[:, place] = [
                self._merit(merit, row, one, memory) for row, one in measured.items()
            ]
        return points

    def _merit(self, merit: Merit, row: int, outcome: Measured, memory: Surrogate) -> float:
        match merit:
            case Merit.SPEED:
                return float(np.exp(-outcome.score))
            case Merit.HEADROOM:
                peak = outcome.peak_memory_bytes
                if peak is None or not isfinite(peak) or peak <= 0:
                    peak = float(np.exp(memory.mean[row]))
                assert self._limit is not None
                return max(1.0 - peak / self._limit, 0.0)
            case Merit.EFFICIENCY:
                power = _log_power(outcome)
                if power is None:
                    assert self._power is not None
                    power = float(self._power.mean[row])
                return float(np.exp(-outcome.score - power))

    def _belief(
        self, merit: Merit, *, mean: Floats, sd: Floats, memory: Surrogate
    ) -> _MeritDistribution:
        """Return the distribution of each row's merit. `mean` and `sd` are of the scores."""
        if merit is Merit.HEADROOM:
            assert self._limit is not None
            return _MeritDistribution(mean=memory.mean, sd=memory.sd, limit=self._limit)
        if merit is Merit.EFFICIENCY:
            assert self._power is not None
            mean, sd = mean + self._power.mean, np.hypot(sd, self._power.sd)
        return _MeritDistribution(mean=mean, sd=sd)

    def _hopeful(
        self,
        points: Floats,
        merits: tuple[Merit, ...],
        *,
        mean: Floats,
        sd: Floats,
        memory: Surrogate,
    ) -> Ints:
        """Return the rows that the front may not dominate; the others gain nothing."""
        beliefs = (self._belief(merit, mean=mean, sd=sd, memory=memory) for merit in merits)
        most = np.stack([belief.most for belief in beliefs], axis=1)
        dominated = np.zeros(len(mean), dtype=np.bool_)
        for point in points[on_front(points)]:
            dominated |= (point >= most).all(axis=1)
        return np.flatnonzero(~dominated)


@dataclass(frozen=True, kw_only=True, eq=False)
class _MeritDistribution:
    """A merit of rows as log-normal values: of seconds, of joules, or of bytes of a limit."""

    mean: Floats  # of the logarithm
    sd: Floats
    # The memory limit in bytes, if the merit is the free share of it.
    limit: float | None = None

    def take(self, rows: Ints) -> _MeritDistribution:
        return replace(self, mean=self.mean[rows], sd=self.sd[rows])

    @property
    def most(self) -> Floats:
        """The merit of each row if it is MOST_SDS better than expected."""
        least = np.exp(self.mean - MOST_SDS * self.sd)
        found: Floats = 1.0 / least if self.limit is None else 1.0 - least / self.limit
        return found

    def excess(self, edges: Floats) -> Floats:
        """Return how far each row's merit is expected above each edge: edges x rows."""
        if self.limit is not None:
            left = (1.0 - np.minimum(edges, 1.0)) * self.limit
            return _below(np.log(np.maximum(left, 1e-9)), self.mean, self.sd) / self.limit
        # The largest edge but for infinity is the best that ran.
        known = edges[np.isfinite(edges)].max(initial=0.0)
        best = max(float(known), float(np.exp(-self.mean.min(initial=np.inf))))
        return _above(np.log(np.clip(edges, 1e-300, MOST_BETTER * best)), -self.mean, self.sd)


def _log_power(outcome: Measured) -> float | None:
    """The logarithm of joules per token and second of a step: watts, in another unit."""
    joules = outcome.joules_per_token
    if joules is None or not 0 < joules < np.inf:
        return None
    return log(joules) - outcome.score


def _above(log_edges: Floats, mean: Floats, sd: Floats) -> Floats:
    """Return the expected excess of log-normal values over edges: edges x values."""
    z = (mean - log_edges[:, None]) / sd
    of_value = np.exp(mean + sd**2 / 2)
    found = of_value * normal_cdf(z + sd) - np.exp(log_edges)[:, None] * normal_cdf(z)
    excess: Floats = np.maximum(found, 0.0)
    return excess


def _below(log_edges: Floats, mean: Floats, sd: Floats) -> Floats:
    """Return how far log-normal values are expected below edges: edges x values."""
    z = (log_edges[:, None] - mean) / sd
    of_value = np.exp(mean + sd**2 / 2)
    found = np.exp(log_edges)[:, None] * normal_cdf(z) - of_value * normal_cdf(z - sd)
    shortfall: Floats = np.maximum(found, 0.0)
    return shortfall
