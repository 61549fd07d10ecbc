"""Estimates how a machine's speed changed between runs, and each layout's step time without that.

Log step time of a run = its layout's + the machine's drift at that time + its nodes' + noise.
Layouts that ran more than once show the drift. Each hypothesis of drift_prior.py is weighted by the
likelihood of these repeats. Nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.trial.drift_prior import SEEN, Hypotheses, evenly, prior
from orchestrator.core.trial.run import Run

STEP_SD = 0.4  # of a step's logarithm
# Runs of the layouts that were repeated last: the cost of a fit is cubic in them.
MOST_RUNS = 72
# Runs of one layout, evenly spaced: an anchor of a long sweep has hundreds of them.
MOST_OF_ONE = MOST_RUNS // 2
MOST_CORRECTED = 256  # evenly spaced runs to correct
KEPT_WEIGHT = 0.998  # of the likeliest hypotheses, together
# Prior of the logarithm of a layout's step time: so wide that it is no limit in practice.
LEVEL_SD = 3.0


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """A layout that shows how the machine changed, and what that means for the others."""

    key: int
    first_seconds: float
    then_seconds: float
    apart_seconds: float | None  # between the two runs; None: unknown
    largest_correction: float  # relative, of any run


@dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """The drift of a machine as repeats show it: likely hypotheses, and the speed at each time."""

    change: SpeedChange | None  # None: only noise
    _hypotheses: Hypotheses
    _repeated: Mapping[int, Sequence[Run]]
    _rows: _Rows | None  # None: nothing was repeated
    _alpha: Floats  # hypotheses x runs

    @property
    def run_sd(self) -> float:
        """Relative standard deviation of runs of one layout directly after each other."""
        return float(np.sqrt(self._hypotheses.weights @ self._hypotheses.run_sd**2))

    @property
    def load_scale(self) -> float:
        """Part of the load's possible effect (Run.load_sd) that runs show: root mean square.

        1 until a repeat on a busy machine shows it.
        """
        return float(np.sqrt(self._hypotheses.weights @ self._hypotheses.load_scale**2))

    def corrections(self, runs: Sequence[Run]) -> Floats:
        """Return what to add to the logarithm of each run, for the machine of the last repeat."""
        if self._rows is None:
            return np.zeros(len(runs))
        found: Floats = -self._hypotheses.weights @ _drift_at(
            self._rows.alone(runs), self._rows, self._hypotheses, self._alpha
        )
        return found

    def estimate(self, runs: Mapping[int, Sequence[Run]], considered: Collection[int]) -> Estimate:
        """Estimate the step times of the repeated and the `considered` layouts, at least one.

        They are those of the machine at the last repeat.
        """
        keys = tuple(dict.fromkeys((*self._repeated, *considered)))
        rows = _Rows.of(
            {key: self._repeated.get(key) or runs[key] for key in keys}, self._hypotheses.span
        )
        last = rows.last if self._rows is None else self._rows.last  # repeated runs come first
        means, covariances = _posterior(rows, self._hypotheses, last)
        return Estimate(
            keys=keys, weights=self._hypotheses.weights, means=means, covariances=covariances
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The logarithms of layouts' step times, under each likely hypothesis."""

    keys: tuple[int, ...]
    weights: Floats  # of the hypotheses
    means: Floats  # hypotheses x layouts
    covariances: Floats  # hypotheses x layouts x layouts

    def faster(self) -> tuple[Floats, Floats]:
        """Return each layout's mean, and the probability that it beats the one with the least."""
        mean = self.weights @ self.means
        best = int(np.argmin(mean))
        ahead = self.means[:, [best]] - self.means
        variance = np.diagonal(self.covariances, axis1=1, axis2=2)
        of_both = variance + variance[:, [best]] - 2 * self.covariances[:, best, :]
        faster = self.weights @ normal_cdf(ahead / np.sqrt(np.maximum(of_both, 1e-12)))
        faster[best] = 1.0
        return mean, faster

    def ahead(self, key: int, other: int) -> tuple[float, float]:
        """Return by how much a layout's logarithm is less than another's, and its sd."""
        one, two = self.keys.index(key), self.keys.index(other)
        differences = self.means[:, two] - self.means[:, one]
        mean = float(self.weights @ differences)
        covariance = self.covariances
        variance = covariance[:, one, one] + covariance[:, two, two] - 2 * covariance[:, one, two]
        # With the disagreement of the hypotheses.
        spread = np.maximum(variance, 0.0) + (differences - mean) ** 2
        return mean, float(np.sqrt(self.weights @ spread))

    def sd(self) -> Floats:
        """Return each layout's standard deviation, with the disagreement of the hypotheses."""
        mean = self.weights @ self.means
        variance = np.diagonal(self.covariances, axis1=1, axis2=2) + (self.means - mean) ** 2
        found: Floats = np.sqrt(self.weights @ variance)
        return found


def fit(runs: Mapping[int, Sequence[Run]]) -> Drift:
    """Estimate drift from the repeats among these runs.

    A layout that ran once shows nothing of drift, since its own step time is unknown.
    """
    every = [run for some in runs.values() for run in some]
    repeats = [run for some in runs.values() if len(some) > 1 for run in some]
    hypotheses = prior(
        sorted({run.at for run in every if run.at is not None}),
        repeated={run.at for run in repeats if run.at is not None},
        is_one_place=len({run.nodes for run in every}) < 2,
        is_load_repeated=any(run.load_sd > 0 for run in repeats),
    )
    if not repeats:
        return Drift(
            change=None,
            _hypotheses=hypotheses,
            _repeated={},
            _rows=None,
            _alpha=np.zeros((len(hypotheses.weights), 0)),
        )
    repeated = _newest({key: some for key, some in runs.items() if len(some) > 1})
    rows = _Rows.of(repeated, hypotheses.span)
    hypotheses = _weighted(hypotheses, rows).placed()
    alpha = _alpha(rows, hypotheses)
    some = rows.alone(evenly(every, MOST_CORRECTED))
    drifted = hypotheses.weights @ _drift_at(some, rows, hypotheses, alpha)
    return Drift(
        change=_change(rows, float(np.abs(drifted).max()), hypotheses),
        _hypotheses=hypotheses,
        _repeated=repeated,
        _rows=rows,
        _alpha=alpha,
    )


def _newest(runs: Mapping[int, Sequence[Run]]) -> dict[int, Sequence[Run]]:
    """Up to MOST_RUNS runs: those of the layouts with the newest runs, in the order given."""
    runs = {key: evenly(some, MOST_OF_ONE) for key, some in runs.items()}
    num, kept = 0, set[int]()
    for key in sorted(runs, key=lambda key: -max((run.at or 0.0) for run in runs[key])):
        num += len(runs[key])
        if num > MOST_RUNS and kept:
            break
        kept.add(key)
    return {key: some for key, some in runs.items() if key in kept}


def _weighted(hypotheses: Hypotheses, rows: _Rows) -> Hypotheses:
    """The likely hypotheses, weighted by the likelihood of the repeats.

    It is the restricted likelihood, since the layouts' own step times are unknown.
    """
    covariance = _drift_covariance(rows, rows, hypotheses)
    lower = np.linalg.cholesky(covariance + _noise(rows, hypotheses))
    whitened: Floats = np.linalg.solve(lower, rows.design[None])
    y: Floats = np.linalg.solve(lower, rows.y[None, :, None])[..., 0]
    information = np.einsum("gml,gmk->glk", whitened, whitened)
    means = np.linalg.solve(information, np.einsum("gml,gm->gl", whitened, y)[..., None])
    rest = y - (whitened @ means)[..., 0]
    likelihood = (
        -np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        - 0.5 * np.linalg.slogdet(information)[1]
    )
    likelihood = likelihood - 0.5 * (rest**2).sum(axis=1) + np.log(hypotheses.weights)
    weights = np.exp(likelihood - likelihood.max())
    order = np.argsort(-weights, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    num_kept = int(np.searchsorted(share, KEPT_WEIGHT)) + 1
    return replace(hypotheses, weights=weights).take(order[:num_kept])


# --- the Gaussian model ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Runs as arrays, in the order of their layouts."""

    keys: tuple[int, ...]  # layouts
    of_layout: Ints  # index of each run's layout
    seconds: Floats  # of a step
    y: Floats  # its logarithm
    at: Floats  # in spans
    times: Floats
    is_timed: bool
    # Runs x nodes: the product of two rows is the share of nodes that two runs have in common.
    member: Floats
    nodes: Mapping[str, int]  # columns; the last: unknown nodes
    span: tuple[float, float]
    variance: Floats  # of each run
    load_variance: Floats  # that the load adds at most

    @classmethod
    def of(cls, runs: Mapping[int, Sequence[Run]], span: tuple[float, float]) -> _Rows:
        every = [run for some in runs.values() for run in some]
        first, last = span
        times = np.array([last if run.at is None else run.at for run in every])
        names = sorted({name for run in every for name in run.nodes})
        nodes = {name: i for i, name in enumerate(names)}
        seconds = np.array([run.step_seconds for run in every])
        return cls(
            keys=tuple(runs),
            of_layout=np.repeat(np.arange(len(runs)), [len(some) for some in runs.values()]),
            seconds=seconds,
            y=np.log(seconds),
            at=(times - first) / max(last - first, 1e-9),
            times=times,
            is_timed=all(run.at is not None for run in every),
            member=_member(every, nodes),
            nodes=nodes,
            span=span,
            variance=np.array([run.own_variance for run in every]),
            load_variance=np.array([run.load_sd**2 for run in every]),
        )

    def alone(self, runs: Sequence[Run]) -> _Rows:
        """Return other runs, each as a layout, with the columns of these."""
        found = _Rows.of({place: [run] for place, run in enumerate(runs)}, self.span)
        return replace(found, member=_member(runs, self.nodes), nodes=self.nodes)

    @property
    def last(self) -> int:
        return int(np.argmax(self.at))

    @property
    def design(self) -> Floats:
        """Runs x layouts: 1 if the run is of the layout."""
        return np.eye(len(self.keys))[self.of_layout]


def _member(runs: Sequence[Run], nodes: Mapping[str, int]) -> Floats:
    """Runs x nodes. Nodes without a column have nothing in common with others."""
    member = np.zeros((len(runs), len(nodes) + 1))
    for row, run in enumerate(runs):
        member[row, [nodes[name] for name in run.nodes if name in nodes] or [len(nodes)]] = 1.0
    found: Floats = member / np.sqrt(member.sum(axis=1, keepdims=True))
    return found


def _drift_covariance(rows: _Rows, others: _Rows, hypotheses: Hypotheses) -> Floats:
    """The covariance of drift and nodes: hypotheses x rows x others."""
    # Few correlations differ, since most hypotheses differ in other things.
    kinds, kind_of = np.unique(
        np.stack([hypotheses.length, hypotheses.is_smooth], axis=1), axis=0, return_inverse=True
    )
    apart = np.abs(rows.at[:, None] - others.at[None, :])[None] / kinds[:, 0, None, None]
    smooth = np.sqrt(5.0) * apart
    correlation = np.where(
        kinds[:, 1, None, None] > 0,
        (1.0 + smooth + smooth**2 / 3.0) * np.exp(-smooth),
        np.exp(-apart),
    )
    found: Floats = hypotheses.drift_sd[:, None, None] ** 2 * correlation[kind_of.reshape(-1)]
    for mine, theirs in zip(_levels(rows, hypotheses), _levels(others, hypotheses), strict=True):
        found += STEP_SD**2 * (mine[:, :, None] & theirs[:, None, :])
    found += hypotheses.node_sd[:, None, None] ** 2 * (rows.member @ others.member.T)
    return found


def _levels(rows: _Rows, hypotheses: Hypotheses) -> tuple[Mask, Mask]:
    """Hypotheses x runs: whether a run was before the first step, or between the two steps."""
    first, then = hypotheses.step_at[:, None], hypotheses.next_step_at[:, None]
    at = rows.at[None, :]
    return at < first, (at >= first) & (at < then)


def _noise(rows: _Rows, hypotheses: Hypotheses) -> Floats:
    """Hypotheses x runs x runs: the variance that each run has for itself, on the diagonal."""
    load = hypotheses.load_scale[:, None] ** 2 * rows.load_variance[None, :]
    noise = rows.variance[None, :] + load + hypotheses.run_sd[:, None] ** 2
    found: Floats = noise[:, None, :] * np.eye(len(rows.y))
    return found


def _whole(rows: _Rows, hypotheses: Hypotheses) -> tuple[Floats, Floats]:
    """The covariance of drift and nodes, and that of the runs with their layouts and noise.

    Layouts have a wide prior around the mean of all, which makes everything one Gaussian vector.
    """
    covariance = _drift_covariance(rows, rows, hypotheses)
    same_layout = LEVEL_SD**2 * (rows.of_layout[:, None] == rows.of_layout[None, :])
    return covariance, covariance + same_layout[None] + _noise(rows, hypotheses)


def _alpha(rows: _Rows, hypotheses: Hypotheses) -> Floats:
    """Hypotheses x runs: the mean of the drift, as a product with its covariance with the runs."""
    _, whole = _whole(rows, hypotheses)
    y = rows.y - float(rows.y.mean())
    return np.asarray(np.linalg.solve(whole, y[None, :, None])[..., 0], dtype=np.float64)


def _drift_at(runs: _Rows, rows: _Rows, hypotheses: Hypotheses, alpha: Floats) -> Floats:
    """Hypotheses x runs: the mean of each run's drift, less that of the last row."""
    at_last = _drift_covariance(rows, rows, hypotheses)[:, rows.last, :]
    found: Floats = np.einsum("gkm,gm->gk", _drift_covariance(runs, rows, hypotheses), alpha)
    found -= np.einsum("gm,gm->g", at_last, alpha)[:, None]
    return found


def _posterior(rows: _Rows, hypotheses: Hypotheses, last: int) -> tuple[Floats, Floats]:
    """Means and covariances of the layouts for the machine at run `last`, per hypothesis."""
    covariance, whole = _whole(rows, hypotheses)
    level = float(rows.y.mean())
    to_layout = LEVEL_SD**2 * rows.design.T[None] + covariance[:, [last], :]
    weights = np.linalg.solve(whole, np.swapaxes(to_layout, 1, 2))
    means: Floats = level + np.einsum("gmk,m->gk", weights, rows.y - level)
    before = LEVEL_SD**2 * np.eye(len(rows.keys))[None] + covariance[:, last, last][:, None, None]
    after: Floats = before - to_layout @ weights
    return means, after


def _change(rows: _Rows, largest: float, hypotheses: Hypotheses) -> SpeedChange | None:
    """The change of the machine, shown by the repeated layout whose runs differ most.

    None: it did not change by more than noise.
    """
    sds = np.maximum(hypotheses.drift_sd, hypotheses.node_sd)
    changes = (sds >= SEEN) | (hypotheses.step_at >= 0)
    if largest < log(1 + SEEN) or float(hypotheses.weights[changes].sum()) < 0.5:
        return None
    widest: tuple[float, int, int] | None = None
    for place in range(len(rows.keys)):
        mine = np.flatnonzero(rows.of_layout == place)
        mine = mine[np.argsort(rows.at[mine], kind="stable")]
        for other in mine[1:]:
            off = abs(float(rows.y[other] - rows.y[mine[0]]))
            if widest is None or off > widest[0]:
                widest = off, int(mine[0]), int(other)
    assert widest is not None, "only repeats show drift"
    _, first, then = widest
    return SpeedChange(
        key=rows.keys[int(rows.of_layout[first])],
        first_seconds=float(rows.seconds[first]),
        then_seconds=float(rows.seconds[then]),
        apart_seconds=float(rows.times[then] - rows.times[first]) if rows.is_timed else None,
        largest_correction=exp(largest) - 1,
    )
