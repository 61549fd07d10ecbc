"""Sets of times: small cases by hand, and all operations against sets of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as some

from orchestrator.core.trial.intervals import Interval, common, length, minus, union, within


def test_a_union_joins_what_overlaps_and_what_touches() -> None:
    assert union([(5, 9), (0, 3), (2, 4), (9, 12), (7, 7)]) == [(0, 4), (5, 12)]


def test_a_difference_may_cut_an_interval_into_parts() -> None:
    assert minus([(0, 10), (20, 30)], [(2, 3), (5, 22), (29, 40)]) == [(0, 2), (3, 5), (22, 29)]


def test_a_window_cuts_what_sticks_out() -> None:
    assert within([(0, 4), (0, 5), (4, 6), (8, 20), (10, 12)], (4, 10)) == [(4, 5), (4, 6), (8, 10)]


_intervals = some.lists(
    some.tuples(some.integers(0, 30), some.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1]))
)


@given(_intervals, _intervals)
def test_the_operations_are_those_of_sets(one: list[Interval], other: list[Interval]) -> None:
    a, b = union(one), union(other)
    assert _moments(a) == _moments(one)
    assert _moments(minus(a, b)) == _moments(one) - _moments(other)
    assert _moments(common(a, b)) == _moments(one) & _moments(other)
    assert length(a) == len(_moments(one))
    for found in (a, minus(a, b), common(a, b)):
        assert all(start < end for start, end in found)
        assert sorted(found) == found
        assert length(found) == len(_moments(found))


def _moments(intervals: Iterable[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}
