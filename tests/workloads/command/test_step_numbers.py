"""How fast the numbers in lines rise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from workloads.command.step_numbers import StepNumbers


def per_line(numbers: Iterable[Any], *, accumulated: int = 1) -> float | None:
    found = StepNumbers(grad_accum_steps=accumulated)
    for line, number in enumerate(numbers, start=1):
        found.note(line, number)
    return found.per_line


@pytest.mark.parametrize(
    ("numbers", "rise"),
    [
        (range(53), 1.0),
        (range(10, 540, 10), 10.0),
        ([1.0, 2.0, 3.0], 1.0),
        ([1, 1, 1, 1, 2, 2, 2, 2, 3], 0.25),
        ([7], None),
        ([None, "3", True, float("nan"), [2]], None),
        ([1, None, None, 4], 1.0),
    ],
)
def test_they_rise_from_the_first_to_the_last(numbers: Iterable[Any], rise: float | None) -> None:
    assert per_line(numbers) == (rise if rise is None else pytest.approx(rise))


@pytest.mark.parametrize("first", [0, 1, 20])
def test_a_counter_of_the_steps_in_an_epoch_goes_on(first: int) -> None:
    epoch = [*range(1, 41)]
    assert per_line([*range(first, 41), *epoch, *epoch, 1, 2]) == pytest.approx(1.0)


def test_a_counter_of_micro_batches_does_not() -> None:
    assert per_line([*range(8)] * 6, accumulated=8) == pytest.approx(7 / 47)
    assert per_line([0, 1] * 20, accumulated=1) == pytest.approx(1 / 39)


def test_a_number_in_the_middle_is_no_new_epoch() -> None:
    assert per_line([*range(1, 21), 15, 16]) == pytest.approx(15 / 21)
