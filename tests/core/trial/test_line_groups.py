"""Lines that a program writes several at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.core.trial.line_groups import LineGroups
from orchestrator.core.trial.plausibility import judge_groups
from orchestrator.core.trial.protocol import LinesRead, ProgramSeen, RankResult
from tests.core.trial.test_plausibility import noisy, run


def held_back(*, step: float, told: float, size: int, num: int = 53) -> RankResult:
    """A program whose clock sees a part of each step, and that flushes its lines now and then."""
    return run(noisy(step, num), told=noisy(told, num, seed=2), buffered=size).result()


@pytest.mark.parametrize("size", [2, 5, 10])
@pytest.mark.parametrize("told", [0.005, 0.03, 0.07])
def test_a_clock_that_does_not_wait_is_found_by_the_time_between_groups(
    size: int, told: float
) -> None:
    reason = judge_groups(held_back(step=0.15, told=told, size=size))
    if size == 10 and told == 0.005:
        # Four groups of lines that could have been written within 45 ms, as so seen by accident.
        assert reason is None or "at a time" in reason
        return
    assert reason is not None and f"{size} at a time, every" in reason
    assert "torch.cuda.synchronize()" in reason and "flush each line" in reason


@pytest.mark.parametrize("size", [1, 2, 5, 10, 1000])
@pytest.mark.parametrize("step", [0.01, 0.15, 3.0])
def test_lines_that_tell_all_of_the_time_between_groups_are_believed(
    size: int, step: float
) -> None:
    assert judge_groups(held_back(step=step, told=step, size=size)) is None


def test_held_back_lines_are_known_by_what_they_tell() -> None:
    """Five steps of 0.15 s cannot end within a look of 0.05 s; five of 2 ms can."""
    groups = LineGroups.of(held_back(step=0.15, told=0.15, size=5))
    assert groups is not None and groups.are_held_back and groups.every is None
    assert groups.num_lines == pytest.approx(5, abs=0.3)
    short = LineGroups.of(held_back(step=0.002, told=0.002, size=1))
    assert short is None or not short.are_held_back


def test_pauses_that_come_less_regularly_than_groups_are_believed() -> None:
    steps = noisy(0.1, 53)
    pauses = [1.0 if number in (3, 11, 12, 30, 41) else 0.0 for number in range(53)]
    assert judge_groups(run(steps, pauses=pauses, buffered=5).result()) is None
    # A single pause does not hide that the other lines report too little time.
    wrong = run(steps, told=noisy(0.01, 53), pauses=[*[0.0] * 20, 9.0, *[0.0] * 32], buffered=5)
    assert judge_groups(wrong.result()) is not None


def test_too_few_groups_show_nothing() -> None:
    assert judge_groups(held_back(step=0.15, told=0.03, size=5, num=20)) is None
    assert judge_groups(held_back(step=0.15, told=0.03, size=5, num=22)) is not None


def test_what_was_not_seen_is_not_judged() -> None:
    assert judge_groups(RankResult(step_seconds=[0.5] * 9)) is None
    assert judge_groups(RankResult(step_seconds=[0.5] * 9, seen=ProgramSeen(seconds=9.0))) is None
    assert LineGroups.of(_with_reads(500)) is None, "some reads were forgotten"


def _with_reads(num: int) -> RankResult:
    def reads() -> Sequence[LinesRead]:
        return [
            LinesRead(after=place - 0.05, at=float(place), num_steps=2 * place)
            for place in range(1, num + 1)
        ]

    return RankResult(
        step_seconds=[0.1] * (2 * num), seen=ProgramSeen(seconds=num + 1, reads=list(reads()))
    )
