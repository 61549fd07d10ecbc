"""What a person asks for is in the store, whoever holds the sweep, and changes no other trial."""

from __future__ import annotations

import pytest

from db.connection.engine import Database
from orchestrator.core.errors import LeaseLost
from orchestrator.core.trial.lifecycle import REQUESTS, TrialState
from tests.db.builders import Bench, layout, losing_answers


def asked(bench: Bench) -> list[tuple[int | None, str]]:
    events = bench.store.events_of_kinds(bench.sweep_id, REQUESTS)
    return [(one.trial_id, one.event) for one in events]


def test_a_layout_is_added_once_and_may_be_asked_for_again(bench: Bench) -> None:
    first = bench.store.enqueue(bench.cell_id, layout(4))
    assert first[1:] == (TrialState.QUEUED, True)
    assert bench.store.enqueue(bench.cell_id, layout(4)) == first
    assert asked(bench) == [(first[0], "enqueued")] * 2
    (trial,) = bench.store.trials(bench.sweep_id)
    assert (trial.state, trial.num_attempts, trial.layout) == (TrialState.QUEUED, 0, layout(4))
    assert bench.store.trial(trial.id).events[0].event == "added"


def test_a_layout_that_was_measured_is_not_changed(bench: Bench) -> None:
    trial_id = bench.measure(2)
    before = bench.store.trial(trial_id)
    assert bench.store.enqueue(bench.cell_id, layout(2)) == (trial_id, TrialState.MEASURED, False)
    assert bench.store.trial(trial_id) == before and asked(bench) == []


def test_the_holder_measures_again_what_was_asked_for(bench: Bench) -> None:
    measured, other = bench.measure(1), bench.measure(2)
    running, _ = bench.start(4)
    assert bench.store.ask_to_retry(bench.sweep_id, measured)
    assert not bench.store.ask_to_retry(bench.sweep_id, running)
    assert not bench.store.ask_to_retry(bench.sweep_id, 999)
    assert asked(bench) == [(measured, "retry_asked")]
    cells = bench.store.retry(bench.sweep_id, [measured], epoch=bench.epoch)
    assert cells == {bench.cell_id}
    states = [one.state for one in bench.store.trials_by_id([measured, other])]
    assert states == [TrialState.QUEUED, TrialState.MEASURED]


def test_who_does_not_hold_the_sweep_retries_nothing(bench: Bench) -> None:
    measured = bench.measure(1)
    with pytest.raises(LeaseLost):
        bench.store.retry(bench.sweep_id, [measured], epoch=bench.epoch + 1)
    assert bench.store.trials_by_id([measured])[0].state is TrialState.MEASURED


def test_a_request_whose_answer_was_lost_is_noted_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = bench.measure(1)
    monkeypatch.setattr(Database, "write", losing_answers(Database.write))
    trial_id, _, waits = bench.store.enqueue(bench.cell_id, layout(4))
    assert waits and bench.store.ask_to_retry(bench.sweep_id, measured)
    assert asked(bench) == [(trial_id, "enqueued"), (measured, "retry_asked")]
