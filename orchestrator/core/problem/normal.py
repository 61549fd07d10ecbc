"""The cumulative standard normal distribution, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def normal_cdf(z: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Abramowitz and Stegun 26.2.17, absolute error below 8e-8."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    series = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / np.sqrt(2 * np.pi) * series
    values: NDArray[np.float64] = np.where(z >= 0, 1.0 - tail, tail)
    return values
