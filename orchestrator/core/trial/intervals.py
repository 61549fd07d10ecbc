"""Sets of times as sorted intervals that do not touch: union, difference and length, exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# From a start to an end in nanoseconds, the end excluded.
Interval = tuple[int, int]
# Sorted, each of them longer than nothing, with time between one and the next.
Intervals = Sequence[Interval]


def union(some: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in any of these intervals, which may be in any order."""
    found: list[Interval] = []
    for start, end in sorted(one for one in some if one[0] < one[1]):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def minus(some: Intervals, others: Intervals) -> list[Interval]:
    """Return the times of one set that are not in the other."""
    found: list[Interval] = []
    first = 0
    for start, end in some:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found


def common(some: Intervals, others: Intervals) -> list[Interval]:
    """Return the times that are in both sets."""
    return minus(some, minus(some, others))


def within(some: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals that lie in a window."""
    start, end = window
    cut = ((max(a, start), min(b, end)) for a, b in some)
    return [one for one in cut if one[0] < one[1]]


def length(some: Intervals) -> int:
    """Return the nanoseconds of a set."""
    return sum(end - start for start, end in some)
