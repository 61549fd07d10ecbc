"""Finds runs that something slowed down: values of a Gaussian process that no neighbour explains.

A run now and then takes a multiple of what its layout takes: a pipeline that is broken between
nodes, a link that renegotiated its speed, somebody else's job. A first such value would otherwise
move every uncertain constant. Pure arithmetic (numpy).
"""

from __future__ import annotations

from math import log

import numpy as np

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.normal import normal_cdf

# One run in ten is slowed, by a factor e in the mean (an exponential distribution of the
# logarithm): cautious, since of published runs on 16 to 256 GPUs 3 to 30 % took more than twice as
# long as similar ones.
PROBABILITY, MEAN_EXCESS = 0.1, 1.0
# No run is surer to have been slowed than this.
SUREST = 0.999
ROUNDS = 6
# Rounds end when no probability changes by more; in most, no run is likelier to have been slowed.
SETTLED = 0.05
_LEAST_VARIANCE = 1e-9


def slowed_variances(covariance: Floats, y: Floats, noise: Floats, *, base: float) -> Floats:
    """Return the variance of each value's noise, larger the likelier the run was slowed.

    `covariance` and `y` (n x n and n) are those of the logarithms without noise, `noise` their
    variances if no run was slowed, `base` the variance of a repeat. Each value is compared with
    what the others predict: two slow values that explain each other are a slow machine.
    """
    found, believed = noise, np.zeros(len(y))
    for _ in range(ROUNDS):
        # All left out in turn from one inverse (Rasmussen and Williams 2006, eq. 5.12).
        inverse = np.linalg.inv(covariance + np.diag(found))
        alone = 1.0 / np.diag(inverse)
        variance = np.maximum(alone - found, _LEAST_VARIANCE)
        slowed = _probability_slowed((inverse @ y) * alone, variance + base)
        # So the value moves the prediction of its row by the probability that the run was not
        # slowed, times the share by which it would move it then. A slowed run shows nothing.
        found = (noise + slowed * variance) / (1.0 - slowed)
        if np.abs(slowed - believed).max() < SETTLED:
            break
        believed = slowed
    return found


def _probability_slowed(off: Floats, variance: Floats) -> Floats:
    """The probability that a run which took `off` longer, in the logarithm, was slowed.

    Otherwise the difference is normal; of a slowed run it is the sum of a normal and an exponential
    one.
    """
    sd, rate = np.sqrt(variance), 1.0 / MEAN_EXCESS
    as_usual = -0.5 * (off**2 / variance + np.log(2.0 * np.pi * variance))
    beyond = normal_cdf((off - rate * variance) / sd)
    as_slowed = (
        log(rate) + rate * (0.5 * rate * variance - off) + np.log(np.maximum(beyond, 1e-300))
    )
    odds = log(PROBABILITY / (1.0 - PROBABILITY)) + as_slowed - as_usual
    probability = 1.0 / (1.0 + np.exp(-np.clip(odds, -50.0, 50.0)))
    return np.minimum(probability, SUREST)
