"""The kernel of the search by arithmetic, and what is learned of its lengths and sizes."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest

from orchestrator.core.search.lattice import Lattice, LatticeAxis
from orchestrator.core.search.smoothness import (
    FREEDOM,
    JITTER,
    NOISE_SD,
    Likelihood,
    Smoothness,
    kernels_of,
    likeliest,
    noise_variances,
    residual_covariance,
)

SIZES = LatticeAxis.of("size", [0.0, 3.0, 6.0])
WORDS = LatticeAxis.of_words("kernel", ["a", "b", "a"])
BOTH = Smoothness(lengths=np.array([3.0, 1.0]), joint_sd=0.5, additive_sd=0.3, noise_sd=0.1)


def matern(distance: float) -> float:
    """Matern 5/2: (1 + r + r² / 3) e^-r with r = sqrt(5) d."""
    r = sqrt(5.0) * distance
    return (1 + r + r * r / 3) * exp(-r)


def test_rows_are_alike_by_their_distance_on_all_axes_and_on_each() -> None:
    rows = np.arange(3)
    found = residual_covariance(kernels_of((SIZES, WORDS), BOTH), BOTH, rows, None)
    # Row 1 is one length from row 0 and has another word; row 2 is two lengths away.
    expected = 0.25 * matern(sqrt(1 + 1)) + 0.09 / 2 * (matern(1) + matern(1))
    assert found[0, 1] == pytest.approx(expected)
    assert found[0, 2] == pytest.approx(0.25 * matern(2) + 0.09 / 2 * (matern(2) + 1))
    assert np.diag(found) == pytest.approx(0.25 + 0.09)
    some = residual_covariance(
        kernels_of((SIZES, WORDS), BOTH), BOTH, np.array([2]), np.array([0, 1])
    )
    assert some.tolist() == [[found[2, 0], found[2, 1]]]


def test_without_axes_all_rows_are_one() -> None:
    alone = Smoothness(lengths=np.zeros(0), joint_sd=0.5, additive_sd=0.3, noise_sd=0.1)
    found = residual_covariance((), alone, np.array([0]), None)
    assert found.tolist() == [[0.25]]


def test_a_guess_is_three_doublings_or_a_quarter_of_the_axis() -> None:
    long = LatticeAxis.of("long", [0.0, 20.0, 4.0])
    found = Smoothness.guess(Lattice(axes=(SIZES, long, WORDS)), residual_sd=None)
    assert found.lengths.tolist() == [3.0, 5.0, 1.0]
    assert (found.joint_sd, found.additive_sd, found.noise_sd) == (0.5, 0.5, 0.04)
    told = Smoothness.guess(Lattice(axes=(SIZES,)), residual_sd=0.2)
    assert (told.joint_sd, told.additive_sd) == (0.2, 0.2)
    assert len(Smoothness.guess(Lattice(axes=()), residual_sd=None).lengths) == 0


def test_a_value_that_others_contradict_has_more_noise() -> None:
    """(4 + (y - fit)² / base) / 5 of the base, and no less than it."""
    covariance, base = np.array([[1.0]]), 0.01
    y = np.array([10.0])
    fitted = 10.0 / (1.0 + 0.04 + 1e-8)
    found = noise_variances(covariance, y, np.array([0.04]), base=base, times=1)
    assert found[0] == pytest.approx(base * (4 + (10.0 - fitted) ** 2 / base) / 5)
    again = 10.0 / (1.0 + found[0] + 1e-8)
    twice = noise_variances(covariance, y, np.array([0.04]), base=base, times=2)
    assert twice[0] == pytest.approx(base * (4 + (10.0 - again) ** 2 / base) / 5)
    near = noise_variances(covariance, np.zeros(1), np.array([0.04]), base=base, times=1)
    assert near[0] == base


def drawn(length: float, *, seed: int = 0) -> tuple[tuple[LatticeAxis, ...], np.ndarray]:
    axis = LatticeAxis.of("size", np.linspace(0.0, 12.0, 40).tolist())
    true = Smoothness(lengths=np.array([length]), joint_sd=0.4, additive_sd=0.01, noise_sd=0.02)
    rows = np.arange(40)
    covariance = residual_covariance(kernels_of((axis,), true), true, rows, rows)
    lower = np.linalg.cholesky(covariance + 1e-6 * np.eye(40))
    return (axis,), lower @ np.random.default_rng(seed).standard_normal(40)


@pytest.mark.parametrize(("length", "longer"), [(0.6, False), (9.0, True)])
def test_values_teach_how_far_they_reach(length: float, longer: bool) -> None:
    axes, y = drawn(length)
    guess = Smoothness(lengths=np.array([3.0]), joint_sd=0.4, additive_sd=0.05, noise_sd=NOISE_SD)
    found = likeliest(guess, guess, axes, y, np.zeros((40, 40)))
    assert bool(found.lengths[0] > 3.0) is longer
    assert found.lengths[0] != 3.0
    # Never so far from the guess that the prior on lengths forbids it.
    assert abs(log(found.lengths[0] / 3.0)) < 4 * 0.4


def test_larger_values_teach_larger_parts_and_noise() -> None:
    axes, y = drawn(3.0)
    guess = Smoothness(lengths=np.array([3.0]), joint_sd=0.4, additive_sd=0.05, noise_sd=0.02)
    shared = np.zeros((40, 40))
    usual, large = (likeliest(guess, guess, axes, values, shared) for values in (y, 4 * y))
    assert large.joint_sd > 1.5 * usual.joint_sd
    rng = np.random.default_rng(1)
    noisy = likeliest(guess, guess, axes, y + 0.2 * rng.standard_normal(40), shared)
    assert noisy.noise_sd > 1.5 * usual.noise_sd
    # What is shared by all explains a level: it need not be in the parts.
    level = likeliest(guess, guess, axes, y + 3.0, np.full((40, 40), 9.0))
    assert level.joint_sd < 1.5 * usual.joint_sd
    assert replace(level, lengths=usual.lengths) != guess


def test_the_likelihood_is_that_of_a_normal_value_less_what_parts_from_the_guess() -> None:
    """One value y of variance v: -y² / 2v - log(v) / 2, and a normal prior on each logarithm."""
    guess = Smoothness(lengths=np.array([3.0]), joint_sd=0.4, additive_sd=0.3, noise_sd=0.2)
    axes, y, shared = (LatticeAxis.of("size", [0.0]),), np.array([0.1]), np.array([[0.05]])

    def variance(of: Smoothness) -> float:
        # A value that the others do not contradict keeps the base's noise.
        return of.joint_sd**2 + of.additive_sd**2 + 0.05 + of.noise_sd**2 + 1e-8

    def expected(of: Smoothness, prior: float) -> float:
        v = variance(of)
        return -(0.1**2) / (2 * v) - log(v) / 2 - prior

    likelihood = Likelihood(guess, axes, y, shared)
    assert likelihood.log_of(guess) == pytest.approx(expected(guess, 0.0))
    for name, sd in (("joint_sd", 0.5), ("additive_sd", 0.5), ("noise_sd", 0.7)):
        tried = replace(guess, **{name: getattr(guess, name) * 1.5})
        found = likelihood.log_of(tried)
        assert found == pytest.approx(expected(tried, log(1.5) ** 2 / (2 * sd**2)))
    longer = replace(guess, lengths=np.array([3.0 * 1.5]))
    prior = log(1.5) ** 2 / (2 * 0.4**2)
    assert likelihood.log_of(longer) == pytest.approx(expected(longer, prior))


def test_a_likelihood_is_the_same_whatever_was_tried_before() -> None:
    y, shared = np.array([0.3, -0.2, 0.1]), np.full((3, 3), 0.01)
    kept = Likelihood(BOTH, (SIZES, WORDS), y, shared)
    longer = replace(BOTH, lengths=np.array([6.0, 1.0]))
    other = replace(BOTH, lengths=np.array([6.0, 2.0]))
    louder = replace(other, noise_sd=0.4)
    found = [kept.log_of(one) for one in (BOTH, longer, other, louder, BOTH)]
    assert len(set(found)) == 4
    assert found == [
        Likelihood(BOTH, (SIZES, WORDS), y, shared).log_of(one)
        for one in (BOTH, longer, other, louder, BOTH)
    ]


def test_without_values_the_guess_is_likeliest() -> None:
    guess = Smoothness(lengths=np.array([3.0]), joint_sd=0.4, additive_sd=0.3, noise_sd=0.2)
    for factor in (1.65, 1 / 1.65):
        far = Smoothness(
            lengths=guess.lengths * factor,
            joint_sd=0.4 * factor,
            additive_sd=0.3 * factor,
            noise_sd=0.2 * factor,
        )
        nothing = np.zeros((0, 0))
        empty = LatticeAxis(
            name="size", ordered=True, steps=np.zeros(0, dtype=np.int64), places=SIZES.places
        )
        found = likeliest(far, guess, (empty,), np.zeros(0), nothing)
        assert found.lengths == pytest.approx(guess.lengths)
        assert (found.joint_sd, found.additive_sd, found.noise_sd) == pytest.approx((0.4, 0.3, 0.2))


def test_noise_is_wider_where_the_other_values_predict_another_one() -> None:
    """One value alone: its fit is k / (k + noise) of it, and noise follows a t distribution."""
    covariance, y, base = np.array([[0.09]]), np.array([0.5]), 0.01
    found = noise_variances(covariance, y, np.array([base]), base=base, times=1)
    off = 0.5 - 0.09 / (0.09 + 0.01 + JITTER) * 0.5
    wanted = base * (FREEDOM + off**2 / base) / (FREEDOM + 1)
    assert found == pytest.approx([max(wanted, base)])
    # A value of 3.0 is off by 0.3, three times its noise.
    far = noise_variances(covariance, np.array([3.0]), np.array([base]), base=base, times=1)
    off = 3.0 * (1 - 0.09 / (0.1 + JITTER))
    assert far == pytest.approx([base * (FREEDOM + off**2 / base) / (FREEDOM + 1)])
    assert far[0] > base
