"""The cumulative standard normal distribution, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.arrays import Floats


def normal_cdf(z: NDArray[np.floating[Any]]) -> Floats:
    """Abramowitz and Stegun 26.2.17, absolute error below 8e-8."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    series = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / np.sqrt(2 * np.pi) * series
    values: Floats = np.where(z >= 0, 1.0 - tail, tail)
    return values
