"""Axes of a lattice, and what is believed of its rows before anything is known."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis


def test_nothing_is_believed_within_a_factor_of_twenty() -> None:
    """A level whose logarithm has a standard deviation of 3, the same for all rows."""
    found = Belief.nothing(3)
    assert found.mean.tolist() == [0.0] * 3
    assert (found.basis @ found.covariance @ found.basis.T).tolist() == [[9.0] * 3] * 3
    assert found.residual_sd is None


def test_an_axis_has_its_values_as_steps_and_each_step_a_place() -> None:
    sizes = LatticeAxis.of("size", [8.0, 1.0, 8.0, 2.0], doublings=True)
    assert (sizes.ordered, len(sizes)) == (True, 3)
    assert (sizes.steps.tolist(), sizes.places.tolist()) == ([2, 0, 2, 1], [0.0, 1.0, 3.0])
    linear = LatticeAxis.of("size", [8.0, 1.0])
    assert linear.places.tolist() == [1.0, 8.0]
    words = LatticeAxis.of_words("word", ["b", "a", "b"])
    assert (words.ordered, words.steps.tolist(), words.places.tolist()) == (
        False,
        [1, 0, 1],
        [0.0, 1.0],
    )
    both = Lattice(axes=(LatticeAxis.of("size", [1.0, 8.0, 1.0]), words))
    assert both.places.tolist() == [[1.0, 1.0], [8.0, 0.0], [1.0, 1.0]]
    assert both.ordered.tolist() == [True, False]


def test_a_lattice_without_axes_has_the_rows_of_its_prediction_or_one() -> None:
    assert len(Lattice(axes=())) == 1
    predicted = Lattice(axes=(), seconds=Belief.nothing(5))
    assert (len(predicted), predicted.places.shape) == (5, (5, 0))


def test_loadings_are_a_root_of_the_covariance_of_the_rows() -> None:
    covariance = np.array([[2.0, 0.5], [0.5, 1.0]])
    basis = np.array([[1.0, 0.0], [1.0, 2.0], [0.0, 3.0]])
    loadings = Belief(mean=np.zeros(3), basis=basis, covariance=covariance).loadings
    assert loadings @ loadings.T == pytest.approx(basis @ covariance @ basis.T)
