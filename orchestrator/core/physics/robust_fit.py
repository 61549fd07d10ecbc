"""Robust fitting: the most probable parameters, given normal priors and measurements.

Residuals are Cauchy, not normal, since some measurements are plainly bad: one run that was
disturbed must not move a model that a hundred others agree with. Numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from orchestrator.core.problem.arrays import Floats

MAX_STEPS = 40
# Step of a parameter in a numerical derivative. Parameters are logarithms and shares, of order 1.
DIFFERENCE = 1e-4
# The fit ends with the first step that lowers the cost by a smaller share than this. Further steps
# would change the parameters by far less than their uncertainty.
ENOUGH = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The parameters of a fit, and how well they are known."""

    parameters: Floats
    # Laplace: the inverse of the curvature at the optimum.
    covariance: Floats
    # At the optimum, as the model gave them.
    residuals: Floats


def fit(
    residuals_of: Callable[[Floats], Floats],
    *,
    mean: Floats,
    covariance: Floats,
    weights: Floats,
    slopes_of: Callable[[Floats, Floats], Floats] | None = None,
    begin: Floats | None = None,
) -> Fit:
    """Fit parameters x to residuals r(x), by damped Gauss-Newton steps.

    They minimise sum(weights log(1 + r^2)) + (x - mean) covariance^-1 (x - mean). `residuals_of`
    gives residuals in units of their standard deviation; `weights` is how many independent ones
    each counts as. `slopes_of` gives their derivatives from parameters and residuals; None: by
    differences. `begin`: where to begin, if it is more probable than the mean; next to the optimum
    a few steps do.
    """
    slopes_at = slopes_of or (lambda x, at: jacobian(residuals_of, x, at))
    precision = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
    starts = [(x, residuals_of(x)) for x in (mean, begin) if x is not None]
    cost, x, residuals = min(
        ((_cost(at, weights, x - mean, precision), x, at) for x, at in starts),
        key=lambda start: start[0],
    )
    damping = 1e-3
    assert np.isfinite(cost), "a measurement or a prior is not a finite number"
    for _ in range(MAX_STEPS):
        slopes = slopes_at(x, residuals)
        pull = weights / (1.0 + residuals**2)
        curvature = slopes.T @ (slopes * pull[:, None]) + precision
        gradient = slopes.T @ (pull * residuals) + precision @ (x - mean)
        gained = False
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            tried = residuals_of(x - step)
            new_cost = _cost(tried, weights, x - step - mean, precision)
            if new_cost < cost:
                gained = cost - new_cost > ENOUGH * (cost + 1e-12)
                x, residuals, cost, damping = x - step, tried, new_cost, max(damping / 5, 1e-9)
                break
            damping *= 5
        if not gained:
            # So small a gain bounds the last step, in standard deviations: the slopes at its
            # beginning are those at its end.
            break
    else:
        slopes = slopes_at(x, residuals)
    trust = 1.0 / (1.0 + residuals**2)
    curvature = slopes.T @ (slopes * (weights * trust)[:, None]) + precision
    covariance = np.asarray(np.linalg.inv(curvature), dtype=np.float64)
    return Fit(parameters=x, covariance=covariance, residuals=residuals)


def jacobian(function: Callable[[Floats], Floats], x: Floats, at: Floats) -> Floats:
    """Return the derivatives of a vector function by forward differences, n x parameters.

    `at` is its value at x, n.
    """
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += DIFFERENCE
        columns.append((function(moved) - at) / DIFFERENCE)
    return np.stack(columns, axis=1) if columns else np.zeros((len(at), 0))


def robust_sd(residuals: Floats, *, expected: float, prior_count: float, count: float) -> float:
    """Return the standard deviation of the good residuals, by the median of their sizes.

    `expected` counts as `prior_count` residuals, these as `count`.
    """
    if not len(residuals):
        return expected
    found = 1.4826 * float(np.median(np.abs(residuals)))
    total = prior_count * expected**2 + count * found**2
    return float(np.sqrt(total / (prior_count + count)))


def _cost(residuals: Floats, weights: Floats, moved: Floats, precision: Floats) -> float:
    return float((weights * np.log1p(residuals**2)).sum() + moved @ precision @ moved)
