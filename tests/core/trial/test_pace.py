"""The pace of lines, as a rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.core.trial.pace import Pace, ToldSteps
from orchestrator.core.trial.protocol import LinesRead, ProgramSeen, RankResult

POLL_SECONDS = 0.05


def pace_of(told: float, passed: float, *, num: int = 20) -> Pace:
    """The pace of a program whose lines tell one time, and come after another."""
    reads = [
        LinesRead(after=step * passed - POLL_SECONDS, at=step * passed, num_steps=step)
        for step in range(1, num + 1)
    ]
    seen = ProgramSeen(seconds=(num + 1) * passed, reads=reads)
    result = RankResult(warmup_seconds=[told], step_seconds=[told] * (num - 1), seen=seen)
    found = Pace.of(seen, ToldSteps.of(result, seen))
    assert found is not None
    return found


def test_the_bounds_of_an_honest_program_are_around_what_it_tells() -> None:
    pace = pace_of(0.5, 0.5)
    assert pace.is_sharp
    assert pace.least <= 1.0 <= pace.most
    assert pace.fast.real == pytest.approx(0.5, rel=0.1)


def test_the_bounds_show_by_how_much_a_program_tells_too_little() -> None:
    pace = pace_of(0.25, 0.5)
    assert pace.least <= 2.0 <= pace.most
    assert pace.least > 1.5


def test_a_program_that_writes_all_lines_at_once_has_no_pace() -> None:
    seen = ProgramSeen(seconds=9.0, reads=[LinesRead(after=8.0, at=8.05, num_steps=20)])
    result = RankResult(warmup_seconds=[0.5], step_seconds=[0.5] * 19, seen=seen)
    assert Pace.of(seen, ToldSteps.of(result, seen)) is None


def test_steps_between_two_lines_take_what_they_tell_or_the_median_if_they_are_no_lines() -> None:
    lines = ToldSteps(seconds=[1.0, 2.0, 4.0, 8.0], median=3.0, are_lines=True, every=10)
    assert lines.between(1, 3) == 10 * (2.0 + 4.0)
    assert replace(lines, are_lines=False).between(1, 4) == 10 * 3 * 3.0


def pace(
    gaps: Sequence[float], lines: Sequence[int], *, told: float, every: int = 1, poll: float = 0.05
) -> Pace:
    found = pace_if_any(gaps, lines, told=told, every=every, poll=poll)
    assert found is not None
    return found


def pace_if_any(
    gaps: Sequence[float], lines: Sequence[int], *, told: float, every: int = 1, poll: float = 0.05
) -> Pace | None:
    """The pace of a program that writes so many lines after each gap, all of one time."""
    at, num, reads = 0.0, 0, []
    for gap, more in zip(gaps, lines, strict=True):
        at, num = at + gap, num + more
        reads.append(LinesRead(after=at - poll, at=at, num_steps=num))
    seen = ProgramSeen(seconds=at, reads=reads, every=every)
    result = RankResult(step_seconds=[told] * num, seen=seen)
    return Pace.of(seen, ToldSteps.of(result, seen))


def test_the_pace_is_that_of_the_median_window() -> None:
    """Lines of two steps tell half a second each, and 0.05 s pass between two reads."""
    gaps = [1.0, 0.8, 1.2, 1.0, 0.9, 1.1]
    found = pace(gaps, [1] * 6, told=0.5, every=2)
    assert found.is_sharp
    assert (found.least, found.most, found.fast.real) == pytest.approx((0.95, 1.05, 0.5))


def test_four_windows_show_no_pace_and_five_do() -> None:
    assert pace_if_any([1.0] * 5, [1] * 5, told=1.0) is None
    assert pace([1.0] * 6, [1] * 6, told=1.0).is_sharp


def test_lines_after_the_last_clear_time_are_a_window_too() -> None:
    """The last ten come within 0.08 s of the four before, and weigh more than those."""
    found = pace([1.0] * 5 + [0.08], [1] * 5 + [10], told=1.0)
    assert found.least == pytest.approx(0.003)
    assert found.most == pytest.approx(0.013)
    assert found.fast.real == pytest.approx(0.008)


def test_after_a_pause_only_the_first_line_is_known_to_have_waited() -> None:
    """Three lines at a time, once a second; 1.5 times what they tell is no pause."""
    paused = pace([1.0] * 7, [3] * 7, told=0.1)
    # The first has taken 0.95 to 1.05 s for 0.1; the others at most that for 0.2.
    assert paused.least == 0.0
    assert paused.most == pytest.approx(1.05 / 0.2)
    slow = pace([1.0] * 7, [3] * 7, told=0.95 / 1.499 / 3)
    assert slow.least == pytest.approx(1.499)


@pytest.mark.parametrize(
    ("poll", "is_seen", "is_sharp"),
    # Bounds of a second that are 1.3, 1.6 and 3 times apart: poll is 0.13, 0.23 and half of it.
    [
        (0.12, True, True),
        (0.22, True, True),
        (0.24, True, False),
        (0.49, True, False),
        (0.51, False, False),
    ],
)
def test_a_time_is_sharp_if_its_bounds_are_near(
    poll: float, *, is_seen: bool, is_sharp: bool
) -> None:
    found = pace_if_any([1.0] * 6, [1] * 6, told=1.0, poll=poll)
    assert (found is not None) == is_seen
    assert found is None or found.is_sharp == is_sharp
