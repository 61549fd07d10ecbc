"""What is learned of a logarithm over the rows of a lattice: a Gaussian process on top of a belief, robust to single bad values (numpy).

The belief's constants are shared by all rows; what they do not explain is alike where rows lie close, axis by axis and all axes together.
Values may be bounds ("at least this"), and rows may be pending. Cost per value is linear in the rows; see `Surrogate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from orchestrator.core.search.lattice import Axis, Belief, Floats, Ints, Lattice

KEPT = 128  # values that the process rests on: the nearest to the best and an even spread over the rest; its cost is cubic in them
MOST = 176  # values, before those that are kept are chosen anew
FEW = 48  # values, up to which the noise is worked out from the start each time
REFIT_GROWTH = 1.5  # lengths and amplitudes are learned anew when the values have grown by this
LEARN_AT_LEAST = 4
LEARN_FROM = 96  # values at most, for learning them
FREEDOM = 4.0  # degrees of freedom of the noise: a value far off its neighbours counts for less (Student's t by reweighting)
BOUND_MARGIN = 0.1  # in the logarithm, beyond a bound that the mean contradicts
BOUND_SD = 0.1
JITTER = 1e-8


class Bound(IntEnum):
    """What a value says of its row: that it is the value, or that the row lies below or above it."""

    AT_MOST = -1
    EXACT = 0
    AT_LEAST = 1


@dataclass(frozen=True, kw_only=True)
class Value:
    row: int
    value: float | None  # None: pending, told later
    bound: Bound = Bound.EXACT


@dataclass(frozen=True, kw_only=True, eq=False)
class Smoothness:
    """How the residual varies: lengths in places of each axis, and standard deviations of its parts and of the noise."""

    lengths: Floats  # of the axes; the distance over which values stay alike
    joint_sd: float  # of what is alike only where all axes are close
    additive_sd: float  # of what each axis adds whatever the others are
    noise_sd: float

    @classmethod
    def guess(cls, lattice: Lattice, *, residual_sd: float | None) -> Smoothness:
        """Before anything is learned. Where physics explains most, the rest is smaller, and counts for as much by axis as jointly."""
        span = np.ptp(lattice.places, axis=0) if lattice.axes else np.zeros(0)
        sd = UNEXPLAINED_SD if residual_sd is None else residual_sd
        lengths = np.where(lattice.ordered, np.maximum(LENGTH, span / 4), 1.0)
        return cls(lengths=lengths, joint_sd=sd, additive_sd=sd, noise_sd=NOISE_SD)


LENGTH = 3.0  # doublings
UNEXPLAINED_SD = 0.5
NOISE_SD = 0.04  # repeats of one layout differ by 1-4 %
_LENGTH_SD, _AMPLITUDE_SD, _NOISE_SD_SD = (
    0.4,
    0.5,
    0.7,
)  # in the logarithm: how far learning may go from the guess


class Surrogate:
    """The process over one lattice. `replace` what is known, `add` to it, then read `mean` and `sd` of every row.

    Adding costs (rows x values); replacing and learning cost (rows x values^2) and happen when the values have grown by a share.
    """

    def __init__(
        self,
        lattice: Lattice,
        belief: Belief,
        *,
        guess: Smoothness,
        learns: bool = True,
        robust: bool = True,
    ) -> None:
        """`learns`: whether smoothness is learned from the values; `robust`: whether values far off count for less."""
        self._axes = lattice.axes
        self._belief = belief
        self._loadings = belief.loadings
        self._guess = guess
        self._learns, self._robust = learns, robust
        self._learned_at = 0
        self._values: list[Value] = []
        self._pending: dict[int, int] = {}  # row -> place in _values
        self._take_up(guess)
        self._num_fitted = 0  # values whose columns are below; the arrays have room for more
        self._cross = np.zeros((0, len(belief)))  # covariance of each value's row with every row
        self._whitened = np.zeros(
            (0, len(belief))
        )  # L^-1 of them: their squares are what the values explain
        self._inverse = np.zeros((0, 0))  # L^-1
        self._noise = np.zeros(0)  # variances
        self._explained = np.zeros(len(belief))  # variance of every row
        self._mean: Floats | None = None

    @property
    def values(self) -> Sequence[Value]:
        return self._values

    def lift(self, level: float) -> None:
        """Believe all rows higher by so much: what lies where, and how sure it is, stays."""
        self._belief = replace(self._belief, mean=self._belief.mean + level)
        self._mean = None

    def replace(self, values: Sequence[Value]) -> None:
        """Rest on these values from now on, and on nothing else."""
        self._values = list(values)
        self._pending = {
            value.row: at for at, value in enumerate(self._values) if value.value is None
        }
        self._num_fitted = 0
        self._mean = None

    def add(self, value: Value) -> None:
        """One more value, or what a pending row came to."""
        at = self._pending.pop(value.row, None)
        if at is not None:
            self._values[at] = value
            if value.bound is not Bound.EXACT:
                self._num_fitted = 0
        else:
            if value.value is None:
                self._pending[value.row] = len(self._values)
            self._values.append(value)
        self._mean = None

    def drop(self, row: int) -> None:
        """A pending row is no longer."""
        at = self._pending.get(row)
        if at is None:
            return
        if (
            at == len(self._values) - 1 and self._num_fitted == at + 1
        ):  # asked for last, given back first: nothing rests on it
            self._num_fitted = at
            self._explained -= self._whitened[at] ** 2
            del self._values[at], self._pending[row]
            self._mean = None
        else:
            self.replace([*self._values[:at], *self._values[at + 1 :]])

    @property
    def mean(self) -> Floats:
        """Expected logarithm of every row."""
        if self._mean is None:
            self._update()
        assert self._mean is not None
        return self._mean

    @property
    def sd(self) -> Floats:
        """Standard deviation of every row's logarithm, pending rows taken as known."""
        if self._mean is None:
            self._update()
        sd: Floats = np.sqrt(np.maximum(self._own - self._explained, 1e-10))
        return sd

    @property
    def noise_sd(self) -> float:
        return self._smoothness.noise_sd

    def correct(self, value: Value) -> None:
        """A row that has a value was measured again: this one takes its place. Both are exact."""
        at = next(
            (
                i
                for i, v in enumerate(self._values)
                if v.row == value.row and v.value is not None and v.bound is Bound.EXACT
            ),
            None,
        )
        if at is None:  # among thousands, it was not kept
            self.add(value)
            return
        self._values[at] = value
        self._num_fitted = 0  # what was far off its neighbours need not be any more
        self._mean = None

    def left_out(self) -> dict[int, tuple[float, float]]:
        """What the other values say of each row that has one: mean and standard deviation with noise; nothing where one is alone."""
        told = [v for v in self._values if v.value is not None and v.bound is Bound.EXACT]
        if len(told) < 2:
            return {}
        rows = self._rows(told)
        y = np.array([v.value for v in told]) - self._belief.mean[rows]
        covariance = self._covariance(rows, rows)
        base = self._smoothness.noise_sd**2
        noise = self._noise_of(covariance, y, np.full(len(rows), base), times=3)
        # All at once from one inverse (Rasmussen and Williams 2006, eq. 5.12); its variances have each value's own noise in them.
        inverse = np.linalg.inv(covariance + np.diag(noise))
        alone = 1.0 / np.diag(inverse)
        expected = self._belief.mean[rows] + y - (inverse @ y) * alone
        sd = np.sqrt(np.maximum(alone - noise + base, JITTER))
        return {
            row: (mean, one)
            for row, mean, one in zip(rows.tolist(), expected.tolist(), sd.tolist(), strict=True)
        }

    # --- fitting ---

    def _update(self) -> None:
        told = [v for v in self._values if v.value is not None and v.bound is Bound.EXACT]
        if (
            self._learns
            and len(told) >= LEARN_AT_LEAST
            and (len(told) < 8 or len(told) >= REFIT_GROWTH * self._learned_at)
        ):
            if len(told) != self._learned_at and self._learned_at < LEARN_FROM:
                self._learn(told)
                self._num_fitted = 0
            self._learned_at = len(told)
        if not self._num_fitted or len(self._values) > MOST:
            kept = _kept(self._values)
            if len(kept) < len(self._values):
                self.replace(kept)
            self._fit()
        while self._num_fitted < len(self._values):
            self._append(self._values[self._num_fitted])
        self._mean = self._mean_now()

    def _fit(self) -> None:
        """All columns anew, with the noise that the values' own disagreement gives."""
        rows = self._rows(self._values)
        n, room = len(rows), min(max(2 * len(rows), 16), MOST + 64)
        self._num_fitted = n
        self._cross, self._whitened = (
            np.zeros((room, len(self._belief))),
            np.zeros((room, len(self._belief))),
        )
        self._inverse, self._noise = (
            np.zeros((room, room)),
            np.full(room, self._smoothness.noise_sd**2),
        )
        self._cross[:n] = self._covariance(rows, None)
        covariance = self._cross[:n, rows]
        known, _, noise = self._told(covariance, times=3)
        silent = np.array([v.value is not None for v in self._values], dtype=np.bool_)
        silent[known] = False
        self._noise[:n][silent] = 1e6  # a bound that the mean keeps says nothing
        self._noise[known] = noise
        self._inverse[:n, :n] = np.linalg.inv(
            np.linalg.cholesky(covariance + np.diag(self._noise[:n] + JITTER))
        )
        np.matmul(self._inverse[:n, :n], self._cross[:n], out=self._whitened[:n])
        self._explained = np.einsum("ij,ij->j", self._whitened[:n], self._whitened[:n])

    def _append(self, value: Value) -> None:
        """One more column: the last row of the Cholesky factor's inverse, and what it explains."""
        n, row = self._num_fitted, value.row
        if n == len(self._cross):
            self._fit()
            return
        cross = self._covariance(np.array([row]), None)[0]
        noise = BOUND_SD**2 if value.bound is not Bound.EXACT else self._smoothness.noise_sd**2
        below = self._whitened[:n, row].copy()
        pivot = np.sqrt(max(cross[row] + noise + JITTER - below @ below, JITTER))
        whitened = (cross - below @ self._whitened[:n]) / pivot
        self._inverse[n, :n] = -(below @ self._inverse[:n, :n]) / pivot
        self._inverse[n, n] = 1 / pivot
        self._cross[n], self._whitened[n], self._noise[n] = cross, whitened, noise
        self._explained += whitened**2
        self._num_fitted = n + 1

    def _mean_now(self) -> Floats:
        rows = self._rows(self._values)
        n = len(rows)
        covariance = self._cross[:n, rows]
        known, y, noise = self._told(covariance, times=3 if n <= FEW else 1)
        if not len(known):
            return self._belief.mean.copy()
        weights = np.zeros(n)
        weights[known] = np.linalg.solve(
            covariance[np.ix_(known, known)] + np.diag(noise + JITTER), y
        )
        self._noise[known] = noise
        mean: Floats = self._belief.mean + weights @ self._cross[:n]
        return mean

    def _told(self, covariance: Floats, *, times: int) -> tuple[Ints, Floats, Floats]:
        """Which values take part, their deviations from the belief, and the variance of each: bounds join while the mean contradicts them."""
        exact = [
            i for i, v in enumerate(self._values) if v.value is not None and v.bound is Bound.EXACT
        ]
        bounds = [
            i
            for i, v in enumerate(self._values)
            if v.value is not None and v.bound is not Bound.EXACT
        ]
        prior = self._belief.mean[self._rows(self._values)]
        target = (
            np.array(
                [
                    np.nan if v.value is None else v.value + int(v.bound) * BOUND_MARGIN
                    for v in self._values
                ]
            )
            - prior
        )
        at = np.array(exact, dtype=np.int64)
        # Where many values are known, what was found of them last time is a start.
        noise = np.full(len(exact), self._smoothness.noise_sd**2) if times > 1 else self._noise[at]
        if exact and self._robust:
            noise = self._noise_of(covariance[np.ix_(at, at)], target[at], noise, times=times)
        side = np.array([int(self._values[i].bound) for i in bounds])
        open_bounds = np.array(bounds, dtype=np.int64)
        joined = np.zeros(len(bounds), dtype=np.bool_)
        for _ in range(3 if bounds else 0):
            known = np.concatenate([at, open_bounds[joined]])
            variance = np.concatenate([noise, np.full(int(joined.sum()), BOUND_SD**2)])
            means = np.zeros(len(bounds))
            if len(known):
                weights = np.linalg.solve(
                    covariance[np.ix_(known, known)] + np.diag(variance + JITTER), target[known]
                )
                means = covariance[np.ix_(open_bounds, known)] @ weights
            broken = ~joined & (side * (means - target[open_bounds]) < 0)
            if not broken.any():
                break
            joined |= broken
        known = np.concatenate([at, open_bounds[joined]])
        return (
            known,
            target[known],
            np.concatenate([noise, np.full(int(joined.sum()), BOUND_SD**2)]),
        )

    def _noise_of(self, covariance: Floats, y: Floats, start: Floats, *, times: int) -> Floats:
        """Variance of each value's noise: larger where a value lies far from what the others, and the belief, make of it."""
        base, noise = self._smoothness.noise_sd**2, start
        for _ in range(times):
            fitted = covariance @ np.linalg.solve(covariance + np.diag(noise + JITTER), y)
            noise = np.maximum(base * (FREEDOM + (y - fitted) ** 2 / base) / (FREEDOM + 1), base)
        return noise

    # --- covariance ---

    def _take_up(self, smoothness: Smoothness) -> None:
        self._smoothness = smoothness
        self._kernels = _kernels(self._axes, smoothness)
        self._own: Floats = smoothness.joint_sd**2 + (self._loadings**2).sum(axis=1)
        if self._axes:
            self._own = self._own + smoothness.additive_sd**2

    def _covariance(self, rows: Ints, others: Ints | None) -> Floats:
        """Covariance of some rows with others, or with all."""
        loadings = self._loadings if others is None else self._loadings[others]
        covariance: Floats = (
            _residual(self._kernels, self._smoothness, rows, others)
            + self._loadings[rows] @ loadings.T
        )
        return covariance

    def _learn(self, told: Sequence[Value]) -> None:
        """Take the lengths and amplitudes under which the values are likeliest, not far from the guess (coordinate search)."""
        if len(told) > LEARN_FROM:
            told = [told[i] for i in np.linspace(0, len(told) - 1, LEARN_FROM).astype(int)]
        rows = self._rows(told)
        y = np.array([v.value for v in told]) - self._belief.mean[rows]
        shared = self._loadings[rows] @ self._loadings[rows].T
        axes = tuple(axis.take(rows) for axis in self._axes)
        self._take_up(_likeliest(self._smoothness, self._guess, axes, y, shared))

    @staticmethod
    def _rows(values: Sequence[Value]) -> Ints:
        return np.array([v.row for v in values], dtype=np.int64)


def _kept(values: list[Value]) -> list[Value]:
    """At most KEPT of the values: the lowest third, and an even spread over the rest, in their order; pending ones stay."""
    if len(values) <= KEPT:
        return values
    pending = [i for i, v in enumerate(values) if v.value is None]
    told = [i for i, v in enumerate(values) if v.value is not None]
    exact = sorted(
        (i for i in told if values[i].bound is Bound.EXACT), key=lambda i: values[i].value or 0.0
    )
    chosen = set(exact[: KEPT // 3])
    rest = [i for i in told if i not in chosen]
    chosen |= {
        rest[j]
        for j in np.linspace(0, len(rest) - 1, min(len(rest), KEPT - len(chosen)))
        .astype(int)
        .tolist()
    }
    return [values[i] for i in sorted(chosen | set(pending[-KEPT // 4 :]))]


@dataclass(frozen=True, kw_only=True, eq=False)
class _AxisKernel:
    """The kernel of one axis, as tables: it has few places, so squared distances and what they mean are looked up."""

    steps: Ints  # of every row
    squared: Floats  # places x places, in lengths
    alone: Floats  # Matern of it


def _kernels(axes: Sequence[Axis], smoothness: Smoothness) -> tuple[_AxisKernel, ...]:
    found = []
    for axis, length in zip(axes, smoothness.lengths, strict=True):
        apart = axis.places[:, None] - axis.places[None, :]
        squared = ((apart if axis.ordered else (apart != 0).astype(np.float64)) / length) ** 2
        found.append(_AxisKernel(steps=axis.steps, squared=squared, alone=_matern(squared)))
    return tuple(found)


def _residual(
    kernels: Sequence[_AxisKernel], smoothness: Smoothness, rows: Ints, others: Ints | None
) -> Floats:
    """Matern 5/2 of the distance over all axes, plus the mean of the same over each axis alone."""
    num_others = (len(kernels[0].steps) if others is None else len(others)) if kernels else 1
    squared, additive = np.zeros((len(rows), num_others)), np.zeros((len(rows), num_others))
    for kernel in kernels:
        theirs = kernel.steps if others is None else kernel.steps[others]
        mine = kernel.steps[rows]
        squared += kernel.squared[mine][:, theirs]
        additive += kernel.alone[mine][:, theirs]
    covariance: Floats = smoothness.joint_sd**2 * _matern(squared)
    if kernels:
        covariance += smoothness.additive_sd**2 / len(kernels) * additive
    return covariance


def _matern(squared: Floats) -> Floats:
    r = np.sqrt(5.0 * squared)
    values: Floats = (1.0 + r + r * r / 3.0) * np.exp(-r)
    return values


def _likeliest(
    now: Smoothness, guess: Smoothness, axes: Sequence[Axis], y: Floats, shared: Floats
) -> Smoothness:
    best, found = now, _log_likelihood(now, guess, axes, y, shared)
    for factor in (1.65, 1.28):
        for parameter in [*range(len(now.lengths)), "joint_sd", "additive_sd", "noise_sd"]:
            for step in (factor, 1 / factor):
                for _ in range(4):
                    tried = _scaled(best, parameter, step)
                    likelihood = _log_likelihood(tried, guess, axes, y, shared)
                    if likelihood <= found + 1e-3:
                        break
                    best, found = tried, likelihood
    return best


def _scaled(smoothness: Smoothness, parameter: int | str, factor: float) -> Smoothness:
    if isinstance(parameter, str):
        return replace(smoothness, **{parameter: getattr(smoothness, parameter) * factor})
    lengths = smoothness.lengths.copy()
    lengths[parameter] *= factor
    return replace(smoothness, lengths=lengths)


def _log_likelihood(
    tried: Smoothness, guess: Smoothness, axes: Sequence[Axis], y: Floats, shared: Floats
) -> float:
    every = np.arange(len(y))
    covariance = _residual(_kernels(axes, tried), tried, every, every) + shared
    base = tried.noise_sd**2
    noise = np.full(len(y), base)
    # A value far off costs its own wider noise, not its square: else one bad run makes every neighbourhood rough.
    for _ in range(2):
        fitted = covariance @ np.linalg.solve(covariance + np.diag(noise + JITTER), y)
        noise = np.maximum(base * (FREEDOM + (y - fitted) ** 2 / base) / (FREEDOM + 1), base)
    try:
        lower = np.linalg.cholesky(covariance + np.diag(noise + JITTER))
    except np.linalg.LinAlgError:
        return -np.inf
    z = np.linalg.solve(lower, y)
    fit = -0.5 * z @ z - np.log(np.diag(lower)).sum()
    fit -= 0.5 * (np.log(tried.lengths / guess.lengths) ** 2).sum() / _LENGTH_SD**2
    fit -= 0.5 * np.log(tried.joint_sd / guess.joint_sd) ** 2 / _AMPLITUDE_SD**2
    fit -= 0.5 * np.log(tried.additive_sd / guess.additive_sd) ** 2 / _AMPLITUDE_SD**2
    fit -= 0.5 * np.log(tried.noise_sd / guess.noise_sd) ** 2 / _NOISE_SD_SD**2
    return float(fit)
