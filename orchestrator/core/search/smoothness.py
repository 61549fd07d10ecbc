"""The similarity of rows of a lattice: the kernel of a Gaussian process, and its fit.

The kernel has a joint part, for rows that are close on all axes, and a part for each axis alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.search.lattice import Lattice, LatticeAxis

# Degrees of freedom of the noise: a value far from its neighbours counts for less (Student's t by
# reweighting).
FREEDOM = 4.0
JITTER = 1e-8
LENGTH = 3.0  # doublings
# For axes without order, on which two different values are 1 apart.
WORD_LENGTH = 1.0
UNEXPLAINED_SD = 0.5
NOISE_SD = 0.04  # repeats differ by 1-4 %
# How far learning may go from the guess, in the logarithm.
_LENGTH_SD, _AMPLITUDE_SD, _NOISE_SD_SD = 0.4, 0.5, 0.7


@dataclass(frozen=True, kw_only=True, eq=False)
class Smoothness:
    """Smoothness of the residual: a length on each axis, and standard deviations of its parts."""

    lengths: Floats  # distances of similar values, per axis
    joint_sd: float  # of the joint part
    additive_sd: float  # of the parts by axis
    noise_sd: float

    @classmethod
    def guess(cls, lattice: Lattice, *, residual_sd: float | None) -> Smoothness:
        """Return the smoothness before anything is learned; both parts have the same size."""
        span = np.ptp(lattice.places, axis=0) if lattice.axes else np.zeros(0)
        sd = UNEXPLAINED_SD if residual_sd is None else residual_sd
        lengths = np.where(lattice.ordered, np.maximum(LENGTH, span / 4), WORD_LENGTH)
        return cls(lengths=lengths, joint_sd=sd, additive_sd=sd, noise_sd=NOISE_SD)


@dataclass(frozen=True, kw_only=True, eq=False)
class AxisKernel:
    """The kernel of one axis as tables over its few places."""

    steps: Ints  # of every row
    squared: Floats  # places x places, in lengths
    alone: Floats  # Matern of it


def kernels_of(axes: Sequence[LatticeAxis], smoothness: Smoothness) -> tuple[AxisKernel, ...]:
    """Return the kernel of each axis."""
    return tuple(map(_kernel_of, axes, smoothness.lengths))


def _kernel_of(axis: LatticeAxis, length: float) -> AxisKernel:
    apart = axis.places[:, None] - axis.places[None, :]
    squared = ((apart if axis.ordered else (apart != 0).astype(np.float64)) / length) ** 2
    return AxisKernel(steps=axis.steps, squared=squared, alone=_matern(squared))


def residual_covariance(
    kernels: Sequence[AxisKernel], smoothness: Smoothness, rows: Ints, others: Ints | None
) -> Floats:
    """Return the covariance of some rows with others: rows x others; None: with themselves.

    It is Matern 5/2 of the distance over all axes, plus the mean of that over each axis.
    """
    num_others = (len(kernels[0].steps) if others is None else len(others)) if kernels else 1
    squared, additive = np.zeros((len(rows), num_others)), np.zeros((len(rows), num_others))
    for kernel in kernels:
        theirs = kernel.steps if others is None else kernel.steps[others]
        mine = kernel.steps[rows]
        squared += kernel.squared[mine][:, theirs]
        additive += kernel.alone[mine][:, theirs]
    return _weighted(smoothness, _matern(squared), additive)


def _weighted(smoothness: Smoothness, joint: Floats, additive: Floats) -> Floats:
    """Return the covariance whose joint part is `joint`, and the sum of its parts by axis."""
    covariance: Floats = smoothness.joint_sd**2 * joint
    if len(smoothness.lengths):
        covariance += smoothness.additive_sd**2 / len(smoothness.lengths) * additive
    return covariance


def _matern(squared: Floats) -> Floats:
    r = np.sqrt(5.0 * squared)
    values: Floats = (1.0 + r + r * r / 3.0) * np.exp(-r)
    return values


def likeliest(
    now: Smoothness, guess: Smoothness, axes: Sequence[LatticeAxis], y: Floats, shared: Floats
) -> Smoothness:
    """Return the smoothness that makes values most likely, from steps around the present one.

    `y` has the n values less their believed means, `shared` their covariance by the constants of
    the belief, n x n. `guess` is what the smoothness is believed to be.
    """
    likelihood = Likelihood(guess, axes, y, shared)
    best, found = now, likelihood.log_of(now)
    for factor in (1.65, 1.28):
        for parameter in [*range(len(now.lengths)), "joint_sd", "additive_sd", "noise_sd"]:
            for step in (factor, 1 / factor):
                before = best
                for _ in range(4):
                    tried = _scaled(best, parameter, step)
                    reached = likelihood.log_of(tried)
                    if reached <= found + 1e-3:
                        break
                    best, found = tried, reached
                if best is not before:
                    break  # the other direction only leads back
    return best


def _scaled(smoothness: Smoothness, parameter: int | str, factor: float) -> Smoothness:
    if isinstance(parameter, str):
        return replace(smoothness, **{parameter: getattr(smoothness, parameter) * factor})
    lengths = smoothness.lengths.copy()
    lengths[parameter] *= factor
    return replace(smoothness, lengths=lengths)


def noise_variances(
    covariance: Floats, y: Floats, start: Floats, *, base: float, times: int
) -> Floats:
    """Return the variance of each value's noise, n.

    It is larger if the others predict another value. `base` is its least.
    """
    noise = start
    for _ in range(times):
        fitted = covariance @ np.linalg.solve(covariance + np.diag(noise + JITTER), y)
        noise = np.maximum(base * (FREEDOM + (y - fitted) ** 2 / base) / (FREEDOM + 1), base)
    return noise


class Likelihood:
    """The likelihood of values by their smoothness. An axis whose length stays is kept."""

    def __init__(
        self, guess: Smoothness, axes: Sequence[LatticeAxis], y: Floats, shared: Floats
    ) -> None:
        """All are as in `likeliest`."""
        self._guess, self._axes, self._y, self._shared = guess, axes, y, shared
        self._lengths = np.full(len(axes), np.nan)
        # n x n for each axis: squared distances, and the kernel of that axis alone.
        self._parts = [(np.zeros(0), np.zeros(0)) for _ in axes]
        zeros = np.zeros((len(y), len(y)))
        self._joint, self._additive = _matern(zeros), zeros

    def log_of(self, tried: Smoothness) -> float:
        """Return the log likelihood with a smoothness, less its improbability.

        Far from the guess, a smoothness is improbable.
        """
        self._take_up(tried.lengths)
        guess, y = self._guess, self._y
        covariance = _weighted(tried, self._joint, self._additive) + self._shared
        base = tried.noise_sd**2
        # A value far off gets wider noise: otherwise one bad run would make every neighbourhood
        # rough.
        noise = noise_variances(covariance, y, np.full(len(y), base), base=base, times=2)
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

    def _take_up(self, lengths: Floats) -> None:
        changed = np.flatnonzero(lengths != self._lengths).tolist()
        if not changed:
            return
        for place in changed:
            kernel = _kernel_of(self._axes[place], lengths[place])
            pairs = np.ix_(kernel.steps, kernel.steps)
            self._parts[place] = kernel.squared[pairs], kernel.alone[pairs]
        squared, additive = map(np.add.reduce, zip(*self._parts, strict=True))
        self._lengths, self._joint, self._additive = lengths, _matern(squared), additive
