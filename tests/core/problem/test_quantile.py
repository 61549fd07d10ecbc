"""Quantiles of the standard normal distribution."""

from __future__ import annotations

from statistics import NormalDist

import pytest

from orchestrator.core.problem.quantile import Z90


def test_nine_tenths_lie_below() -> None:
    assert NormalDist().cdf(Z90) == pytest.approx(0.9, abs=1e-5)
