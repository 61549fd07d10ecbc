"""The pace of lines, as a rank reads them."""

from __future__ import annotations

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
    return Pace.of(seen, ToldSteps.of(result, seen))


def test_the_bounds_of_an_honest_program_are_around_what_it_tells() -> None:
    pace = pace_of(0.5, 0.5)
    assert pace.is_sharp
    assert pace.least is not None and pace.most is not None
    assert pace.least <= 1.0 <= pace.most
    assert pace.step_seconds == pytest.approx(0.5, rel=0.1)


def test_the_bounds_show_by_how_much_a_program_tells_too_little() -> None:
    pace = pace_of(0.25, 0.5)
    assert pace.least is not None and pace.most is not None
    assert pace.least <= 2.0 <= pace.most
    assert pace.least > 1.5


def test_a_program_that_writes_all_lines_at_once_has_no_pace() -> None:
    seen = ProgramSeen(seconds=9.0, reads=[LinesRead(after=8.0, at=8.05, num_steps=20)])
    result = RankResult(warmup_seconds=[0.5], step_seconds=[0.5] * 19, seen=seen)
    assert Pace.of(seen, ToldSteps.of(result, seen)) == Pace()


def test_steps_between_two_lines_take_what_they_tell_or_the_median_if_they_are_no_lines() -> None:
    lines = ToldSteps(seconds=[1.0, 2.0, 4.0, 8.0], median=3.0, are_lines=True, every=10)
    assert lines.between(1, 3) == 10 * (2.0 + 4.0)
    assert replace(lines, are_lines=False).between(1, 4) == 10 * 3 * 3.0
