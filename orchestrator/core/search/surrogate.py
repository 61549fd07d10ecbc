"""A model of a logarithm over the rows of a lattice: a Gaussian process on top of a belief (numpy).

All rows share the belief's constants. What these do not explain is similar in rows that are close,
by each axis alone and by all axes together. Values may be bounds ("at least this"), rows may be
pending, and single bad values count for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.search.censored import FAINT, Sites, matched, propagated
from orchestrator.core.search.lattice import Belief, Lattice
from orchestrator.core.search.outliers import slowed_variances
from orchestrator.core.search.smoothness import (
    JITTER,
    Smoothness,
    kernels_of,
    likeliest,
    noise_variances,
    residual_covariance,
)

# The process uses KEPT values, since its cost is cubic in them: the best ones, and an even spread
# over the rest. They are selected again when there are MOST values.
KEPT, MOST = 128, 176
FEW = 48  # values, noise computed from scratch
# Lengths and amplitudes are learned from 4 to 96 values, again when there are 1.5 times as many.
FIT_AT_LEAST, FIT_FROM, REFIT_GROWTH = 4, 96, 1.5
# How exactly a bound is known, in the logarithm. A layout that nearly fills the memory sometimes
# fits and sometimes does not.
BOUND_SD = 0.04


class Bound(IntEnum):
    """The row has this value exactly, or lies below or above it."""

    AT_MOST = -1
    EXACT = 0
    AT_LEAST = 1


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value of a row, or a bound of it."""

    row: int
    value: float | None  # None: pending
    bound: Bound = Bound.EXACT

    @property
    def is_exact(self) -> bool:
        """True if the row has this value, and the value is no bound."""
        return self.value is not None and self.bound is Bound.EXACT


class Surrogate:
    """The process over one lattice: `add` values, then read `mean` and `sd` of every row.

    Adding costs (rows x values). Correcting a value and learning cost (rows x values^2), and
    learning only happens when the values have grown by a share.
    """

    def __init__(
        self,
        lattice: Lattice,
        belief: Belief,
        *,
        guess: Smoothness,
        fits_smoothness: bool = True,
        robust: bool = True,
        may_be_slowed: bool = False,
    ) -> None:
        """`fits_smoothness`: to the values. If `robust`, values far off count for less.

        `may_be_slowed`: values are times, of which some are too large (outliers.py).
        """
        self._axes = lattice.axes
        self._belief = belief
        self._loadings = belief.loadings
        self._guess = guess
        self._fits_smoothness, self._robust = fits_smoothness, robust
        self._may_be_slowed = may_be_slowed
        self._fitted_at = 0
        self._values: list[Value] = []
        self._pending: dict[int, int] = {}  # row -> place in _values
        self._take_up(guess)
        self._num_fitted = 0  # columns used in the arrays
        self._cross = np.zeros((0, len(belief)))  # covariance of values with rows
        # L^-1 times `_cross`, with L the Cholesky factor of the values' covariance; its squares are
        # the variance that the values explain.
        self._whitened = np.zeros((0, len(belief)))
        self._noise = np.zeros(0)  # variances
        # By row: precision of a bound's Gaussian value, and its mean times that, over the belief.
        self._sites: dict[int, tuple[float, float]] = {}
        self._explained = np.zeros(len(belief))  # variance of every row
        self._mean: Floats | None = None
        self._last_mean = belief.mean  # before the newest values

    @property
    def values(self) -> Sequence[Value]:
        """All values, pending rows among them."""
        return self._values

    def shift(self, level: float) -> None:
        """Believe in a higher mean of all rows; differences and uncertainty stay."""
        self._belief = replace(self._belief, mean=self._belief.mean + level)
        self._last_mean = self._last_mean + level
        self._mean = None

    def clear(self) -> None:
        """Forget all values."""
        self._keep([])

    def _keep(self, values: Sequence[Value]) -> None:
        """Forget all values except these."""
        self._values = list(values)
        self._pending = {v.row: at for at, v in enumerate(self._values) if v.value is None}
        self._num_fitted = 0
        self._mean = None
        self._last_mean = self._belief.mean
        rows = {value.row for value in self._values}
        self._sites = {row: site for row, site in self._sites.items() if row in rows}

    def add(self, *, row: int, value: float | None, bound: Bound = Bound.EXACT) -> None:
        """Add the value of a row, a bound of it, or the outcome of a pending row.

        `value`: None for a row that is pending.
        """
        self._add(Value(row=row, value=value, bound=bound))

    def _add(self, value: Value) -> None:
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
        """Remove a pending row."""
        at = self._pending.get(row)
        if at is None:
            return
        if at == len(self._values) - 1 and self._num_fitted == at + 1:
            # It was added last: nothing depends on it.
            self._num_fitted = at
            self._explained -= self._whitened[at] ** 2
            del self._values[at], self._pending[row]
            self._mean = None
        else:
            self._keep([*self._values[:at], *self._values[at + 1 :]])

    @property
    def mean(self) -> Floats:
        """The expected logarithm of every row."""
        if self._mean is None:
            self._update()
        assert self._mean is not None
        return self._mean

    @property
    def sd(self) -> Floats:
        """The standard deviation of every row's logarithm, as if pending rows were known."""
        if self._mean is None:
            self._update()
        sd: Floats = np.sqrt(np.maximum(self._own - self._explained, 1e-10))
        return sd

    @property
    def constants(self) -> Floats:
        """The expected values of the belief's constants, by what is known."""
        if self._mean is None:
            self._update()
        rows = self._rows(self._values)
        covariance = self._cross[: len(rows), rows]
        known, y, noise = self._known(covariance, times=1)
        if not len(known):
            return np.zeros(self._belief.basis.shape[1])
        weights = np.linalg.solve(covariance[np.ix_(known, known)] + np.diag(noise + JITTER), y)
        found: Floats = self._belief.covariance @ (self._belief.basis[rows[known]].T @ weights)
        return found

    @property
    def noise_sd(self) -> float:
        """The standard deviation of the noise of a value."""
        return self._smoothness.noise_sd

    def correct(self, *, row: int, value: float) -> None:
        """Replace the exact value of a row by another exact value."""
        corrected = Value(row=row, value=value)
        at = next((i for i, v in enumerate(self._values) if v.row == row and v.is_exact), None)
        if at is None:  # among thousands, it was not kept
            self._add(corrected)
            return
        self._values[at] = corrected
        self._num_fitted = 0  # noise of other values may change
        self._mean = None

    def left_out(self) -> dict[int, tuple[float, float]]:
        """Predict each row that has a value from the other values: mean and sd with noise."""
        told = [v for v in self._values if v.is_exact]
        if len(told) < 2:
            return {}
        rows = self._rows(told)
        y = np.array([v.value for v in told]) - self._belief.mean[rows]
        covariance = self._covariance(rows, rows)
        base = self._smoothness.noise_sd**2
        noise = noise_variances(covariance, y, np.full(len(rows), base), base=base, times=3)
        # All at once from one inverse (Rasmussen and Williams 2006, eq. 5.12), whose variances
        # include each value's own noise.
        inverse = np.linalg.inv(covariance + np.diag(noise))
        alone = 1.0 / np.diag(inverse)
        expected = self._belief.mean[rows] + y - (inverse @ y) * alone
        sd = np.sqrt(np.maximum(alone - noise + base, JITTER))
        return dict(
            zip(rows.tolist(), zip(expected.tolist(), sd.tolist(), strict=True), strict=True)
        )

    # --- fitting ---

    def _update(self) -> None:
        told = [v for v in self._values if v.is_exact]
        has_grown = len(told) < 8 or len(told) >= REFIT_GROWTH * self._fitted_at
        if self._fits_smoothness and len(told) >= FIT_AT_LEAST and has_grown:
            if len(told) != self._fitted_at and self._fitted_at < FIT_FROM:
                self._fit_smoothness(told)
                self._num_fitted = 0
            self._fitted_at = len(told)
        if not self._num_fitted or len(self._values) > MOST:
            kept = _kept(self._values)
            if len(kept) < len(self._values):
                self._keep(kept)
            self._fit()
        while self._num_fitted < len(self._values):
            self._append(self._values[self._num_fitted])
        self._mean = self._last_mean = self._mean_now()

    def _fit(self) -> None:
        """Compute all columns, with the noise that follows from disagreeing values."""
        rows = self._rows(self._values)
        n, capacity = len(rows), min(max(2 * len(rows), 16), MOST + 64)
        self._num_fitted = n
        self._cross = np.zeros((capacity, len(self._belief)))
        self._whitened = np.zeros_like(self._cross)
        self._noise = np.full(capacity, self._smoothness.noise_sd**2)
        self._cross[:n] = self._covariance(rows, None)
        covariance = self._cross[:n, rows]
        known, _, noise = self._known(covariance, times=3)
        ignored = np.array([v.value is not None for v in self._values], dtype=np.bool_)
        ignored[known] = False
        self._noise[:n][ignored] = 1.0 / FAINT  # bounds that tell nothing new
        self._noise[known] = noise
        inverse = np.linalg.inv(np.linalg.cholesky(covariance + np.diag(self._noise[:n] + JITTER)))
        np.matmul(inverse, self._cross[:n], out=self._whitened[:n])
        self._explained = np.einsum("ij,ij->j", self._whitened[:n], self._whitened[:n])

    def _append(self, value: Value) -> None:
        """Append a column for a new value, and what the value explains."""
        n, row = self._num_fitted, value.row
        if n == len(self._cross):
            self._fit()
            return
        cross = self._covariance(np.array([row]), None)[0]
        noise = self._smoothness.noise_sd**2
        if value.bound is not Bound.EXACT:
            noise = self._begin_site(value)
        below = self._whitened[:n, row].copy()
        pivot = np.sqrt(max(cross[row] + noise + JITTER - below @ below, JITTER))
        whitened = (cross - below @ self._whitened[:n]) / pivot
        self._cross[n], self._whitened[n], self._noise[n] = cross, whitened, noise
        self._explained += whitened**2
        self._num_fitted = n + 1

    def _begin_site(self, value: Value) -> float:
        """Turn a new bound into a Gaussian value, by what is known of its row; its noise."""
        assert value.value is not None
        row = value.row
        precision, shift = matched(
            mean=np.array([self._last_mean[row] - self._belief.mean[row]]),
            variance=np.array([max(float(self._own[row] - self._explained[row]), 1e-8)]),
            limits=np.array([value.value - self._belief.mean[row]]),
            sides=np.array([float(value.bound)]),
            softness=BOUND_SD,
        )
        self._sites[row] = (float(precision[0]), float(shift[0]))
        return 1.0 / max(float(precision[0]), FAINT)

    def _mean_now(self) -> Floats:
        rows = self._rows(self._values)
        n = len(rows)
        covariance = self._cross[:n, rows]
        known, y, noise = self._known(covariance, times=3 if n <= FEW else 1)
        if not len(known):
            return self._belief.mean.copy()
        weights = np.zeros(n)
        weights[known] = np.linalg.solve(
            covariance[np.ix_(known, known)] + np.diag(noise + JITTER), y
        )
        self._noise[known] = noise
        mean: Floats = self._belief.mean + weights @ self._cross[:n]
        return mean

    def _known(self, covariance: Floats, *, times: int) -> tuple[Ints, Floats, Floats]:
        """Return the values that take part, their deviations from the belief, their variances.

        Bounds take part as the Gaussian values that represent them.
        """
        exact = [i for i, v in enumerate(self._values) if v.is_exact]
        bounds = [i for i, v in enumerate(self._values) if v.value is not None and not v.is_exact]
        told = [np.nan if v.value is None else v.value for v in self._values]
        target = np.array(told) - self._belief.mean[self._rows(self._values)]
        at = np.array(exact, dtype=np.int64)
        # With many values, start from the noise found last time.
        noise = np.full(len(exact), self._smoothness.noise_sd**2) if times > 1 else self._noise[at]
        if exact and self._robust:
            base = self._smoothness.noise_sd**2
            among = covariance[np.ix_(at, at)]
            noise = noise_variances(among, target[at], noise, base=base, times=times)
            # With many values the neighbours of each show as much, and cost less.
            if self._may_be_slowed and times > 1:
                noise = slowed_variances(among, target[at], noise, base=base)
        if not bounds:
            return at, target[at], noise
        bounded = np.array(bounds, dtype=np.int64)
        sites = self._propagate(covariance, at, target, noise, bounded, times=times)
        telling = sites.precision > FAINT
        known = np.concatenate([at, bounded[telling]])
        return (
            known,
            np.concatenate([target[at], sites.mean[telling]]),
            np.concatenate([noise, sites.variance[telling]]),
        )

    def _propagate(
        self,
        covariance: Floats,
        exact: Ints,
        target: Floats,
        noise: Floats,
        bounds: Ints,
        *,
        times: int,
    ) -> Sites:
        """Update the Gaussian values that represent the bounds, by the exact values."""
        of_bounds = covariance[np.ix_(bounds, bounds)]
        mean = np.zeros(len(bounds))
        if len(exact):
            across = covariance[np.ix_(bounds, exact)]
            gain = np.linalg.solve(
                covariance[np.ix_(exact, exact)] + np.diag(noise + JITTER), across.T
            ).T
            mean, of_bounds = gain @ target[exact], of_bounds - gain @ across.T
        rows = [self._values[i].row for i in bounds.tolist()]
        begun = np.array([self._sites.get(row, (0.0, 0.0)) for row in rows])
        sites = propagated(
            Sites(precision=begun[:, 0], shift=begun[:, 1]),
            mean=mean,
            covariance=of_bounds,
            limits=target[bounds],
            sides=np.array([float(self._values[i].bound) for i in bounds.tolist()]),
            softness=BOUND_SD,
            times=2 * times,
        )
        found = zip(sites.precision.tolist(), sites.shift.tolist(), strict=True)
        self._sites.update(zip(rows, found, strict=True))
        return sites

    # --- covariance ---

    def _take_up(self, smoothness: Smoothness) -> None:
        self._smoothness = smoothness
        self._kernels = kernels_of(self._axes, smoothness)
        self._own: Floats = smoothness.joint_sd**2 + (self._loadings**2).sum(axis=1)
        if self._axes:
            self._own = self._own + smoothness.additive_sd**2

    def _covariance(self, rows: Ints, others: Ints | None) -> Floats:
        """Return the covariance of some rows with others, or with all."""
        loadings = self._loadings if others is None else self._loadings[others]
        covariance: Floats = (
            residual_covariance(self._kernels, self._smoothness, rows, others)
            + self._loadings[rows] @ loadings.T
        )
        return covariance

    def _fit_smoothness(self, told: Sequence[Value]) -> None:
        """Set the likeliest lengths and amplitudes near the guess (coordinate search)."""
        if len(told) > FIT_FROM:
            told = [told[i] for i in np.linspace(0, len(told) - 1, FIT_FROM).astype(int)]
        rows = self._rows(told)
        y = np.array([v.value for v in told]) - self._belief.mean[rows]
        shared = self._loadings[rows] @ self._loadings[rows].T
        axes = tuple(axis.take(rows) for axis in self._axes)
        self._take_up(likeliest(self._smoothness, self._guess, axes, y, shared))

    @staticmethod
    def _rows(values: Sequence[Value]) -> Ints:
        return np.array([v.row for v in values], dtype=np.int64)


def _kept(values: list[Value]) -> list[Value]:
    """Return at most KEPT of the values: the lowest third, and an even spread over the rest.

    They stay in order; the newest pending ones are added.
    """
    if len(values) <= KEPT:
        return values
    pending = [i for i, v in enumerate(values) if v.value is None]
    told = [i for i, v in enumerate(values) if v.value is not None]
    exact = [i for i in told if values[i].is_exact]
    selected = set(sorted(exact, key=lambda i: values[i].value or 0.0)[: KEPT // 3])
    rest = [i for i in told if i not in selected]
    places = np.linspace(0, len(rest) - 1, min(len(rest), KEPT - len(selected)))
    selected |= {rest[place] for place in places.astype(int).tolist()}
    return [values[i] for i in sorted(selected | set(pending[-KEPT // 4 :]))]
