"""A sweep that is read again and again: only what has changed is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.purpose import Purpose
from orchestrator.report import live_sweep
from orchestrator.report.live_sweep import COUNTS_SECONDS, TRIALS_SECONDS, LiveSweep
from tests.db.builders import Bench, failure, record_failure, start_repeat


@pytest.fixture
def bench(store: Store) -> Bench:
    made = Bench.on(store)
    made.measure(1)
    return made


def counted(store: Store, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, list[Any]]:
    """The arguments of each call of these methods from now on."""
    calls: dict[str, list[Any]] = {name: [] for name in names}

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            calls[name].append(arguments)
            return method(*arguments, **named)

        return called

    for name in names:
        monkeypatch.setattr(store, name, counting(name, getattr(store, name)))
    return calls


def test_nothing_is_read_twice_while_nothing_happens(
    store: Store, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = LiveSweep(store, "tiny")
    first = sweep.read(0.0)
    calls = counted(store, monkeypatch, "trials", "trials_by_id", "status", "reserved")
    assert sweep.read(1.0) is first
    assert calls == {"trials": [], "trials_by_id": [], "status": [], "reserved": []}
    sweep.read(1.1 + COUNTS_SECONDS)
    assert len(calls["status"]) == 1 and not calls["trials"]
    sweep.read(1.2 + TRIALS_SECONDS)
    assert len(calls["trials"]) == 1


def test_a_new_failure_is_read_alone(
    store: Store, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = LiveSweep(store, "tiny")
    assert not sweep.read(0.0).failures
    calls = counted(store, monkeypatch, "trials", "trials_by_id")
    trial, attempt = bench.start(2)
    assert sweep.read(1.0).trials[trial].state is TrialState.LAUNCHING
    record_failure(
        store,
        trial,
        attempt,
        epoch=bench.epoch,
        failure=failure(FailureKind.NCCL, message="a cable"),
        event=TrialEvent.FAILED,
    )
    rows = sweep.read(2.0)
    assert rows.trials[trial].state is TrialState.FAILED
    assert [(one.trial_id, one.detail) for one in rows.failures] == [
        (trial, {"kind": "nccl", "message": "a cable"})
    ]
    assert calls["trials_by_id"] == [([trial],), ([trial],)] and not calls["trials"]


def test_what_runs_is_read_with_its_nodes_and_purpose_repeats_too(
    store: Store, bench: Bench
) -> None:
    measured = next(iter(store.trials(bench.sweep_id))).id
    start_repeat(store, measured, bench.epoch, ["node-c"], purpose=Purpose.ANCHOR)
    started, _ = bench.start(2)
    repeat, first = LiveSweep(store, "tiny").read(0.0).status.running
    assert (repeat.trial_id, repeat.attempt, repeat.state) == (measured, 2, TrialState.MEASURED)
    assert (repeat.nodes, repeat.purpose) == (("node-c",), Purpose.ANCHOR)
    assert (first.trial_id, first.state) == (started, TrialState.LAUNCHING)
    assert first.nodes == ("node-a", "node-b") and first.purpose is Purpose.NEW
    assert repeat.since <= first.since


def test_more_events_than_a_portion_are_all_seen(
    store: Store, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_sweep, "MOST_NEW_EVENTS", 2)
    sweep = LiveSweep(store, "tiny")
    sweep.read(0.0)
    for size in (2, 4, 8):
        bench.measure(size)
    rows = sweep.read(1.0)
    assert sum(one.state is TrialState.MEASURED for one in rows.trials.values()) == 4
    assert sweep.read(2.0) is rows


def test_a_sweep_that_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="no sweep is named 'tiny'"):
        LiveSweep(store, "tiny").read(0.0)
