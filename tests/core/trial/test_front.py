"""The front of measured layouts: what is on it, what could be, and what to repeat."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.trial.front import (
    Front,
    FrontPoint,
    front_of,
    minor_of,
    most_repeats,
    next_to_repeat,
)
from orchestrator.core.trial.merit import Merit

BOTH = (Merit.SPEED, Merit.HEADROOM)


def point(key: int, speed: float, headroom: float, *, tokens_per_joule: float = 1.0) -> FrontPoint:
    """A layout whose speed and energy have a relative standard deviation of 2 %."""
    return FrontPoint(
        key=key,
        values={
            Merit.SPEED: log(speed),
            Merit.HEADROOM: headroom,
            Merit.EFFICIENCY: log(tokens_per_joule),
        },
        sds={Merit.SPEED: 0.02, Merit.EFFICIENCY: 0.02},
    )


def test_a_layout_that_is_slower_and_leaves_less_memory_is_off_the_front() -> None:
    found = front_of([point(1, 100, 0.2), point(2, 80, 0.6), point(3, 60, 0.5)], BOTH)
    assert (found.on, found.possible) == ([1, 2], [])


def test_a_layout_that_is_slower_by_less_than_noise_could_be_on_the_front() -> None:
    # Two runs of 2 % each differ by 5.5 % at most, of 100.
    found = front_of([point(1, 100, 0.5), point(2, 96, 0.5), point(3, 90, 0.5)], BOTH)
    assert (found.on, found.possible) == ([1], [2])
    assert found.rivals == {2: [1]}


def test_any_layout_of_the_front_that_beats_another_is_its_rival_by_however_little() -> None:
    # By 2 % of 100, which is 0.7 standard deviations of their difference.
    found = front_of([point(1, 100, 0.5), point(2, 98, 0.5)], BOTH)
    assert found.rivals == {2: [1]}


def test_of_two_equal_layouts_the_first_is_on_the_front_and_the_other_could_be() -> None:
    found = front_of([point(2, 100, 0.5), point(1, 100, 0.5)], BOTH)
    assert found == Front(on=[1], possible=[2], rivals={2: [1]})


def test_of_those_that_could_be_on_the_front_the_least_dominated_is_first() -> None:
    found = front_of([point(1, 100, 0.5), point(2, 96, 0.5), point(3, 99, 0.5)], BOTH)
    assert (found.on, found.possible) == ([1], [3, 2])


def test_a_difference_of_memory_below_half_a_percent_is_none() -> None:
    found = front_of([point(1, 100, 0.500), point(2, 80, 0.504), point(3, 70, 0.508)], BOTH)
    assert found.on == [1, 3]


def test_more_objectives_keep_more_layouts() -> None:
    some = [point(1, 100, 0.5), point(2, 80, 0.5, tokens_per_joule=1.3)]
    assert front_of(some, BOTH).on == [1]
    assert front_of(some, tuple(Merit)).on == [1, 2]


def test_of_one_objective_the_front_is_its_best() -> None:
    some = [point(1, 100, 0.2), point(2, 80, 0.6), point(3, 79, 0.3)]
    assert front_of(some, [Merit.HEADROOM]) == Front(on=[2], possible=[], rivals={})
    assert front_of(some, [Merit.SPEED]).on == [1]


merits_of = st.lists(st.sampled_from(list(Merit)), min_size=1, unique=True)
any_point = st.tuples(st.integers(90, 110), st.integers(0, 20), st.integers(90, 110))


@given(st.lists(any_point, min_size=1, max_size=12), merits_of)
def test_every_layout_off_the_front_is_dominated_by_one_on_it(
    numbers: list[tuple[int, int, int]], merits: list[Merit]
) -> None:
    some = [
        point(key, speed, headroom / 100, tokens_per_joule=energy)
        for key, (speed, headroom, energy) in enumerate(numbers)
    ]
    found = front_of(some, merits)
    assert found.on
    assert not set(found.on) & set(found.possible)
    for one in some:
        if one.key in found.on:
            continue
        assert any(
            all(
                some[key].values[merit] >= one.values[merit] - (merit is Merit.HEADROOM) * 0.00501
                for merit in merits
            )
            for key in found.on
        )


def test_a_layout_that_hardly_adds_to_the_volume_of_a_front_is_minor() -> None:
    # The third is a hundred times slower for 1 % more memory, the fourth fills the memory.
    some = [point(1, 100, 0.5), point(2, 50, 0.8), point(3, 1, 0.81), point(4, 101, 0.001)]
    found = front_of(some, BOTH)
    assert sorted(found.on) == [1, 2, 3, 4]
    assert minor_of(found, some, BOTH) == {3, 4}
    assert minor_of(front_of(some[:1], BOTH), some[:1], BOTH) == frozenset()
    assert minor_of(front_of([], BOTH), [], BOTH) == frozenset()


FRONT = Front(on=[1, 2], possible=[3], rivals={3: [2]})


def test_each_layout_of_the_front_is_repeated_and_then_only_what_is_tied() -> None:
    done: dict[int, int] = {}
    order = []
    while (
        key := next_to_repeat(FRONT, num_repeats=done, contenders=3, repeats=2, last=0)
    ) is not None:
        done[key] = done.get(key, 0) + 1
        order.append(key)
    assert order == [1, 2, 3, 2, 3]


def test_no_layout_is_repeated_twice_in_a_row_while_another_waits() -> None:
    assert next_to_repeat(FRONT, num_repeats={}, contenders=3, repeats=1, last=1) == 2


@pytest.mark.parametrize(
    ("given_up", "under_way", "expected"), [([1], [], 2), ([], [1], 2), ([1, 2, 3], [], None)]
)
def test_what_cannot_be_repeated_or_is_being_repeated_is_passed_over(
    given_up: list[int], under_way: list[int], expected: int | None
) -> None:
    found = next_to_repeat(
        FRONT, num_repeats={}, contenders=3, repeats=1, given_up=given_up, under_way=under_way
    )
    assert found == expected


@pytest.mark.parametrize(
    ("num_on", "num_possible", "contenders", "repeats", "done", "most"),
    [
        # Two of the front and one contender, once and then, all tied, once more.
        (2, 3, 1, 2, 0, 3 + 3),
        (2, 1, 4, 3, 0, 3 + 2 * 3),
        (2, 1, 4, 3, 4, 9 - 4),
        # Nothing could be on the front in addition: nothing is tied after the first round.
        (2, 0, 4, 3, 0, 2),
        (2, 1, 4, 3, 99, 0),
        (2, 1, 4, 0, 0, 0),
    ],
)
def test_a_front_takes_one_round_of_repeats_and_further_rounds_of_what_is_tied(
    num_on: int, num_possible: int, contenders: int, repeats: int, done: int, most: int
) -> None:
    found = most_repeats(num_on, num_possible, contenders=contenders, repeats=repeats, done=done)
    assert found == most


def test_a_layout_that_adds_less_than_a_thousandth_is_minor() -> None:
    """0.01 more free memory, at 7.5 or 3.5 % of the speed, on top of half of the unit square."""
    for speed, minor in ((7.5, frozenset()), (3.5, frozenset({2}))):
        some = [point(1, 100, 0.5), point(2, speed, 0.51)]
        assert minor_of(front_of(some, BOTH), some, BOTH) == minor


def test_a_repeat_under_way_is_as_good_as_done() -> None:
    found = next_to_repeat(FRONT, num_repeats={2: 1, 3: 1}, contenders=3, repeats=1, under_way=[1])
    assert found is None


def test_no_repeat_is_done_unless_it_is_told() -> None:
    assert most_repeats(2, 1, contenders=1, repeats=1) == 3
