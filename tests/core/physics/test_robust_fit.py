"""Robust fitting: good residuals decide, bad ones are left standing."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.physics.robust_fit import fit, robust_sd
from orchestrator.core.problem.arrays import Floats

X = np.linspace(-1, 1, 40)
NOISE_SD = 0.05


def line(parameters: Floats) -> Floats:
    found: Floats = parameters[0] + parameters[1] * X
    return found


def measured(*, bad: int = 0) -> Floats:
    values = line(np.array([1.0, 2.0])) + np.random.default_rng(0).normal(0, NOISE_SD, len(X))
    values[:bad] += 5.0
    return values


def fitted(values: Floats, *, prior_sd: float = 10.0, weight: float = 1.0) -> tuple[Floats, Floats]:
    found = fit(
        lambda parameters: (line(parameters) - values) / NOISE_SD,
        mean=np.zeros(2),
        covariance=np.eye(2) * prior_sd**2,
        weights=np.full(len(X), weight),
    )
    return found.parameters, found.covariance


def test_a_line_is_found_within_its_own_uncertainty() -> None:
    parameters, covariance = fitted(measured())
    assert np.abs(parameters - [1.0, 2.0]) == pytest.approx(
        0, abs=4 * float(np.sqrt(covariance.diagonal().max()))
    )


def test_a_quarter_of_plainly_bad_values_does_not_move_it() -> None:
    assert fitted(measured(bad=10))[0] == pytest.approx([1.0, 2.0], abs=0.08)


def test_a_strong_prior_holds_against_few_values() -> None:
    assert np.abs(fitted(measured(), prior_sd=1e-4)[0]).max() < 0.01


def test_values_that_count_less_leave_more_uncertainty() -> None:
    assert (
        fitted(measured(), weight=0.1)[1].diagonal().min()
        > 5 * fitted(measured())[1].diagonal().max() / 3
    )


def test_a_fit_that_begins_where_another_ended_finds_the_same_in_fewer_steps() -> None:
    values, calls = measured(bad=10), list[Floats]()

    def found(begin: Floats | None) -> tuple[Floats, int]:
        def residuals(parameters: Floats) -> Floats:
            calls.append(parameters)
            return (line(parameters) - values) / NOISE_SD

        calls.clear()
        ended = fit(
            residuals,
            mean=np.zeros(2),
            covariance=np.eye(2) * 100,
            weights=np.ones(len(X)),
            begin=begin,
        )
        return ended.parameters, len(calls)

    parameters, cold = found(None)
    begun, warm = found(parameters + 0.001)
    assert begun == pytest.approx(parameters, abs=1e-3)
    assert warm < cold / 2
    again, from_worse = found(np.array([-50.0, 90.0]))
    assert again == pytest.approx(parameters, abs=1e-12)
    assert from_worse == cold + 1, "that place was only looked at"


def test_the_spread_of_residuals_ignores_the_bad_ones() -> None:
    residuals = np.random.default_rng(1).normal(0, 0.2, 200)
    residuals[:20] = 9.0
    assert robust_sd(residuals, expected=0.2, prior_count=5, count=200) == pytest.approx(
        0.2, rel=0.25
    )
    assert robust_sd(np.zeros(0), expected=0.2, prior_count=5, count=0) == 0.2
