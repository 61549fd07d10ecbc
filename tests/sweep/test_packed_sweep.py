"""The loop on several nodes: gangs of all sizes are started, several on a node where they fit.

The loop goes on if nodes are lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from db.store import Store
from orchestrator.cluster.contract import SchedulerEvent, Slots
from orchestrator.core.machines.packing import Shape
from orchestrator.core.sweepfile.measurement_section import WAIT_FOR_NODES_SECONDS
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.sweep.progress import Stop, StopReason
from tests.sweep.fake_scheduler import FakeScheduler, Script
from tests.sweep.test_loop import fast, run, spec, states

TWO_NODES = {"a": 2, "b": 2}
SIZES = {
    "gpus": [1, 2, 4],
    "gpus_per_node": 2,
    "axes": {"micro_batch_size": [1, 2], "recompute": ["none", "full"]},
}


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


class Nodes(FakeScheduler):
    """Notes which trials ran on the same node; loses nodes and finds them again.

    The number of attempts that have ended decides when.
    """

    def __init__(
        self,
        script: Script,
        changes: Mapping[int, Mapping[str, int]] | None = None,
        at_idle: Callable[[], None] = lambda: None,
    ):
        super().__init__(script, device=Device.CUDA, nodes=TWO_NODES)
        self._changes, self._at_idle, self._ended = dict(changes or {}), at_idle, 0
        # The trial of each start, and the others on its nodes then.
        self.beside: list[tuple[int, set[int]]] = []

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        others = {
            other for other in self._running if not set(self.nodes_of[other]).isdisjoint(nodes)
        }
        super().start(request, shape, nodes)
        self.beside.append((request.trial_id, others))

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        events = super().poll(timeout_seconds)
        if not events:
            self._at_idle()
        self._ended += bool(events)
        if self._ended in self._changes:
            nodes = self._changes.pop(self._ended)
            self._slots = Slots(device=Device.CUDA, device_name=None, nodes=nodes)
            self._free_slots.resize(nodes)
        return events


def test_gangs_of_all_sizes_are_measured_beside_each_other_and_never_on_the_same_slot(
    store: Store,
) -> None:
    # The fake raises where a slot is given twice.
    _, scheduler = run(store, fast, spec=spec(**SIZES), scheduler=Nodes(fast))
    assert states(store) == {TrialState.MEASURED: len(scheduler.started)}
    assert scheduler.most_at_once > 1
    assert any(others for _, others in scheduler.beside)
    assert scheduler.started[0][0].world_size == 1, (
        "first trials: the cheapest go first, and teach the others"
    )
    nodes = {trial.id: store.trial(trial.id).attempts[0].nodes for trial in store.trials(1)}
    assert {len(on) for on in nodes.values() if on is not None} == {1, 2}
    assert nodes == {trial_id: tuple(on) for trial_id, on in scheduler.nodes_of.items()}
    assert all(list(on) == sorted(on) for on in nodes.values() if on is not None), (
        "in rank order: by name"
    )


def test_who_wants_clean_numbers_has_its_nodes_for_itself(store: Store) -> None:
    _, scheduler = run(
        store, fast, spec=spec(**SIZES, measurement={"exclusive": "node"}), scheduler=Nodes(fast)
    )
    assert states(store)[TrialState.MEASURED] == len(scheduler.started)
    assert not any(others for _, others in scheduler.beside)
    assert scheduler.most_at_once == 2, "one gang of less than a node on each of the two"


def test_a_retry_after_the_host_ran_out_of_memory_has_its_node_alone_while_others_go_on(
    store: Store,
) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        bad = (
            request.layout.world_size == 1
            and request.layout.micro_batch_size == 2
            and request.attempt == 1
        )
        return FailureKind.OOM_HOST if bad else fast(request)

    scheduler = Nodes(script)
    run(store, script, spec=spec(**SIZES), scheduler=scheduler)
    again = [t.id for t in store.trials(1) if t.num_attempts == 2]
    assert again
    of_second_attempts = [
        others
        for trial_id, others in scheduler.beside[-len(scheduler.beside) :]
        if trial_id in again
    ][len(again) :]
    assert of_second_attempts
    assert not any(of_second_attempts)


class Fragile(FakeScheduler):
    """One trial takes its node down, with all that runs there, each time."""

    def __init__(self, poison: int) -> None:
        super().__init__(self.end, device=Device.CUDA, nodes={"a": 8, "b": 8})
        self._poison = poison
        self._doomed: set[int] = set()
        # How many others each end of the poison took down.
        self.company: list[int] = []

    def end(self, request: TrialRequest) -> float | FailureKind:
        if request.trial_id == self._poison:
            others = {
                other
                for other in self._running
                if self.nodes_of[other] == self.nodes_of[self._poison]
            }
            self._doomed |= others
            self.company.append(len(others))
            return FailureKind.NODE_LOST
        if request.trial_id in self._doomed:
            self._doomed.discard(request.trial_id)
            return FailureKind.NODE_LOST
        return fast(request)


@pytest.mark.parametrize("poison", [1, 4, 9])
def test_what_was_lost_beside_a_trial_that_takes_nodes_down_is_not_given_up_with_it(
    store: Store, poison: int
) -> None:
    wide = spec(
        gpus=1,
        global_batch_size=64,
        axes={"micro_batch_size": [1, 2, 4, 8, 16, 32, 64], "recompute": ["none", "full"]},
    )
    scheduler = Fragile(poison)
    run(store, fast, spec=wide, scheduler=scheduler, clock=time.monotonic)
    assert states(store) == {TrialState.MEASURED: 13, TrialState.FAILED: 1}
    assert store.trial(poison).trial.state is TrialState.FAILED
    assert scheduler.company[0] > 0
    assert scheduler.company[1:] == [0], "alone the second time: then it is its own doing"


def test_what_lost_its_node_is_alone_in_the_next_call_too(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        if request.trial_id == 1:
            asked.append(Stop.CANCEL)
            return FailureKind.NODE_LOST
        return fast(request)

    asked: list[Stop] = []
    sizes = {**SIZES, "gpus": [1]}
    run(
        store,
        script,
        spec=spec(**sizes),
        scheduler=Nodes(script),
        stop=lambda: asked[-1] if asked else Stop.GO_ON,
    )
    assert store.trial(1).trial.state is TrialState.QUEUED
    scheduler = Nodes(fast)
    run(store, fast, spec=spec(**sizes), scheduler=scheduler)
    assert states(store) == {TrialState.MEASURED: 4}
    assert [others for trial_id, others in scheduler.beside if trial_id == 1] == [set()]
    assert not any(1 in others for _, others in scheduler.beside)


def test_without_enough_nodes_a_cell_waits_for_others_and_is_then_given_up(store: Store) -> None:
    now = [0.0]

    def wait() -> None:
        now[0] += WAIT_FOR_NODES_SECONDS / 3

    scheduler = Nodes(fast, {1: {"a": 2}}, at_idle=wait)
    result, _ = run(store, fast, spec=spec(**SIZES), scheduler=scheduler, clock=lambda: now[0])
    reasons = {cell.num_gpus: reason for cell, reason in result.stopped.items()}
    assert reasons == {1: StopReason.EXHAUSTED, 2: StopReason.EXHAUSTED, 4: StopReason.NODES}
    assert now[0] > WAIT_FOR_NODES_SECONDS
    assert not result.finished


@pytest.mark.parametrize("patience", [60.0, 7200.0])
def test_how_long_nodes_are_waited_for_is_the_files_to_say(store: Store, patience: float) -> None:
    now = [0.0]

    def wait() -> None:
        now[0] += 20.0

    chosen = spec(**SIZES, measurement={"wait_for_nodes": patience})
    result, _ = run(
        store,
        fast,
        spec=chosen,
        scheduler=Nodes(fast, {1: {"a": 2}}, at_idle=wait),
        clock=lambda: now[0],
    )
    assert StopReason.NODES in result.stopped.values()
    assert patience < now[0] <= patience + 40.0


def test_each_node_that_goes_is_waited_for_anew_and_one_that_comes_and_goes_is_not(
    store: Store,
) -> None:
    """One of four nodes is gone from the first end on, another after 50 s; the latter comes and
    goes ever after.
    """
    now = [0.0]
    all_nodes = {"a": 2, "b": 2, "c": 2, "d": 2}
    without_d = dict.fromkeys("abc", 2)

    class Flapping(Nodes):
        def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
            events = super().poll(timeout_seconds)
            if events:
                return events
            now[0] += 10.0
            is_gone = now[0] >= 50.0 and int(now[0] // 10) % 2 == 1
            nodes = dict.fromkeys("ab", 2) if is_gone else without_d
            self._slots = Slots(device=Device.CUDA, device_name=None, nodes=nodes)
            self._free_slots.resize(nodes)
            return events

    scheduler = Flapping(fast, {1: without_d})
    scheduler._slots = Slots(device=Device.CUDA, device_name=None, nodes=all_nodes)
    scheduler._free_slots.resize(all_nodes)
    chosen = spec(
        gpus=[1, 8],
        gpus_per_node=2,
        axes={"micro_batch_size": [1], "recompute": "none"},
        measurement={"wait_for_nodes": 100},
    )
    result, _ = run(store, fast, spec=chosen, scheduler=scheduler, clock=lambda: now[0])
    assert StopReason.NODES in result.stopped.values()
    assert 50.0 + 100.0 < now[0] <= 50.0 + 120.0


def test_nodes_that_come_back_are_used_again(store: Store) -> None:
    now = [0.0]
    scheduler = Nodes(fast, {1: {"a": 2}})

    def wait() -> None:
        now[0] += WAIT_FOR_NODES_SECONDS / 3
        scheduler._changes[scheduler._ended] = TWO_NODES

    scheduler._at_idle = wait
    result, _ = run(store, fast, spec=spec(**SIZES), scheduler=scheduler, clock=lambda: now[0])
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert 0 < now[0] < WAIT_FOR_NODES_SECONDS


def test_a_search_that_waits_for_its_last_trial_holds_up_nobody(store: Store) -> None:
    """The large cell has nothing left to launch while its last trial runs: no nodes are kept for
    it.
    """
    order: list[Any] = []

    class Watching(Nodes):
        def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
            super().start(request, shape, nodes)
            order.append((request.layout.world_size, len(self._running)))

    sizes = {**SIZES, "gpus": [1, 2]}
    run(store, fast, spec=spec(**sizes), scheduler=Watching(fast))
    last_large = max(index for index, (size, _) in enumerate(order) if size == 2)
    assert any(size == 1 and running > 1 for size, running in order[: last_large + 3])


@pytest.mark.parametrize(("comes_back", "num_runs"), [(True, 6), (False, 4)])
def test_a_winner_waits_for_the_nodes_that_it_is_confirmed_on_as_a_search_does(
    store: Store, comes_back: bool, num_runs: int
) -> None:
    """They go with the fourth of its four layouts."""
    now = [0.0]
    scheduler = Nodes(fast, {4: {"a": 2}})

    def wait() -> None:
        now[0] += WAIT_FOR_NODES_SECONDS / 3
        if comes_back:
            scheduler._changes[scheduler._ended] = TWO_NODES

    scheduler._at_idle = wait
    result, _ = run(
        store,
        fast,
        spec=spec(**SIZES | {"gpus": [4]}, repeats=1),
        scheduler=scheduler,
        clock=lambda: now[0],
    )
    # Without them nothing is confirmed, and the next call goes on.
    reason = StopReason.EXHAUSTED if comes_back else StopReason.NODES
    assert set(result.stopped.values()) == {reason}
    assert result.finished is comes_back
    assert len(scheduler.started) == num_runs
    assert (
        (0 < now[0] < WAIT_FOR_NODES_SECONDS) if comes_back else (now[0] > WAIT_FOR_NODES_SECONDS)
    )
