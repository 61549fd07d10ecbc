"""When an agent that does not answer is lost, told from the times at which somebody listened."""

from __future__ import annotations

import pytest

from orchestrator.cluster.ray.unanswered_calls import SILENCE_SECONDS, Silence


def listened(silence: Silence, *, seconds: float, unanswered: set[int], since: float = 0.0, every: float = 1.0) -> float:
    """Look once a second. Returns when."""
    now = since
    while now < since + seconds:
        now += every
        silence.listen(now, unanswered)
    return now


def test_an_agent_that_does_not_answer_is_lost_after_a_while_and_no_other_is() -> None:
    silence = Silence()
    now = listened(silence, seconds=SILENCE_SECONDS, unanswered={1})
    assert silence.lost() is None
    listened(silence, seconds=2.0, unanswered={1}, since=now)
    assert silence.lost() == 1


def test_an_answer_makes_good_for_all_silence_before_it() -> None:
    silence = Silence()
    now = listened(silence, seconds=SILENCE_SECONDS - 2, unanswered={0, 1})
    silence.listen(now, {0})
    now = listened(silence, seconds=SILENCE_SECONDS - 2, unanswered={1}, since=now)
    assert silence.lost() is None
    listened(silence, seconds=4.0, unanswered={1}, since=now)
    assert silence.lost() == 1


@pytest.mark.parametrize("asleep_seconds", [60.0, 3600.0])
def test_time_in_which_nobody_listened_counts_for_nothing(asleep_seconds: float) -> None:
    silence = Silence()
    now = listened(silence, seconds=3.0, unanswered={0})
    silence.listen(now + asleep_seconds, {0})
    assert silence.lost() is None
