"""Fronts, the volumes that they dominate, and the space that they leave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.hypervolume import free_boxes, hypervolume, on_front


def points(*rows: tuple[float, ...]) -> Floats:
    return np.array(rows, dtype=np.float64)


def some_points(num_dimensions: int) -> st.SearchStrategy[Floats]:
    # Few distinct values, so that ties are frequent.
    number = st.integers(0, 6).map(float)
    row = st.tuples(*[number] * num_dimensions)
    return st.lists(row, min_size=1, max_size=9).map(lambda rows: points(*rows))


any_points = st.integers(1, 3).flatmap(some_points)


def test_a_front_has_what_nothing_else_beats_in_every_dimension() -> None:
    found = on_front(points((3, 1), (1, 3), (2, 2), (2, 1), (1, 1)))
    assert found.tolist() == [True, True, True, False, False]


def test_equal_points_do_not_dominate_each_other() -> None:
    assert on_front(points((1, 2), (1, 2), (1, 1))).tolist() == [True, True, False]


def test_the_volume_of_two_dimensions_is_the_area_of_a_staircase() -> None:
    assert hypervolume(points((3, 1), (1, 3), (2, 2))) == pytest.approx(3 + 2 + 1)


def test_no_points_dominate_nothing() -> None:
    assert hypervolume(np.empty((0, 2))) == 0.0
    assert hypervolume(points((0, 5), (5, 0))) == 0.0


@given(any_points)
def test_the_volume_counts_the_cells_of_a_grid(some: Floats) -> None:
    # All coordinates are whole numbers, so the volume is a number of unit cells.
    grid = np.stack(np.meshgrid(*[np.arange(6) + 0.5] * some.shape[1]), axis=-1)
    cells = grid.reshape(-1, some.shape[1])
    dominated = (some[None] >= cells[:, None]).all(axis=2).any(axis=1)
    assert hypervolume(some) == pytest.approx(dominated.sum())


@given(any_points)
def test_nothing_on_the_front_is_dominated_and_all_else_is(some: Floats) -> None:
    front = on_front(some)
    for row, point in enumerate(some):
        better = (some >= point).all(axis=1) & (some > point).any(axis=1)
        assert front[row] == (not better.any())


@given(st.integers(1, 3).flatmap(lambda num: st.tuples(some_points(num), some_points(num))))
def test_what_a_point_adds_is_its_part_of_the_free_boxes(both: tuple[Floats, Floats]) -> None:
    some, new = both[0], both[1][:1]
    boxes = free_boxes(some)
    sides = np.minimum(boxes.upper, new) - np.minimum(boxes.lower, new)
    gained = hypervolume(np.vstack([some, new])) - hypervolume(some)
    assert sides.prod(axis=1).sum() == pytest.approx(gained)
