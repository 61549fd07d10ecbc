"""The cumulative standard normal distribution."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from orchestrator.core.problem.normal import normal_cdf


def test_it_is_as_near_to_the_true_distribution_as_its_source_says() -> None:
    z = np.linspace(-40.0, 40.0, 8001)
    exact = np.array([NormalDist().cdf(one) for one in z])
    assert np.abs(normal_cdf(z) - exact).max() < 8e-8
