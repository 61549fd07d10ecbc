"""A program whose step times nothing but the time that it ran bounds."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.protocol import ProgramSeen, RankResult
from orchestrator.core.trial.unseen_pace import how_steps_arrived, why_unchecked
from tests.core.trial.test_plausibility import noisy, run


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
    assert reason.endswith("write a line when each step has ended, and flush it")


def test_the_times_of_a_document_are_not_checked() -> None:
    result = RankResult(step_seconds=[0.1] * 8, seen=ProgramSeen(seconds=60.0))
    assert how_steps_arrived(result) == "all steps arrived at once"


def test_lines_that_are_held_back_in_too_few_groups_are_not_checked() -> None:
    result = run(noisy(0.5, 10), buffered=5).result()
    assert how_steps_arrived(result) == "5 steps arrived at a time"


def test_nothing_is_said_of_one_step_or_of_a_rank_that_nobody_watched() -> None:
    one = RankResult(step_seconds=[0.1], seen=ProgramSeen(seconds=60.0))
    assert how_steps_arrived(one) is None
    assert how_steps_arrived(RankResult(step_seconds=[0.1] * 8)) is None
    assert how_steps_arrived(RankResult(step_seconds=[], seen=ProgramSeen(seconds=1.0))) is None
