"""When an agent that does not answer is lost, by the times at which somebody listened."""

from __future__ import annotations

import pytest

from orchestrator.cluster.ray.unanswered_calls import UNANSWERED_SECONDS, UnansweredCalls


def listened(
    unanswered_calls: UnansweredCalls,
    *,
    seconds: float,
    unanswered: set[int],
    since: float = 0.0,
    every: float = 1.0,
) -> float:
    """Look once a second. Returns when."""
    now = since
    while now < since + seconds:
        now += every
        unanswered_calls.count(now, unanswered)
    return now


def test_an_agent_that_does_not_answer_is_lost_after_a_while_and_no_other_is() -> None:
    unanswered_calls = UnansweredCalls()
    now = listened(unanswered_calls, seconds=UNANSWERED_SECONDS, unanswered={1})
    assert unanswered_calls.lost() is None
    listened(unanswered_calls, seconds=2.0, unanswered={1}, since=now)
    assert unanswered_calls.lost() == 1


def test_an_answer_makes_good_for_all_silence_before_it() -> None:
    unanswered_calls = UnansweredCalls()
    now = listened(unanswered_calls, seconds=UNANSWERED_SECONDS - 2, unanswered={0, 1})
    unanswered_calls.count(now, {0})
    now = listened(unanswered_calls, seconds=UNANSWERED_SECONDS - 2, unanswered={1}, since=now)
    assert unanswered_calls.lost() is None
    listened(unanswered_calls, seconds=4.0, unanswered={1}, since=now)
    assert unanswered_calls.lost() == 1


@pytest.mark.parametrize("asleep_seconds", [60.0, 3600.0])
def test_time_in_which_nobody_listened_counts_for_nothing(asleep_seconds: float) -> None:
    unanswered_calls = UnansweredCalls()
    now = listened(unanswered_calls, seconds=3.0, unanswered={0})
    unanswered_calls.count(now + asleep_seconds, {0})
    assert unanswered_calls.lost() is None
