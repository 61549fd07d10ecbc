"""Long steps at a regular distance, as of a clock that waits for the device only then."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.core.trial.step_period import are_uneven, period_of


def steps(
    num: int, every: int, *, long: float, usual: float = 0.01, phase: int = -1
) -> list[float]:
    """Steps of which each `every`-th is long, with 5 % of noise."""
    random = Random(num + every)
    return [
        (long if (number - phase) % every == 0 else usual) * random.uniform(0.96, 1.04)
        for number in range(num)
    ]


@pytest.mark.parametrize("every", [3, 5, 10, 16, 20, 26])
def test_a_clock_that_waits_for_the_device_at_each_nth_step_is_found(every: int) -> None:
    found = period_of(steps(53, every, long=0.2 * every))
    assert found is not None and found.num_steps == every
    assert found.usual == pytest.approx(0.01, rel=0.05)
    assert found.long == pytest.approx(0.2 * every, rel=0.05)
    assert found.mean == pytest.approx(0.2 + 0.01 * (every - 1) / every, rel=0.05)


def test_first_steps_may_be_slow_as_well() -> None:
    assert period_of([9.0, 3.0, *steps(30, 5, long=1.0)]) is not None


def test_a_busy_machine_does_not_hide_a_period() -> None:
    some = steps(53, 5, long=0.5)
    some[11] = some[37] = 0.4
    assert period_of(some) is not None
    some[12] = some[23] = 0.4
    assert period_of(some) is None, "more than a quarter of the long steps are others"


def test_steps_that_alternate_have_their_mean_for_their_median() -> None:
    assert period_of([0.1, 1.0] * 20) is None


def test_a_long_step_that_takes_less_than_half_of_the_time_of_the_others_is_believed() -> None:
    """The mean is 1.5 times the median if it takes 6 times as long as each of nine others."""
    assert period_of(steps(53, 10, long=0.057)) is None
    assert period_of(steps(53, 10, long=0.067)) is not None


def test_long_steps_at_other_distances_are_pauses() -> None:
    some = [0.01] * 53
    for place in (7, 19, 28, 44):
        some[place] = 3.0
    assert period_of(some) is None
    # Two at a distance that does not fit the steps before them.
    assert period_of([3.0 if place in (10, 40) else 0.01 for place in range(53)]) is None
    # The first one is slow for another reason.
    assert period_of([9.0, *[0.01] * 9, 4.0, *[0.01] * 8]) is None
    # Two at a distance that fits, of other lengths.
    hiccups = {19: 2.0, 39: 3.0}
    assert period_of([hiccups.get(place, 0.01) for place in range(53)]) is None
    # Two at a distance that fits, and another.
    assert period_of([3.0 if place in (19, 30, 39) else 0.01 for place in range(53)]) is None
    # A period that has ended.
    assert period_of([*steps(20, 5, long=1.0), *[0.01] * 9]) is None


def test_few_steps_have_no_period() -> None:
    assert period_of(steps(8, 3, long=1.0)) is None


@pytest.mark.parametrize(("long", "is_told"), [(6.1, True), (5.9, False)])
def test_steps_are_uneven_if_their_mean_is_far_above_their_median(
    long: float, is_told: bool
) -> None:
    """The limit is a mean of 1.5: (9 + 6) / 10."""
    assert are_uneven([1.0] * 9 + [long]) is is_told


@pytest.mark.parametrize(
    ("num", "longs", "period"),
    [
        # Two long steps are enough if the first is at the end of a whole period.
        (9, {3: 3.0, 7: 3.0}, 4),
        (8, {3: 3.0, 7: 3.0}, None),
        (45, {10: 3.0, 30: 3.0}, None),
        # The third step is never long.
        (9, {2: 3.0, 5: 3.0, 8: 3.0}, None),
        (20, {2: 3.0, 6: 3.0, 12: 3.0, 18: 3.0}, 6),
        # Three are enough, of any length.
        (11, {3: 0.03, 6: 0.03, 9: 0.03}, 3),
        (20, {6: 3.0, 12: 5.0, 18: 9.0}, 6),
        # A period has three to 64 steps.
        (13, {3: 3.0, 5: 3.0, 7: 3.0, 9: 3.0, 11: 3.0}, None),
        (192, {63: 3.0, 127: 3.0, 191: 3.0}, 64),
        (195, {64: 3.0, 129: 3.0, 194: 3.0}, None),
        # One other step for four long ones; and any of less than half of their time.
        (24, {5: 3.0, 8: 3.0, 11: 3.0, 17: 3.0, 23: 3.0}, 6),
        (53, {9: 0.1, 19: 0.1, 29: 0.1, 39: 0.1, 49: 0.1, 12: 0.04, 25: 0.04, 33: 0.04}, 10),
    ],
)
def test_steps_have_a_period_from_the_fewest_that_show_one(
    num: int, longs: dict[int, float], period: int | None
) -> None:
    found = period_of([longs.get(place, 0.01) for place in range(num)])
    assert (None if found is None else found.num_steps) == period


def test_long_steps_are_even_whatever_their_unit() -> None:
    assert not are_uneven([2.0] * 9 + [11.9])
    assert are_uneven([2.0] * 9 + [12.1])
