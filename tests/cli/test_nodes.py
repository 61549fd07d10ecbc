"""The commands about nodes, and the doctor of a whole cluster."""

from __future__ import annotations

import json

import pytest

from db.sql import readonly
from db.store import Store
from db.types import BenchReason
from orchestrator.core.machines.node_health import judge_nodes
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from tests.cli.conftest import Sweep
from tests.core.machines.test_node_health import node
from tests.db.builders import Bench, failure, record_failure
from tests.db.write.test_nodes import measured


def fill(store: Store) -> Bench:
    """Node a is well, b is 20 % slower in every common layout, c failed once, d was not fit."""
    bench = Bench.on(store)
    for number in range(1, 13):
        slower = 1.2 if number % 2 else 1.0
        measured(bench, number, "b" if number % 2 else "a", rate=2000.0 / slower)
    trial_id, attempt = bench.start(50)
    lost = failure(FailureKind.NODE_LOST, node="c")
    record_failure(
        store, trial_id, attempt, epoch=bench.epoch, failure=lost, event=TrialEvent.REQUEUED
    )
    facts = node("d", xids={79: 1})
    store.record_node_checks(bench.sweep_id, bench.epoch, {"d": facts}, judge_nodes([facts]))
    return bench


def test_nodes_are_shown_with_what_is_known_of_each(store: Store, sweep: Sweep) -> None:
    bench = fill(store)
    store.bench(
        bench.sweep_id,
        "b",
        reason=BenchReason.SLOW,
        is_remeasured=True,
        evidence={"slower": 0.2},
        epoch=bench.epoch,
    )
    out, _ = sweep("nodes")
    lines = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert "used" in lines["a"]
    assert "benched, slow: 20.0% slower" in lines["b"]
    assert " 1 " in lines["c"]
    assert "not fit: xid: 1 x Xid 79" in lines["d"]
    found = {one["node"]: one for one in json.loads(sweep("nodes", "--json")[0])["nodes"]}
    assert [found[name]["num_measurements"] for name in "abcd"] == [6, 6, 0, 0]
    assert (found["b"]["bench_reason"], found["c"]["num_faults"], found["d"]["is_fit"]) == (
        "slow",
        1,
        False,
    )


def test_a_sweep_without_nodes_says_so(store: Store, sweep: Sweep) -> None:
    Bench.on(store)
    assert "was placed on a node yet" in sweep("nodes")[0]


def test_a_person_benches_a_node_and_takes_it_back(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    assert (
        "is benched in sweep tiny; what it measured is measured again"
        in sweep("bench", "gpu-17", "--again")[0]
    )
    assert [(row.node, row.is_remeasured) for row in store.benches(bench.sweep_id)] == [
        ("gpu-17", True)
    ]
    assert "was benched before" in sweep("bench", "gpu-17")[0]
    assert json.loads(sweep("unbench", "gpu-17", "--json")[0])["unbenched"] is True
    assert "is not benched" in sweep("unbench", "gpu-17")[0]
    assert all(row.until is not None for row in store.benches(bench.sweep_id))


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_doctor_looks_at_every_node_of_a_cluster(
    store: Store, sweep: Sweep, sqlite_url: str
) -> None:
    out, err = sweep("doctor", "--cluster", "--json")
    assert "Starting a local Ray" in err
    found = json.loads(out)
    (one,) = found["nodes"]
    assert found["ok"] and one["is_fit"]
    assert {check["name"] for check in one["checks"]} == {
        "gpus",
        "ecc",
        "xid",
        "disk",
        "clock",
        "matmul",
        "versions",
    }
    rows = readonly.query(
        sqlite_url, "SELECT node, is_fit FROM node_check WHERE sweep_id IS NULL"
    ).rows
    assert [name for name, _ in rows] == [one["node"]]
