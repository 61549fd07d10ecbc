"""Links measured gang after gang: which spans, and what is written down of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.cluster.contract import Finished, SchedulerEvent
from orchestrator.core.machines.packing import Shape
from orchestrator.core.physics.link_sample import Collective
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import CollectiveTime, Device, RankResult, TrialRequest
from orchestrator.sweep.netbench import measure_links, shapes, sizes
from tests.cli.conftest import Sweep, sweep
from tests.sweep.fake_scheduler import FakeScheduler

__all__ = ["sweep"]  # a fixture


@pytest.fixture
def store(
    sqlite_store: Store, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Store:
    monkeypatch.setenv("SWEEP_DB", sqlite_url)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    return sqlite_store


@pytest.mark.parametrize(
    ("slots_of", "expected"),
    [
        ({"a": 1}, []),
        ({"a": 2}, [(1, 2)]),
        ({"a": 8}, [(1, 2), (1, 4), (1, 8)]),
        ({"a": 8, "b": 8}, [(1, 2), (1, 4), (1, 8), (2, 1), (2, 8)]),
        ({"a": 1, "b": 1, "c": 1}, [(2, 1), (3, 1)]),
        (
            {"a": 6, "b": 4},
            [(1, 2), (1, 4), (1, 6), (2, 1), (2, 4)],
            # Gangs take as much of every node.
        ),
    ],
)
def test_spans_are_those_inside_a_node_and_those_between(
    slots_of: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    assert [(shape.num_nodes, shape.slots_per_node) for shape in shapes(slots_of)] == expected


def test_sizes_grow_fourfold_up_to_the_largest() -> None:
    assert sizes(70_000) == [1 << 10, 1 << 12, 1 << 14, 1 << 16]
    assert sizes(256 << 20)[-1] == 256 << 20


class Links(FakeScheduler):
    """Two nodes with two slots: an all-reduce takes 10 us and 1 GB/s; the gang over all four slots
    fails.
    """

    def __init__(self) -> None:
        super().__init__(lambda _: 1.0, device=Device.CUDA, nodes={"a": 2, "b": 2})

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        (end,) = [event for event in super().poll(timeout_seconds) if isinstance(event, Finished)]
        asked, nodes = self.asked, self.nodes_of[end.trial_id]
        if asked.layout.world_size == 4:
            failure = Failure(
                kind=FailureKind.NCCL, message="unhandled system error", node=nodes[1]
            )
            return [Finished(trial_id=end.trial_id, reports=[], failure=failure, gpu_seconds=1.0)]
        times = [
            CollectiveTime(
                collective="all_reduce",
                message_bytes=size,
                seconds=10e-6 + size / 1e9,
                num_calls=50,
            )
            for size in asked.options["sizes"]
        ]
        results = [
            RankResult(
                step_seconds=[1.0],
                collectives=times,
                stack=Stack(device_name="NVIDIA H200", nccl="2.29"),
            ),
            None,
        ]
        ranks = [
            RankOutcome(rank=rank, exit_code=0, result=result)
            for rank, result in enumerate(results)
        ]
        return [
            Finished(
                trial_id=end.trial_id,
                reports=[NodeReport(node=nodes[0], ranks=ranks)],
                failure=None,
                gpu_seconds=1.0,
            )
        ]

    def start(self, request: TrialRequest, shape: Shape, nodes: object) -> None:
        self.asked = request
        super().start(request, shape, nodes)  # type: ignore[arg-type]  # as it came


def test_what_each_span_measured_is_kept_and_one_that_fails_stops_nobody(store: Store) -> None:
    scheduler = Links()
    results = list(
        measure_links(
            scheduler,
            store,
            run_token="run",
            largest_bytes=1 << 20,
            collectives=[Collective.ALL_REDUCE],
        )
    )
    assert [(one.span.num_nodes, one.span.num_ranks, one.failure is None) for one in results] == [
        (1, 2, True),
        (2, 2, True),
        (2, 4, False),
    ]
    assert scheduler.most_at_once == 1, "two at once would share links"
    assert list(scheduler.nodes_of.values()) == [("a",), ("a", "b"), ("a", "b")]
    rows = store.links("run")
    assert len(rows) == 2 * 6  # 1 KiB to 1 MiB
    largest = max(rows, key=lambda row: row.sample.message_bytes)
    # With two ranks, it is as large as the algorithm's.
    assert largest.sample.bus_bytes_per_second == pytest.approx(0.99e9, rel=0.01)
    assert (largest.backend, largest.device_name, largest.nccl, largest.num_calls) == (
        "nccl",
        "NVIDIA H200",
        "2.29",
        50,
    )
    assert store.links("another") == []


class LosesANode(FakeScheduler):
    """One of its nodes is lost with the first gang that needs it.

    `back`: after so many further looks it is there again.
    """

    def __init__(self, node: str, *, nodes: dict[str, int], back: int | None = None) -> None:
        super().__init__(lambda _: 1.0, device=Device.CUDA, nodes=nodes)
        self._of_all, self._node, self._back = nodes, node, back
        self.is_seen_at_once = True

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if not self.num_running:
            self._back = self._back - 1 if self._back is not None else None
            if self._back == 0:
                self._slots = replace(self._slots, nodes=self._of_all)
            return []
        (end,) = [event for event in super().poll(timeout_seconds) if isinstance(event, Finished)]
        if self._node not in self.nodes_of[end.trial_id]:
            return [end]
        lost, self._node = self._node, ""
        if self.is_seen_at_once:
            self._slots = replace(
                self._slots,
                nodes={node: count for node, count in self._of_all.items() if node != lost},
            )
        failure = Failure(kind=FailureKind.NODE_LOST, message="its node is gone", node=lost)
        return [replace(end, failure=failure)]


def spans(
    scheduler: LosesANode, store: Store, *, patience_seconds: float
) -> list[tuple[int, tuple[str, ...], str | None]]:
    """Ranks, nodes, and what it died of, of each span."""
    asked = {
        "run_token": "run",
        "largest_bytes": 1024,
        "collectives": [Collective.ALL_REDUCE],
        "patience_seconds": patience_seconds,
    }
    found = measure_links(scheduler, store, **asked)  # type: ignore[arg-type]  # of several types
    return [
        (one.span.num_ranks, one.nodes, one.failure.message if one.failure is not None else None)
        for one in found
    ]


def test_a_node_that_goes_fails_the_spans_that_it_is_needed_for_and_ends_nothing(
    store: Store,
) -> None:
    assert spans(LosesANode("b", nodes={"a": 2, "b": 2}), store, patience_seconds=0.0) == [
        (2, ("a",), None),
        (2, ("a", "b"), "its node is gone"),
        (4, ("a",), "1 of its 2 nodes left: nodes went while others were measured"),
    ]


def test_a_node_that_comes_back_in_time_fails_nothing_else(store: Store) -> None:
    scheduler = LosesANode("b", nodes={"a": 2, "b": 2}, back=3)
    assert [failure for *_, failure in spans(scheduler, store, patience_seconds=60.0)] == [
        None,
        "its node is gone",
        None,
    ]


def test_a_node_that_is_dead_and_not_known_to_be_is_taken_last(store: Store) -> None:
    scheduler = LosesANode("a", nodes={"a": 4, "b": 4})
    scheduler.is_seen_at_once = False
    assert spans(scheduler, store, patience_seconds=0.0)[:2] == [
        (2, ("a",), "its node is gone"),
        (4, ("b",), None),
    ]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_command_measures_this_machine_and_predictions_can_rest_on_it(
    store: Store, sweep: Sweep
) -> None:
    out, err = sweep("netbench", "--max-bytes", "16384", "--json")
    found = json.loads(out)
    assert {(one["num_ranks"], one["num_nodes"]) for one in found["fits"]} >= {(2, 1)}
    assert all(
        one["latency_seconds"] > 0 and one["bus_bytes_per_second"] > 0 for one in found["fits"]
    )
    assert "2 ranks on 1 node: 12 measurements" in err
    assert len(store.links(found["run_token"])) == sum(
        len(one["samples"]) for one in found["spans"]
    )
