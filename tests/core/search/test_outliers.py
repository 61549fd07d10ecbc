"""Runs that something slowed: compared with the mixture integrated over every excess."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.search.outliers import slowed_variances

BASE = 0.04**2
# One run in ten is slowed, by a factor e in the mean.
PROBABILITY, MEAN_EXCESS = 0.1, 1.0


def variances(covariance: list[list[float]], y: list[float]) -> np.ndarray:
    noise = np.full(len(y), BASE)
    return slowed_variances(np.array(covariance), np.array(y), noise, base=BASE)


@pytest.mark.parametrize("off", [-0.5, 0.0, 0.4, 0.8, 1.2, 3.0])
def test_one_value_is_as_likely_slowed_as_an_integral_over_all_excesses_says(off: float) -> None:
    prior = 0.1
    variance = prior + BASE
    excess, width = np.linspace(0.0, 20.0, 400_001, retstep=True)

    def density(difference: np.ndarray | float) -> np.ndarray:
        return np.exp(-0.5 * np.square(difference) / variance) / np.sqrt(2 * np.pi * variance)

    of_slowed = np.exp(-excess / MEAN_EXCESS) / MEAN_EXCESS * density(off - excess)
    slowed = PROBABILITY * float(of_slowed.sum() * width)
    share = slowed / (slowed + (1 - PROBABILITY) * float(density(off)))
    (found,) = variances([[prior]], [off])
    moves, moves_if_usual = prior / (prior + float(found)), prior / (prior + BASE)
    assert moves == pytest.approx((1 - share) * moves_if_usual, rel=0.01, abs=0.002)


def test_a_slow_value_moves_nothing_and_a_fast_one_is_believed() -> None:
    (slow,), (fast,) = variances([[0.1]], [1.2]), variances([[0.1]], [-1.2])
    assert 0.1 / (0.1 + slow) < 0.05
    assert 0.1 / (0.1 + fast) > 0.95


def test_slow_values_that_explain_each_other_are_a_slow_machine() -> None:
    shared = [[0.3, 0.29, 0.29], [0.29, 0.3, 0.29], [0.29, 0.29, 0.3]]
    assert max(variances(shared, [1.2, 1.25, 1.15])) < 2 * BASE
    apart = variances(shared, [1.2, 0.1, 0.05])
    assert apart[0] > 1000 * BASE and max(apart[1:]) < 2 * BASE


def test_far_off_everything_numbers_stay_finite() -> None:
    found = variances([[0.1, 0.0], [0.0, 0.1]], [60.0, -60.0])
    assert np.isfinite(found).all() and (found >= BASE * (1 - 1e-9)).all()
