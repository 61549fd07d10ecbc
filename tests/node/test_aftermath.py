"""The wait for the rank that caused another one to lose communication, without processes."""

from __future__ import annotations

import pytest

from orchestrator.node import aftermath
from orchestrator.node.aftermath import LATE_SHARE, LONGEST_SECONDS, WAIT_SECONDS, Aftermath


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Seconds that each living process has waited for a core."""
    seconds = {7: 3.0}
    monkeypatch.setattr(aftermath, "core_wait_seconds", seconds.__getitem__)
    return seconds


def test_a_failure_with_a_cause_of_its_own_ends_the_gang_at_once(waits: dict[int, float]) -> None:
    wait = Aftermath()
    assert not wait.is_over(1e9, waits)
    wait.note_failure(10.0, may_be_innocent=True, alive=waits)
    assert not wait.is_over(10.1, waits)
    wait.note_failure(10.1, may_be_innocent=False, alive=waits)
    assert wait.is_over(10.1, waits)


def test_ranks_that_wait_for_nothing_are_given_little_time(waits: dict[int, float]) -> None:
    wait = Aftermath()
    wait.note_failure(10.0, may_be_innocent=True, alive=waits)
    # Another that lost communication does not lengthen it.
    wait.note_failure(10.4, may_be_innocent=True, alive=waits)
    waits[7] += 0.9 * LATE_SHARE * WAIT_SECONDS
    assert not wait.is_over(10.0 + WAIT_SECONDS - 0.01, waits)
    assert wait.is_over(10.0 + WAIT_SECONDS, waits)


def test_ranks_that_wait_for_a_core_are_given_more_but_not_for_ever(
    waits: dict[int, float],
) -> None:
    wait = Aftermath()
    now = 10.0
    wait.note_failure(now, may_be_innocent=True, alive=waits)
    while not wait.is_over(now, waits):
        assert wait.until is not None
        waits[7] += wait.until - now
        now = wait.until
    assert now == 10.0 + LONGEST_SECONDS


def test_a_rank_that_got_its_core_ends_the_wait(waits: dict[int, float]) -> None:
    wait = Aftermath()
    wait.note_failure(10.0, may_be_innocent=True, alive=waits)
    waits[7] += WAIT_SECONDS
    assert not wait.is_over(10.0 + WAIT_SECONDS, waits)
    assert wait.is_over(10.0 + 2 * WAIT_SECONDS, waits)
