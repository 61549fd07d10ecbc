"""How the speed of a machine changed between runs, told from layouts that were run more than once; and what each layout takes without that.

Log step time of a run = its layout's + the machine's drift at that time + its nodes' + noise. Drift wanders (an Ornstein-Uhlenbeck process), swings
(a smooth one) or steps, once or twice. How far, how quickly and when is not known: each of a few settings counts by how likely it makes the repeats (numpy). Times are given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import exp, log
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.trial.purpose import Purpose

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
_T = TypeVar("_T")

# Relative, of runs without an interval of their own: published repeats differ by 0.7 to 4 %.
USUAL_SD = 0.02
# Value, and how far it is believed before any repeat has shown it. A quiet machine drifts by about 1 %.
DRIFT_SDS = ((0.003, 0.40), (0.01, 0.33), (0.03, 0.14), (0.1, 0.08), (0.3, 0.04), (0.6, 0.01))
# Correlation times of drift, in units of the time from the first run to the last.
LENGTHS = ((0.05, 0.25), (0.3, 0.35), (2.0, 0.40))
# What changes smoothly: heat, the load of a day; and the probability that it does.
SWING_SDS = ((0.03, 0.50), (0.1, 0.30), (0.3, 0.20))
SWING_LENGTHS = ((0.04, 0.35), (0.12, 0.35), (0.4, 0.30))
SWINGS = 0.08
# Probability that the machine changes at once, some time between the first run and the last: a job of others begins, a GPU cools.
STEPS = 0.20
TWO_STEPS = 0.06  # that it does twice
USUAL_DRIFT_SD, STEP_LENGTH = 0.01, 0.3  # of a machine that steps, besides
STEP_SD = 0.4  # of the logarithm: by how much
# Between two runs of repeated layouts no repeat tells where a step was: such an interval is weighed as one place.
MOST_STEPS = 40  # intervals where it may have been
MOST_OF_TWO = 12  # likewise, of two
MOST_PLACES = (
    16  # places within the intervals of one setting, which runs that nobody repeated are judged by
)
PLACED_WEIGHT = 0.01  # of a setting: below, its intervals are not looked into
NODE_SDS = ((0.0, 0.70), (0.05, 0.18), (0.2, 0.12))
# The part of the load's possible effect (Run.load_sd) that runs show: of a program that waits for other things than cores, little.
LOAD_SCALES = ((0.03, 0.20), (0.3, 0.35), (1.0, 0.45))
RUN_SDS = ((0.005, 0.30), (0.012, 0.50), (0.03, 0.20))  # of runs of one layout, next to each other
MOST_RUNS = 72  # of repeated layouts, the newest: the cost is cubic in them
MOST_OF_ONE = MOST_RUNS // 2  # of one layout, evenly chosen: an anchor of a long sweep has hundreds
MOST_CORRECTED = 256  # runs, evenly chosen, that the largest correction is sought among
KEPT_WEIGHT = 0.998  # of the settings that verdicts rest on, the likeliest
SEEN = 0.03  # relative: a smaller change of the machine is not spoken of
# Prior of the logarithm of a layout's step time: so wide that it is no limit in practice.
LEVEL_SD = 3.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measurement of one attempt of a layout."""

    step_seconds: float  # median
    # Half the 95 % interval of that median, relative; None: too few steps to tell.
    relative_confidence: float | None = None
    load_sd: float = 0.0  # relative standard deviation that the load of others adds
    at: float | None = None  # seconds, from whatever beginning all runs have; None: not known
    nodes: tuple[str, ...] = ()
    purpose: Purpose | None = None  # None: not known
    thrashing: bool = False  # it ran at the memory edge

    @property
    def variance(self) -> float:
        """The variance of the logarithm of its step time, as the run itself tells it, with all that the load may have done."""
        return self.own_variance + self.load_sd**2

    @property
    def own_variance(self) -> float:
        """The same without the load."""
        own = USUAL_SD if self.relative_confidence is None else self.relative_confidence / 1.96
        return own**2


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """A layout that showed how the machine has changed, and how much that matters to the others."""

    key: int
    first_seconds: float
    then_seconds: float
    apart_seconds: float | None  # between the two runs; None: not known
    largest_correction: float  # relative: of a run between the first and the last


@dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """The drift of a machine as repeats tell it: the likely settings, and the speed at each time."""

    change: SpeedChange | None  # None: it did not change by more than noise
    _settings: _Settings
    _repeated: Mapping[int, Sequence[Run]]
    _rows: _Rows | None  # their runs; None: nothing was repeated, and nothing is told
    _alpha: Floats  # settings x runs: what each run says of drift

    @property
    def run_sd(self) -> float:
        """Relative standard deviation of runs of one layout next to each other."""
        return float(np.sqrt(self._settings.weights @ self._settings.run_sd**2))

    def corrections(self, runs: Sequence[Run]) -> Floats:
        """The term to add to the logarithm of each run, to have it as the machine is at the last repeat."""
        if self._rows is None:
            return np.zeros(len(runs))
        found: Floats = -self._settings.weights @ _drift_at(
            self._rows.alone(runs), self._rows, self._settings, self._alpha
        )
        return found

    def estimate(self, runs: Mapping[int, Sequence[Run]], considered: Collection[int]) -> Estimate:
        """The step times of the repeated layouts and of the `considered` ones, as the machine is at the last repeat; these are at least one."""
        keys = tuple(dict.fromkeys((*self._repeated, *considered)))
        rows = _Rows.of(
            {key: self._repeated.get(key) or runs[key] for key in keys}, self._settings.span
        )
        last = rows.last if self._rows is None else self._rows.last  # what was repeated comes first
        means, covariances = _posterior(rows, self._settings, last)
        return Estimate(
            keys=keys, weights=self._settings.weights, means=means, covariances=covariances
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The logarithm of the step times of layouts, under each likely setting."""

    keys: tuple[int, ...]
    weights: Floats  # of the settings
    means: Floats  # settings x layouts
    covariances: Floats  # settings x layouts x layouts

    def faster(self) -> tuple[Floats, Floats]:
        """The mean of each layout, and the probability that it is faster than the one of the smallest mean."""
        mean = self.weights @ self.means
        best = int(np.argmin(mean))
        ahead = self.means[:, [best]] - self.means
        variance = np.diagonal(self.covariances, axis1=1, axis2=2)
        of_both = variance + variance[:, [best]] - 2 * self.covariances[:, best, :]
        faster = self.weights @ normal_cdf(ahead / np.sqrt(np.maximum(of_both, 1e-12)))
        faster[best] = 1.0
        return mean, faster

    def sd(self) -> Floats:
        """Standard deviation of each layout's logarithm, the settings' disagreement included."""
        mean = self.weights @ self.means
        variance = np.diagonal(self.covariances, axis1=1, axis2=2) + (self.means - mean) ** 2
        found: Floats = np.sqrt(self.weights @ variance)
        return found


def fit(runs: Mapping[int, Sequence[Run]]) -> Drift:
    """Estimate drift from the repeats among these runs. A layout that ran once tells nothing of drift, since its own time is not known."""
    repeated = _newest({key: some for key, some in runs.items() if len(some) > 1})
    settings = _settings(runs)
    if not repeated:
        return Drift(
            change=None,
            _settings=settings,
            _repeated={},
            _rows=None,
            _alpha=np.zeros((len(settings.weights), 0)),
        )
    rows = _Rows.of(repeated, settings.span)
    settings = _weighed(settings, rows).placed()
    alpha = _alpha(rows, settings)
    every = rows.alone(_evenly([run for some in runs.values() for run in some], MOST_CORRECTED))
    drifted = settings.weights @ _drift_at(every, rows, settings, alpha)
    return Drift(
        change=_change(rows, float(np.abs(drifted).max()), settings),
        _settings=settings,
        _repeated=repeated,
        _rows=rows,
        _alpha=alpha,
    )


# --- settings: how large and how quick drift may be ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Settings:
    drift_sd: Floats
    length: Floats  # in spans
    is_smooth: Floats  # 1 or 0
    step_at: Floats  # in spans; below 0: there was none
    next_step_at: Floats
    node_sd: Floats
    run_sd: Floats
    load_scale: Floats
    weights: Floats
    span: tuple[float, float]  # the first and the last time
    # By the place that stands for an interval: all places in it, of which repeats do not tell one from the other.
    intervals: Mapping[float, Sequence[float]]

    def take(self, chosen: Ints) -> _Settings:
        parts = {
            name: getattr(self, name)[chosen]
            for name in (
                "drift_sd",
                "length",
                "is_smooth",
                "step_at",
                "next_step_at",
                "node_sd",
                "run_sd",
                "load_scale",
                "weights",
            )
        }
        return replace(self, **(parts | {"weights": parts["weights"] / parts["weights"].sum()}))

    def placed(self) -> _Settings:
        """The same, with a step at any of the places of its interval."""
        first, then, rows, shares = [], [], [], []
        for row, pair in enumerate(
            zip(self.step_at.tolist(), self.next_step_at.tolist(), strict=True)
        ):
            choices = [
                self.intervals.get(place, (place,))
                if self.weights[row] >= PLACED_WEIGHT
                else (place,)
                for place in pair
            ]
            places = _evenly(list(product(*choices)), MOST_PLACES)
            first += [place for place, _ in places]
            then += [place for _, place in places]
            rows += [row] * len(places)
            shares += [1 / len(places)] * len(places)
        found = self.take(np.array(rows))
        weights = self.weights[rows] * np.array(shares)
        return replace(
            found,
            step_at=np.array(first),
            next_step_at=np.array(then),
            weights=weights / weights.sum(),
        )


def _settings(runs: Mapping[int, Sequence[Run]]) -> _Settings:
    """Every combination. Where all ran on the same nodes, what nodes add is in every run."""
    one_place = len({run.nodes for some in runs.values() for run in some}) < 2
    times = sorted({run.at for some in runs.values() for run in some if run.at is not None})
    telling = {
        run.at for some in runs.values() if len(some) > 1 for run in some if run.at is not None
    }
    span = (times[0], times[-1]) if times else (0.0, 0.0)
    nodes = ((0.0, 1.0),) if one_place else NODE_SDS
    # Only repeats tell how much the load did: without one on a busy machine, all that it may have done is allowed for.
    is_told = any(run.load_sd > 0 for some in runs.values() if len(some) > 1 for run in some)
    loads = LOAD_SCALES if is_told else ((1.0, 1.0),)
    intervals = _step_intervals(times, telling)
    found = np.array(
        [
            (*drift[:5], node, run, load, drift[5] * a * b * c)
            for drift, (node, a), (run, b), (load, c) in product(
                _courses(times, intervals), nodes, RUN_SDS, loads
            )
        ]
    )
    drift_sd, length, is_smooth, step_at, next_step_at, node_sd, run_sd, load_scale, weights = (
        found.T
    )
    return _Settings(
        drift_sd=drift_sd,
        length=length,
        is_smooth=is_smooth,
        step_at=step_at,
        next_step_at=next_step_at,
        node_sd=node_sd,
        run_sd=run_sd,
        load_scale=load_scale,
        weights=weights,
        span=span,
        intervals={_middle(places): places for places in intervals},
    )


def _courses(
    times: Sequence[float], intervals: Sequence[Sequence[float]]
) -> list[tuple[float, float, float, float, float, float]]:
    """The courses that drift may have taken: standard deviation, length, smooth or not, first and second step, and prior probability."""
    if len(times) < 2:
        return [(USUAL_DRIFT_SD, 1.0, 0.0, -1.0, -1.0, 1.0)]  # without times nothing tells drift
    once, twice = (
        _evenly(intervals, MOST_STEPS),
        list(combinations(_evenly(intervals, MOST_OF_TWO), 2)),
    )
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
    found += [
        (
            USUAL_DRIFT_SD,
            STEP_LENGTH,
            0.0,
            _middle(first),
            _middle(then),
            TWO_STEPS * len(first) * len(then) / num_twice,
        )
        for first, then in twice
    ]
    return found


def _step_intervals(times: Sequence[float], telling: Collection[float]) -> list[list[float]]:
    """The places of possible steps, in spans: between two runs that follow each other; together those between two runs of repeated layouts."""
    if len(times) < 3:
        return []
    found: list[list[float]] = [[]]
    for before, after in pairwise(times):
        found[-1].append(((before + after) / 2 - times[0]) / (times[-1] - times[0]))
        if after in telling:
            found.append([])
    return [places for places in found if places]


def _middle(places: Sequence[float]) -> float:
    return places[len(places) // 2]


def _evenly(values: Sequence[_T], most: int) -> list[_T]:
    """The first, the last and as many between as there may be."""
    if len(values) <= most:
        return list(values)
    return [
        values[place]
        for place in sorted({round(place) for place in np.linspace(0, len(values) - 1, most)})
    ]


def _weighed(settings: _Settings, rows: _Rows) -> _Settings:
    """The settings under which the repeats are likely, by how likely (restricted maximum likelihood: the layouts' own times are not known)."""
    lower = _factor(rows, settings)
    whitened: Floats = np.linalg.solve(
        lower, np.broadcast_to(rows.design, (len(lower), *rows.design.shape))
    )
    y: Floats = np.linalg.solve(
        lower, np.broadcast_to(rows.y[:, None], (len(lower), len(rows.y), 1))
    )[..., 0]
    information = np.einsum("gml,gmk->glk", whitened, whitened)
    means = np.linalg.solve(information, np.einsum("gml,gm->gl", whitened, y)[..., None])
    rest = y - (whitened @ means)[..., 0]
    likelihood = (
        -np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        - 0.5 * np.linalg.slogdet(information)[1]
    )
    likelihood = likelihood - 0.5 * (rest**2).sum(axis=1) + np.log(settings.weights)
    weights = np.exp(likelihood - likelihood.max())
    order = np.argsort(-weights, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    return replace(settings, weights=weights).take(
        order[: int(np.searchsorted(share, KEPT_WEIGHT)) + 1]
    )


# --- the Gaussian model -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Runs as arrays, in the order of their layouts."""

    keys: tuple[int, ...]  # layouts
    of_layout: Ints  # place of each run's layout
    seconds: Floats  # of a step
    y: Floats  # its logarithm
    at: Floats  # in spans
    times: Floats
    is_timed: bool
    # runs x nodes: the product of two rows is the share of nodes that two runs have in common.
    member: Floats
    nodes: Mapping[str, int]  # columns; the last is for runs on unknown nodes
    span: tuple[float, float]
    variance: Floats  # of each run, as it tells it
    load_variance: Floats  # that the load adds at most

    @classmethod
    def of(cls, runs: Mapping[int, Sequence[Run]], span: tuple[float, float]) -> _Rows:
        every = [run for some in runs.values() for run in some]
        first, last = span
        times = np.array([last if run.at is None else run.at for run in every])
        names = {
            name: i for i, name in enumerate(sorted({name for run in every for name in run.nodes}))
        }
        return cls(
            keys=tuple(runs),
            of_layout=np.repeat(np.arange(len(runs)), [len(some) for some in runs.values()]),
            seconds=np.array([run.step_seconds for run in every]),
            y=np.log([run.step_seconds for run in every]),
            at=(times - first) / max(last - first, 1e-9),
            times=times,
            is_timed=all(run.at is not None for run in every),
            member=_member(every, names),
            nodes=names,
            span=span,
            variance=np.array([run.own_variance for run in every]),
            load_variance=np.array([run.load_sd**2 for run in every]),
        )

    def alone(self, runs: Sequence[Run]) -> _Rows:
        """Other runs, each as a layout, in the same terms."""
        found = _Rows.of({place: [run] for place, run in enumerate(runs)}, self.span)
        return replace(found, member=_member(runs, self.nodes), nodes=self.nodes)

    @property
    def last(self) -> int:
        return int(np.argmax(self.at))

    @property
    def design(self) -> Floats:
        """1 where a run is of a layout: runs x layouts."""
        found: Floats = (self.of_layout[:, None] == np.arange(len(self.keys))[None, :]).astype(
            np.float64
        )
        return found


def _member(runs: Sequence[Run], nodes: Mapping[str, int]) -> Floats:
    """Nodes that nothing is known of are in no column: they have nothing in common with others."""
    member = np.zeros((len(runs), len(nodes) + 1))
    for row, run in enumerate(runs):
        member[row, [nodes[name] for name in run.nodes if name in nodes] or [len(nodes)]] = 1.0
    found: Floats = member / np.sqrt(member.sum(axis=1, keepdims=True))
    return found


def _drift_covariance(rows: _Rows, others: _Rows, settings: _Settings) -> Floats:
    """The covariance of drift and nodes: settings x rows x others."""
    apart = np.abs(rows.at[:, None] - others.at[None, :])[None] / settings.length[:, None, None]
    smooth = np.sqrt(5.0) * apart
    alike = np.where(
        settings.is_smooth[:, None, None] > 0,
        (1.0 + smooth + smooth**2 / 3.0) * np.exp(-smooth),
        np.exp(-apart),
    )
    found: Floats = settings.drift_sd[:, None, None] ** 2 * alike
    for mine, theirs in zip(_levels(rows, settings), _levels(others, settings), strict=True):
        found += STEP_SD**2 * (mine[:, :, None] & theirs[:, None, :])
    found += settings.node_sd[:, None, None] ** 2 * (rows.member @ others.member.T)
    return found


def _levels(rows: _Rows, settings: _Settings) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Settings x runs: true where a run was before the first step, and where it was between the first and the second."""
    at, first, then = rows.at[None, :], settings.step_at[:, None], settings.next_step_at[:, None]
    return at < first, (at >= first) & (at < then)


def _factor(rows: _Rows, settings: _Settings) -> Floats:
    """The Cholesky factor of the runs' covariance, the layouts' own times left out."""
    covariance = _drift_covariance(rows, rows, settings)
    noise = _noise(rows, settings)
    lower: Floats = np.linalg.cholesky(covariance + noise[:, None, :] * np.eye(len(rows.y)))
    return lower


def _noise(rows: _Rows, settings: _Settings) -> Floats:
    """Settings x runs: the variance of what each run has for itself."""
    load = settings.load_scale[:, None] ** 2 * rows.load_variance[None, :]
    found: Floats = rows.variance[None, :] + load + settings.run_sd[:, None] ** 2
    return found


def _whole(rows: _Rows, settings: _Settings) -> tuple[Floats, Floats]:
    """The covariance of drift and nodes, and of runs with their layouts and noise.

    Layouts have a wide prior about the mean of all: with it everything is one Gaussian vector, conditioned on the runs.
    """
    covariance = _drift_covariance(rows, rows, settings)
    noise = _noise(rows, settings)
    same_layout = LEVEL_SD**2 * (rows.of_layout[:, None] == rows.of_layout[None, :])
    return covariance, covariance + same_layout[None] + noise[:, None, :] * np.eye(len(rows.y))


def _alpha(rows: _Rows, settings: _Settings) -> Floats:
    """Settings x runs: the weights that give the mean of drift at any time, multiplied by its covariance with the runs."""
    _, whole = _whole(rows, settings)
    y = rows.y - float(rows.y.mean())
    found: Floats = np.linalg.solve(whole, np.broadcast_to(y[:, None], (len(whole), len(y), 1)))[
        ..., 0
    ]
    return found


def _drift_at(runs: _Rows, rows: _Rows, settings: _Settings, alpha: Floats) -> Floats:
    """Settings x runs: the mean of each run's drift, less that of the last of the rows."""
    at_last = _drift_covariance(rows, rows, settings)[:, rows.last, :]
    found: Floats = np.einsum("gkm,gm->gk", _drift_covariance(runs, rows, settings), alpha)
    found -= np.einsum("gm,gm->g", at_last, alpha)[:, None]
    return found


def _posterior(rows: _Rows, settings: _Settings, last: int) -> tuple[Floats, Floats]:
    """Per setting: means and covariances of the layouts as the machine was at the run `last`."""
    covariance, whole = _whole(rows, settings)
    level = float(rows.y.mean())
    to_layout = LEVEL_SD**2 * rows.design.T[None] + covariance[:, [last], :]
    weights: Floats = np.linalg.solve(whole, np.swapaxes(to_layout, 1, 2))
    means: Floats = level + np.einsum("gmk,m->gk", weights, rows.y - level)
    prior = LEVEL_SD**2 * np.eye(len(rows.keys))[None] + covariance[:, last, last][:, None, None]
    posterior: Floats = prior - to_layout @ weights
    return means, posterior


def _change(rows: _Rows, largest: float, settings: _Settings) -> SpeedChange | None:
    """The change of the machine, shown by the repeated layout whose runs differ most. None: it did not change by more than noise."""
    changes = (np.maximum(settings.drift_sd, settings.node_sd) >= SEEN) | (settings.step_at >= 0)
    likely = float(settings.weights[changes].sum())
    if largest < log(1 + SEEN) or likely < 0.5:
        return None
    widest: tuple[float, int, int] | None = None
    for place in range(len(rows.keys)):
        mine = np.flatnonzero(rows.of_layout == place)
        mine = mine[np.argsort(rows.at[mine], kind="stable")]
        for other in mine[1:]:
            off = abs(float(rows.y[other] - rows.y[mine[0]]))
            if widest is None or off > widest[0]:
                widest = off, int(mine[0]), int(other)
    assert widest is not None, "drift is told by repeats"
    _, first, then = widest
    return SpeedChange(
        key=rows.keys[int(rows.of_layout[first])],
        first_seconds=float(rows.seconds[first]),
        then_seconds=float(rows.seconds[then]),
        apart_seconds=float(rows.times[then] - rows.times[first]) if rows.is_timed else None,
        largest_correction=exp(largest) - 1,
    )


def _newest(runs: Mapping[int, Sequence[Run]]) -> dict[int, Sequence[Run]]:
    """As many layouts as there is room for, those with the newest runs; in the order given."""
    runs = {key: _evenly(some, MOST_OF_ONE) for key, some in runs.items()}
    room, kept = MOST_RUNS, set[int]()
    for key in sorted(runs, key=lambda key: -max((run.at or 0.0) for run in runs[key])):
        room -= len(runs[key])
        if room < 0 and kept:
            break
        kept.add(key)
    return {key: some for key, some in runs.items() if key in kept}
