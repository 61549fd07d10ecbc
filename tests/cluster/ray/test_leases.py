"""Leases, against the packing that assigns their slots; without Ray, as in test_scheduler.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import OutOfMemoryError as RayOutOfMemory
from ray.exceptions import RayActorError

from db.store import Store
from orchestrator.cluster.contract import Finished, SchedulerEvent, Slots
from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.ray import gang
from orchestrator.cluster.ray.leases import Lease, LeasePart, Leases
from orchestrator.cluster.simulated import SimulatedScheduler, simulated
from orchestrator.core.machines.packing import FreeOnNode, FreeSlots, Shape, WaitingGang
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import Device, TrialRequest
from tests.node.launching import order
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_loop import run, spec

SLOTS = {"a": 8, "b": 8, "c": 6}
WIDTHS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16])


class _Nodes:
    device = Device.CPU
    slots = Slots(device=Device.CPU, device_name=None, nodes=SLOTS)


class LeasesOfNobody(Leases):
    """Leases without agents. Counts the leases that were formed."""

    def __init__(self) -> None:
        super().__init__(cast(Any, _Nodes()), cast(Any, None), LeaseMeter(0.0), root="")
        self.num_formed = 0

    def _form(self, num_slots: int, node: str, program: str) -> Lease:
        self.num_formed += 1
        lease = Lease(
            node=node,
            node_id=node,
            num_slots=num_slots,
            group=cast(Any, None),
            agent=None,
            asked_at=time.monotonic(),
        )
        self._keep(lease)
        return lease

    def _close_agents(self, leases: Sequence[Lease]) -> None:
        """There are none."""

    def _remove(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            assert lease.is_idle
            self._forget(lease)

    def _await_free(self, num_slots: int) -> None:
        """They are free at once."""

    def check(self) -> None:
        for node, slots in SLOTS.items():
            here = self._on.get(node, [])
            assert sum(lease.num_slots for lease in here) <= slots, "no slot is leased twice"
            for lease in here:
                taken = [slot for part in lease.parts for slot in part.slots]
                assert len(taken) == len(set(taken)), "no slot of a lease is two attempts'"
                assert len({part.slots[0] for part in lease.parts}) == len(lease.parts), (
                    "no two attempts have one launcher"
                )
                assert set(taken) <= set(range(lease.num_slots))


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["start", "start", "end"]), WIDTHS, st.integers(0, 9)),
        max_size=60,
    )
)
def test_what_packing_starts_where_there_is_room_can_always_be_leased(
    moves: list[tuple[str, int, int]],
) -> None:
    leases, free_slots = LeasesOfNobody(), FreeSlots(SLOTS)
    running: dict[int, list[LeasePart]] = {}
    for number, (move, width, which) in enumerate(moves):
        if move == "start":
            shape = Shape.of(width, gpus_per_node=8)
            found = free_slots.next_start(
                [WaitingGang(shape=shape, seconds=1.0)],
                now=0.0,
                free_on_nodes=leases.free_on_nodes(),
            )
            if found is not None:
                free_slots.take(number, shape, found.nodes, ends_at=1.0)
                running[number] = leases.take(shape.slots_per_node, found.nodes, program="")
                assert [(part.node, len(part.slots)) for part in running[number]] == [
                    (node, shape.slots_per_node) for node in found.nodes
                ]
        elif running:
            ended = sorted(running)[which % len(running)]
            leases.put_back(running.pop(ended))
            free_slots.give_back(ended)
        leases.check()
    for parts in running.values():
        leases.put_back(parts)
    for node, slots in SLOTS.items():
        assert node not in leases.free_on_nodes() or leases.free_on_nodes()[node].widest == slots, (
            "once all are idle a node takes whatever it holds"
        )


@given(widths=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=40))
def test_a_node_that_a_wide_gang_has_leased_serves_narrower_ones_with_the_same_agent(
    widths: list[int],
) -> None:
    leases = LeasesOfNobody()
    leases.put_back(leases.take(8, ["a"], program=""))
    for width in widths:
        leases.put_back(leases.take(width, ["a"], program=""))
    assert leases.num_formed == 1


class SchedulerWithLeases(FakeScheduler):
    """Its attempts have parts of leases. Several end in one poll, as if the loop had been busy."""

    def __init__(self, chance: Random) -> None:
        super().__init__(
            lambda request: 1.0 / request.layout.micro_batch_size, nodes=SLOTS, device=Device.CUDA
        )
        self._leases, self._chance = LeasesOfNobody(), chance
        self._parts: dict[int, list[LeasePart]] = {}

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return self._leases.free_on_nodes()

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        super().start(request, shape, nodes)
        self._parts[request.trial_id] = self._leases.take(shape.slots_per_node, nodes, program="")
        self._leases.check()

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        events: list[SchedulerEvent] = []
        for _ in range(self._chance.randrange(1, 6)):
            events += super().poll(timeout_seconds)
        for event in events:
            if isinstance(event, Finished):
                self._leases.put_back(self._parts.pop(event.trial_id))
        return events


@pytest.mark.parametrize("seed", range(10))
def test_what_a_loop_starts_together_finds_the_room_that_it_was_chosen_for(
    sqlite_store: Store, seed: int
) -> None:
    """Several gangs on parts of one node take slots that the next one was to have."""
    axes = {"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"], "zero_stage": [0, 1]}
    wanted = spec(
        gpus=[1, 2, 3, 4, 6],
        global_batch_size=48,
        axes=axes,
        gpus_per_node=8,
        search={"strategy": "random", "seed": seed},
    )
    result, scheduler = run(
        sqlite_store, lambda _: 1.0, spec=wanted, scheduler=SchedulerWithLeases(Random(seed))
    )
    assert result.finished
    assert {layout.world_size for layout, _ in scheduler.started} == {1, 2, 3, 4, 6}


def test_an_attempt_whose_lease_was_lost_before_it_began_never_begins() -> None:
    """Its agent died before it had started, and another attempt noticed that first."""
    leases = LeasesOfNobody()
    (first,), (second,) = leases.take(2, ["a"], program=""), leases.take(2, ["b"], program="")
    lease = first.lease
    leases.put_back([first])
    (third,), (fourth,) = (leases.take(1, ["a"], program="") for _ in range(2))
    assert {third.lease, fourth.lease} == {lease}
    lease.reserved_at = 0.0
    leases._forget(lease)
    leases._returned(lease)
    assert lease.is_shared, "which of the two its agent died of, nobody knows"
    leases.begin([fourth])
    leases.begin([third])
    assert not leases._meter._attempts, "nobody would end them"
    leases.put_back([third, fourth, second])


def test_of_an_agent_that_ran_out_of_memory_beside_others_nobody_knows_whose_ranks_it_was() -> None:
    leases = LeasesOfNobody()
    (whole,) = leases.take(4, ["a"], program="")
    leases.put_back([whole])
    (alone,) = leases.take(1, ["a"], program="")
    assert why_lost(alone) is FailureKind.OOM_HOST
    (beside,) = leases.take(2, ["a"], program="")
    leases._forget(alone.lease)
    # The first attempt to notice discards the agent, and then the other one notices.
    leases._returned(alone.lease)
    assert (why_lost(alone), why_lost(beside)) == (FailureKind.NODE_LOST, FailureKind.NODE_LOST)


def test_a_lost_agent_is_the_same_failure_as_a_simulated_lost_node() -> None:
    scheduler = SimulatedScheduler(simulated(spec(gpus=[1])), node_loss_hours=1e-6)
    (node,) = scheduler.slots.nodes
    asked = order().request
    scheduler.start(asked, Shape(num_nodes=1, slots_per_node=asked.layout.world_size), [node])
    (end,) = scheduler.poll(1.0)
    assert isinstance(end, Finished)
    (lost,) = LeasesOfNobody().take(1, ["a"], program="")
    failure = gang.why_lost(lost, RayActorError())
    assert end.failure is not None
    assert failure.message.startswith("lost the agent on node a: ")
    assert end.failure == replace(
        failure, node=node, message=f"lost the agent on node {node}: simulated"
    )


def why_lost(part: LeasePart) -> FailureKind:
    return gang.why_lost(part, RayOutOfMemory("the node is full")).kind


def test_a_gang_takes_the_lease_that_it_leaves_the_fewest_slots_of() -> None:
    leases = LeasesOfNobody()
    narrow, wide = leases.take(2, ["a"], program=""), leases.take(6, ["a"], program="")
    leases.put_back([*narrow, *wide])
    (part,) = leases.take(2, ["a"], program="")
    assert part.lease is narrow[0].lease


def test_a_gang_wider_than_any_lease_is_put_in_the_place_of_those_on_which_nothing_runs() -> None:
    leases = LeasesOfNobody()
    first, second, third = (leases.take(width, ["a"], program="") for width in (2, 2, 4))
    leases.put_back([*first, *third])
    assert leases.free_on_nodes()["a"].widest == 6
    assert leases.free_on_nodes()["a"].standing == 4
    (part,) = leases.take(6, ["a"], program="")
    assert part.slots == (0, 1, 2, 3, 4, 5)
    assert leases.free_on_nodes()["a"].widest == 0
    leases.put_back([*second, part])
