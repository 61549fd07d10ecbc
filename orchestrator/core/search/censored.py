"""Turns bounds into data of a Gaussian process: "at least" and "at most" as values with noise.

Expectation propagation (Rasmussen and Williams 2006, section 3.6): each bound becomes the Gaussian
value that changes the process most nearly as the bound would. A bound that was expected changes
little, one that contradicts moves the process at once. Pure arithmetic (numpy).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.normal import normal_cdf

# Precisions below this are none: a value of noise 100.
FAINT = 1e-4
# Damps each update, so that bounds which share a cause do not overshoot.
DAMPING = 0.7


@dataclass(frozen=True, kw_only=True, eq=False)
class Sites:
    """The Gaussian values of n bounds: precisions, and means times precisions, n each."""

    precision: Floats
    shift: Floats

    @classmethod
    def nothing(cls, num: int) -> Sites:
        """Return sites that say nothing yet: their precisions are 0."""
        return cls(precision=np.zeros(num), shift=np.zeros(num))

    @property
    def mean(self) -> Floats:
        """The mean of each site; only where its precision is not 0."""
        found: Floats = self.shift / np.maximum(self.precision, FAINT)
        return found

    @property
    def variance(self) -> Floats:
        """The variance of each site."""
        found: Floats = 1.0 / np.maximum(self.precision, FAINT)
        return found


def propagated(
    sites: Sites,
    *,
    mean: Floats,
    covariance: Floats,
    limits: Floats,
    sides: Floats,
    softness: float,
    times: int,
) -> Sites:
    """Return the sites of n bounds on jointly Gaussian values, updated so many `times`.

    `mean` (n) and `covariance` (n x n) are those of the values without the bounds; a side of 1 is
    "at least", -1 "at most"; `softness` is the standard deviation of where a limit lies.
    Expectation propagation (Rasmussen and Williams 2006, section 3.6).
    """
    precision, shift = sites.precision.copy(), sites.shift.copy()
    for _ in range(times):
        root = np.sqrt(precision)
        inner = np.eye(len(mean)) + root[:, None] * covariance * root
        half = np.linalg.solve(inner, root[:, None] * covariance)
        posterior = covariance - (covariance * root) @ half
        centre = mean - (covariance * root) @ np.linalg.solve(inner, root * mean)
        centre = centre + posterior @ shift
        variance = np.maximum(np.diag(posterior), 1e-10)
        alone = np.maximum(1.0 / variance - precision, 1e-6)
        new_precision, new_shift = matched(
            mean=(centre / variance - shift) / alone,
            variance=1.0 / alone,
            limits=limits,
            sides=sides,
            softness=softness,
        )
        precision += DAMPING * (new_precision - precision)
        shift += DAMPING * (new_shift - shift)
    return Sites(precision=precision, shift=shift)


def matched(
    *, mean: Floats, variance: Floats, limits: Floats, sides: Floats, softness: float
) -> tuple[Floats, Floats]:
    """Return precision, and mean times precision, of each bound's site.

    Each bound is on a Gaussian value that is known apart from it, by `mean` and `variance`. The
    site gives that value the mean and the variance that it has if the bound holds.
    """
    total = variance + softness**2
    z = sides * (mean - limits) / np.sqrt(total)
    # The ratio of density and probability: -z far below the limit, where both vanish.
    low = np.maximum(z, -6.0)
    density = np.exp(-0.5 * np.minimum(low * low, 1400.0)) / np.sqrt(2 * np.pi)
    ratio = density / np.maximum(normal_cdf(low), 1e-12)
    ratio = np.where(z < -6.0, -z + 1.0 / np.maximum(-z, 6.0), ratio)
    moved = mean + sides * variance * ratio / np.sqrt(total)
    shrunk = variance * (1.0 - np.clip(variance * ratio * (z + ratio) / total, 0.0, 1.0 - 1e-6))
    precision = np.maximum(1.0 / shrunk - 1.0 / variance, 0.0)
    # A site without precision has no shift.
    shift = np.where(precision > 0, moved / shrunk - mean / variance, 0.0)
    return precision, shift
