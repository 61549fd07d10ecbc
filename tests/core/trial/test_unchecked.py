"""Programs of whose step times nothing checks a part."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.protocol import ProgramSeen, RankResult
from orchestrator.core.trial.unchecked import how_steps_arrived, why_unchecked
from tests.core.trial.test_plausibility import judge, noisy, run


@pytest.mark.parametrize("step", [0.02, 0.15, 3.0])
def test_lines_that_come_one_by_one_are_checked(step: float) -> None:
    assert why_unchecked(run(noisy(step)).result()) is None


@pytest.mark.parametrize("told", [0.15, 0.00015])
def test_lines_that_are_written_at_the_end_are_not_checked_whatever_they_tell(told: float) -> None:
    """A clock that does not wait for the device tells the second."""
    result = run(noisy(0.15), told=noisy(told), buffered=1000).result()
    reason = why_unchecked(result)
    assert reason is not None
    assert reason.startswith("all steps arrived at once, and only the time that the program ran")
    assert "write a line when each step has ended, and flush it" in reason


def test_the_times_of_a_document_are_not_checked() -> None:
    result = RankResult(step_seconds=[0.1] * 8, seen=ProgramSeen(seconds=60.0))
    assert how_steps_arrived(result) == "all steps arrived at once"


@pytest.mark.parametrize("told", [0.5, 0.005])
@pytest.mark.parametrize("num", [10, 15, 25])
def test_lines_that_come_in_few_groups_are_not_checked_whatever_they_tell(
    num: int, told: float
) -> None:
    """By lines that come five at a time, ten steps of 0.5 s look like such of 5 ms with pauses."""
    result = run(noisy(0.5, num), told=noisy(told, num), buffered=5).result()
    if judge(result) is None:
        assert how_steps_arrived(result) == "5 steps arrived at a time"
        reason = why_unchecked(result)
        assert reason is not None and reason.startswith("several steps arrived at a time, and only")


@pytest.mark.parametrize("step", [0.002, 0.005])
def test_short_steps_that_end_between_two_looks_are_no_group(step: float) -> None:
    assert how_steps_arrived(run(noisy(step)).result()) is None


def test_lines_that_may_not_be_one_step_each_are_said_to_be_unchecked() -> None:
    lines = run(noisy(0.15))
    reason = why_unchecked(lines.result(knows_num_steps=False))
    assert reason is not None
    assert reason.startswith("nothing shows that each time is that of one step")
    assert 'give each line a field "step"' in reason and "{num_steps}" in reason
    assert why_unchecked(lines.result(knows_num_steps=False, steps_per_line=1.0)) is None
    # Both are said of lines that come at the end.
    both = why_unchecked(run(noisy(0.15), buffered=1000).result(knows_num_steps=False))
    assert both is not None
    assert both.startswith("all steps arrived at once") and both.endswith(reason)


def test_nothing_is_said_of_one_step_or_of_a_rank_that_nobody_watched() -> None:
    one = RankResult(step_seconds=[0.1], seen=ProgramSeen(seconds=60.0))
    assert how_steps_arrived(one) is None
    assert how_steps_arrived(RankResult(step_seconds=[0.1] * 8)) is None
    assert how_steps_arrived(RankResult(step_seconds=[], seen=ProgramSeen(seconds=1.0))) is None
