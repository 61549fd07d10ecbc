"""What the store keeps of nodes: checks, measurements and benches, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from db import store_reads
from db.connection.engine import Database
from db.read import nodes as read_nodes
from db.store import Store
from db.types import BenchReason
from orchestrator.core.errors import LeaseLost
from orchestrator.core.machines.check import Status
from orchestrator.core.machines.node_health import judge_nodes
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from tests.core.machines.test_node_health import gpu, node
from tests.db.builders import (
    Bench,
    begin_trial,
    failure,
    layout,
    losing_answers,
    measurement,
    record_failure,
    record_measurement,
)


def measured(bench: Bench, micro_batch_size: int, *nodes: str, rate: float = 1000.0) -> int:
    trial_id, attempt = begin_trial(
        bench.store,
        bench.cell_id,
        layout(micro_batch_size),
        epoch=bench.epoch,
        nodes=nodes,
        predicted_tokens_per_second_per_gpu=2000.0,
    )
    record_measurement(
        bench.store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=measurement(rate),
        gpu_seconds=1.0,
    )
    return trial_id


def test_the_last_look_at_each_node_is_known(store: Store) -> None:
    bench = Bench.on(store)
    for broken in (True, False):
        nodes = [
            node("a", xids={79: 1} if broken else {}),
            node("b", gpus=(gpu(matmul_flops=None),)),
        ]
        store.record_node_checks(
            bench.sweep_id, bench.epoch, {some.node: some for some in nodes}, judge_nodes(nodes)
        )
    found = store.node_checks(bench.sweep_id)
    assert {name: row.is_fit for name, row in found.items()} == {"a": True, "b": True}
    assert found["a"].failed is None
    assert {check.name: check.status for check in found["a"].checks}["xid"] is Status.OK


def test_a_look_that_no_sweep_asked_for_is_kept_too(store: Store) -> None:
    bench = Bench.on(store)
    facts = node("a", xids={79: 2})
    store.record_node_checks(None, None, {"a": facts}, judge_nodes([facts]))
    assert store.node_checks(bench.sweep_id) == {}


def test_measurements_are_told_with_their_nodes_and_what_was_predicted(store: Store) -> None:
    bench = Bench.on(store)
    first = measured(bench, 1, "a")
    second = measured(bench, 2, "a", "b")
    runs = store.node_runs(bench.sweep_id)
    assert [(run.trial, run.nodes) for run in runs] == [(first, ("a",)), (second, ("a", "b"))]
    assert all(run.log_predicted is not None for run in runs)
    # 64 sequences of 128 tokens, at 2000 tokens/s on each of 2 GPUs
    assert runs[0].log_predicted == pytest.approx(0.7167, abs=1e-3)  # ln(64 * 128 / 4000)


def test_of_a_long_sweep_its_newest_measurements_are_told_also_once_another_has_newer_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reads, "NEWEST_RUNS", 2)
    looked_through = recorded(monkeypatch, read_nodes, "_runs_among_newest")
    bench = Bench.on(store)
    trials = [measured(bench, 2**power, "a") for power in range(4)]
    newest = trials[-2:]
    assert [run.trial for run in store.node_runs(bench.sweep_id)] == newest
    assert not looked_through, "of a short sweep all are looked at at once"
    newest = [newest[-1], measured(bench, 16, "a")]
    assert [run.trial for run in store.node_runs(bench.sweep_id)] == newest
    assert looked_through == [2], "of the four newest attempts of the store two are enough"
    other = Bench.on(store, "other")
    for power in range(3):
        measured(other, 2**power, "b")
    assert [run.trial for run in store.node_runs(bench.sweep_id)] == newest
    assert looked_through == [2, 1], "one of the four is its own: then all of its own are looked at"


def test_of_a_sweep_that_launched_nothing_no_measurement_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reads, "NEWEST_RUNS", 1)
    bench = Bench.on(store)
    bench.prune(range(1, 5))
    assert store.node_runs(bench.sweep_id) == []


def recorded(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[int]:
    """How much a function of a module has found, each time."""
    usual, found = getattr(module, name), []

    def told(*arguments: object) -> list[object]:
        some: list[object] = usual(*arguments)
        found.append(len(some))
        return some

    monkeypatch.setattr(module, name, told)
    return found


def test_a_node_is_benched_once_and_may_be_used_again(store: Store) -> None:
    bench = Bench.on(store)
    slow = {"slower": 0.11}
    assert store.bench(
        bench.sweep_id,
        "a",
        reason=BenchReason.SLOW,
        is_remeasured=True,
        evidence=slow,
        epoch=bench.epoch,
    )
    assert not store.bench(bench.sweep_id, "a", reason=BenchReason.ASKED, is_remeasured=False)
    assert store.unbench(bench.sweep_id, "a")
    assert not store.unbench(bench.sweep_id, "a")
    assert store.bench(bench.sweep_id, "a", reason=BenchReason.ASKED, is_remeasured=False)
    rows = store.benches(bench.sweep_id)
    assert [(row.node, row.reason, row.until is None) for row in rows] == [
        ("a", "slow", False),
        ("a", "asked", True),
    ]
    assert rows[0].evidence == slow
    assert [event.event for event in store.events(bench.sweep_id)] == [
        "benched",
        "unbenched",
        "benched",
    ]


def test_of_an_owner_and_a_person_who_bench_a_node_at_once_one_is_told_that_it_was(
    store_url: str,
) -> None:
    """The second statement waits for the first one's transaction, and then finds the row."""
    with Store.open(store_url) as owners, Store.open(store_url) as persons:
        bench = Bench.on(owners)
        with ThreadPoolExecutor(2) as both:
            for turn in range(20):
                owner = partial(
                    owners.bench,
                    bench.sweep_id,
                    f"n{turn}",
                    reason=BenchReason.SLOW,
                    is_remeasured=True,
                    epoch=bench.epoch,
                )
                person = partial(
                    persons.bench,
                    bench.sweep_id,
                    f"n{turn}",
                    reason=BenchReason.ASKED,
                    is_remeasured=False,
                )
                told = [asked.result() for asked in [both.submit(owner), both.submit(person)]]
                assert sorted(told) == [False, True]
        assert len(owners.benches(bench.sweep_id)) == len(owners.events(bench.sweep_id)) == 20


def test_a_bench_whose_answers_are_lost_says_what_it_did(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench.on(store)
    trial_id = measured(bench, 1, "a")
    monkeypatch.setattr(Database, "write", losing_answers(Database.write))
    assert store.bench(
        bench.sweep_id, "a", reason=BenchReason.SLOW, is_remeasured=True, epoch=bench.epoch
    )
    assert store.remeasure(bench.sweep_id, bench.epoch, ["a"]) == {bench.cell_id}, (
        "its owner has to know that trials wait"
    )
    assert store.unbench(bench.sweep_id, "a")
    assert not store.unbench(bench.sweep_id, "a")
    assert store.trial(trial_id).trial.state is TrialState.QUEUED
    assert [e.event for e in store.events(bench.sweep_id)][-3:] == [
        "benched",
        "invalidated",
        "unbenched",
    ]


def test_an_owner_that_lost_its_lease_says_nothing_of_nodes(store: Store) -> None:
    replaced = Bench.on(store)
    store.release(replaced.sweep_id, replaced.epoch)
    Bench.on(store)
    with pytest.raises(LeaseLost):
        store.record_node_checks(
            replaced.sweep_id, replaced.epoch, {"a": node("a")}, judge_nodes([node("a")])
        )
    assert store.node_checks(replaced.sweep_id) == {}


def test_an_owner_that_lost_its_lease_benches_nobody(store: Store) -> None:
    bench = Bench.on(store)
    store.release(bench.sweep_id, bench.epoch)
    with pytest.raises(LeaseLost):
        store.bench(
            bench.sweep_id, "a", reason=BenchReason.SLOW, is_remeasured=True, epoch=bench.epoch
        )
    with pytest.raises(LeaseLost):
        store.remeasure(bench.sweep_id, bench.epoch, ["a"])
    assert store.benches(bench.sweep_id) == []


def test_what_was_measured_on_a_benched_node_waits_to_be_measured_again(store: Store) -> None:
    bench = Bench.on(store)
    on_a, on_b, on_both = (
        measured(bench, 1, "a"),
        measured(bench, 2, "b"),
        measured(bench, 4, "b", "a"),
    )
    assert store.remeasure(bench.sweep_id, bench.epoch, ["a"]) == {bench.cell_id}
    states = {trial.id: trial.state for trial in store.trials(bench.sweep_id)}
    assert states == {
        on_a: TrialState.QUEUED,
        on_b: TrialState.MEASURED,
        on_both: TrialState.QUEUED,
    }
    detail = store.trial(on_a)
    assert [attempt.superseded for attempt in detail.attempts] == [True]
    assert (detail.events[-1].event, detail.events[-1].detail) == (
        "invalidated",
        {"benched": ["a"]},
    )
    assert store.remeasure(bench.sweep_id, bench.epoch, ["a"]) == set()
    assert [run.trial for run in store.node_runs(bench.sweep_id)] == [on_b]


def test_a_trial_that_is_under_way_again_is_left_alone(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = measured(bench, 1, "a")
    assert store.remeasure(bench.sweep_id, bench.epoch, ["a"], except_trials={trial_id}) == set()
    assert store.trial(trial_id).trial.state is TrialState.MEASURED


def test_faults_of_the_machine_are_counted_by_node(store: Store) -> None:
    bench = Bench.on(store)
    for kind, event in (
        (FailureKind.NODE_LOST, TrialEvent.REQUEUED),
        (FailureKind.DEVICE_ERROR, TrialEvent.REQUEUED),
        (FailureKind.USER_ERROR, TrialEvent.FAILED),
    ):
        trial_id, attempt = bench.start(len(store.trials(bench.sweep_id)) + 1)
        record_failure(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            failure=failure(kind, node="a"),
            event=event,
        )
    assert store.node_faults(bench.sweep_id) == {"a": 2}
