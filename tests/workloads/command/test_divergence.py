"""Losses and gradient norms that are not finite."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.command.divergence import Divergence

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("loss", [NAN, INFINITY, "nan", "-Infinity", 10**400])
def test_a_loss_that_is_not_finite_counts_at_once(loss: Any) -> None:
    divergence = Divergence()
    divergence.note(loss=2.5, norm=None, step=1)
    divergence.note(loss=loss, norm=None, step=2)
    assert divergence.found is not None
    assert "step 2" in str(divergence.found)


@pytest.mark.parametrize("loss", [None, 2.5, "low", True, [1]])
def test_what_is_no_number_is_no_divergence(loss: Any) -> None:
    divergence = Divergence()
    divergence.note(loss=loss, norm=None, step=1)
    assert not divergence.is_possible


def test_a_single_norm_that_overflows_is_no_divergence_but_the_last_one_is() -> None:
    divergence = Divergence()
    divergence.note(loss=None, norm=INFINITY, step=1)
    assert divergence.is_possible
    divergence.note(loss=None, norm=1.5, step=2)
    divergence.judge_norm()
    assert divergence.found is None
    divergence.note(loss=None, norm=INFINITY, step=3)
    divergence.judge_norm()
    assert "gradient norm" in str(divergence.found)
