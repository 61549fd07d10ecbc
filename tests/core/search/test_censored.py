"""Bounds as Gaussian values: compared with exact moments of truncated Gaussians."""

from __future__ import annotations

from math import erf
from typing import Any

import numpy as np
import pytest

from orchestrator.core.search.censored import Sites, matched, propagated


@pytest.mark.parametrize("limit", [-2.0, -0.5, 0.0, 0.7, 2.0])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_one_bound_gives_the_moments_of_a_truncated_gaussian(limit: float, side: float) -> None:
    # By numeric integration of a Gaussian times the probability that the bound holds.
    softness, values = 0.2, np.linspace(-8.0, 8.0, 20_001)
    holds = np.array([0.5 * (1 + erf(side * (v - limit) / softness / 2**0.5)) for v in values])
    density = np.exp(-0.5 * values**2) * holds
    density /= density.sum()
    mean = float(density @ values)
    variance = float(density @ (values - mean) ** 2)
    precision, shift = matched(
        mean=np.zeros(1),
        variance=np.ones(1),
        limits=np.array([limit]),
        sides=np.array([side]),
        softness=softness,
    )
    assert float(shift[0] / (1.0 + precision[0])) == pytest.approx(mean, abs=0.001)
    assert float(1.0 / (1.0 + precision[0])) == pytest.approx(variance, abs=0.001)


def test_far_beyond_its_limit_a_value_is_moved_to_it_and_numbers_stay_finite() -> None:
    precision, shift = matched(
        mean=np.array([-40.0]),
        variance=np.ones(1),
        limits=np.zeros(1),
        sides=np.ones(1),
        softness=0.05,
    )
    moved = (-40.0 + shift[0]) / (1.0 + precision[0])
    assert abs(float(moved)) < 0.2


@pytest.mark.parametrize("limit", [6.5, 9.0])
def test_far_below_its_limit_a_value_is_moved_as_a_truncated_gaussian_is(limit: float) -> None:
    """Where density and probability both vanish, their ratio is a series of two terms."""
    values = np.linspace(limit, limit + 4.0, 200_001)
    density = np.exp(-0.5 * (values**2 - limit**2))
    density /= density.sum()
    precision, shift = matched(
        mean=np.zeros(1),
        variance=np.ones(1),
        limits=np.array([limit]),
        sides=np.ones(1),
        softness=1e-6,
    )
    # The series errs by two thirds of a percent of its second term here; 0.15 of the mean.
    assert float(shift[0] / (1.0 + precision[0])) == pytest.approx(
        float(density @ values), abs=0.01
    )


def test_two_bounds_on_one_cause_agree_with_a_grid() -> None:
    # One level of sd 1 under two values with noise 0.1: one is at least 1, the other at most 1.5.
    level = np.linspace(-5.0, 5.0, 100_001)
    phi = np.vectorize(lambda z: 0.5 * (1 + erf(z / np.sqrt(2))))
    spread = np.hypot(0.1, 0.05)
    density = np.exp(-0.5 * level**2) * phi((level - 1) / spread) * phi((1.5 - level) / spread)
    expected = float(density @ level / density.sum())
    covariance = np.ones((2, 2)) + 0.01 * np.eye(2)
    sites = propagated(
        Sites.nothing(2),
        mean=np.zeros(2),
        covariance=covariance,
        limits=np.array([1.0, 1.5]),
        sides=np.array([1.0, -1.0]),
        softness=0.05,
        times=20,
    )
    gain = np.ones(2) @ np.linalg.inv(covariance + np.diag(sites.variance))
    assert float(gain @ sites.mean) == pytest.approx(expected, abs=0.05)


def test_a_bound_that_tells_nothing_has_no_precision_and_no_shift() -> None:
    precision, shift = matched(
        mean=np.array([100.0]),
        variance=np.ones(1),
        limits=np.zeros(1),
        sides=np.ones(1),
        softness=0.05,
    )
    assert (precision.tolist(), shift.tolist()) == ([0.0], [0.0])


def test_a_site_has_the_variance_of_its_precision_and_none_is_wider_than_100() -> None:
    sites = Sites(precision=np.array([4.0, 1e-4, 0.0]), shift=np.array([2.0, 1e-4, 0.0]))
    assert sites.variance == pytest.approx(np.array([0.25, 1e4, 1e4]))
    assert sites.mean == pytest.approx(np.array([0.5, 1.0, 0.0]))


def test_a_first_update_goes_seven_tenths_of_the_way() -> None:
    bound: dict[str, Any] = {"limits": np.array([1.0]), "sides": np.ones(1), "softness": 0.2}
    precision, shift = matched(mean=np.array([0.3]), variance=np.array([2.0]), **bound)
    nothing, covariance = Sites.nothing(1), np.array([[2.0]])
    found = propagated(nothing, mean=np.array([0.3]), covariance=covariance, times=1, **bound)
    assert found.precision == pytest.approx(0.7 * precision)
    assert found.shift == pytest.approx(0.7 * shift)


@pytest.mark.parametrize("off", [-3.0, 0.7])
def test_only_the_distance_to_the_limit_counts(off: float) -> None:
    def moved(off: float) -> Sites:
        return propagated(
            Sites.nothing(2),
            mean=np.array([0.2, -0.1]) + off,
            covariance=np.array([[1.0, 0.6], [0.6, 1.2]]),
            limits=np.array([1.0, -0.5]) + off,
            sides=np.array([1.0, -1.0]),
            softness=0.1,
            times=4,
        )

    assert moved(off).precision == pytest.approx(moved(0.0).precision)
    assert moved(off).mean == pytest.approx(moved(0.0).mean + off)
