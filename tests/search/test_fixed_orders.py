"""A sampler that learns nothing takes the first open row of its order."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.search.fixed_orders import FixedOrder

ORDER = np.array([3, 0, 2, 1])


def open_rows(*rows: int) -> np.ndarray:
    found = np.zeros(len(ORDER), dtype=bool)
    found[list(rows)] = True
    return found


@pytest.mark.parametrize(
    ("rows", "expected"), [((0, 1, 2, 3), 3), ((0, 1, 2), 0), ((1, 2), 2), ((1,), 1)]
)
def test_the_first_open_row_of_the_order_is_chosen(rows: tuple[int, ...], expected: int) -> None:
    assert FixedOrder(ORDER).choose(open_rows(*rows))[0] == expected


def test_a_row_that_is_open_again_is_chosen_again() -> None:
    sampler = FixedOrder(ORDER)
    assert [sampler.choose(open_rows(*rows))[0] for rows in ((0, 1, 3), (0, 1), (0, 1, 3))] == [
        3,
        0,
        3,
    ]


def test_only_an_order_of_chance_says_so_with_the_number_of_open_rows() -> None:
    assert FixedOrder(ORDER).choose(open_rows(0, 2))[1] == ""
    by_chance = FixedOrder(ORDER, is_random=True).choose(open_rows(0, 2))
    assert by_chance == (0, "random among 2 untried")
