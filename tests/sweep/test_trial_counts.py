"""The trials of a sweep by state: those of the store, and those under way."""

from __future__ import annotations

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.sweep.attempts import Attempts
from orchestrator.sweep.trial_counts import TrialCounts
from tests.sweep.test_attempts import new

QUEUED, LAUNCHING, RUNNING = TrialState.QUEUED, TrialState.LAUNCHING, TrialState.RUNNING
MEASURED = TrialState.MEASURED


def test_a_trial_under_way_counts_by_its_attempt_and_not_by_what_the_store_says() -> None:
    attempts = Attempts()
    counts = TrialCounts(attempts)
    counts.add_all([QUEUED, QUEUED, LAUNCHING, RUNNING, MEASURED])
    assert counts.now == {QUEUED: 2, MEASURED: 1, LAUNCHING: 0, RUNNING: 0}
    new(attempts)
    counts.note_launched()
    assert counts.now == {QUEUED: 1, MEASURED: 1, LAUNCHING: 1, RUNNING: 0}


def test_trials_that_are_counted_anew_count_once() -> None:
    counts = TrialCounts(Attempts())
    counts.add_all([QUEUED, MEASURED])
    counts.move(1, QUEUED, MEASURED)
    assert (counts.now[QUEUED], counts.now[MEASURED]) == (0, 2)
    counts.begin_anew([QUEUED])
    assert counts.now == {QUEUED: 1, LAUNCHING: 0, RUNNING: 0}
