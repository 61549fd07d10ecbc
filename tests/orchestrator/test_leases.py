"""What is leased of nodes, against the packing that hands their slots out; without Ray, which has its own tests (test_scheduler.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.packing import Floor, Shape, WaitingGang
from orchestrator.core.protocol import Device
from orchestrator.gang import Slots
from orchestrator.lease_meter import LeaseMeter
from orchestrator.leases import Lease, Leases, Part

SLOTS = {"a": 8, "b": 8, "c": 6}
WIDTHS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16])


class _Nodes:
    device = Device.CPU
    slots = Slots(device=Device.CPU, device_name=None, nodes=SLOTS)


class LeasesOfNobody(Leases):
    """Leases in which no agent stands. It counts those that were formed."""

    def __init__(self) -> None:
        super().__init__(cast(Any, _Nodes()), cast(Any, None), LeaseMeter(0.0), root="")
        self.num_formed = 0

    def _form(self, num_slots: int, node: str, program: str) -> Lease:
        self.num_formed += 1
        lease = Lease(node=node, node_id=node, num_slots=num_slots, group=cast(Any, None), agent=None, asked_at=time.monotonic())
        self._held.append(lease)
        return lease

    def _close_agents(self, leases: Sequence[Lease]) -> None:
        """There are none."""

    def _remove(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            assert lease.is_idle
            self._held.remove(lease)

    def _await_free(self, num_slots: int) -> None:
        """They are free at once."""

    def check(self) -> None:
        for node, slots in SLOTS.items():
            here = [lease for lease in self._held if lease.node == node]
            assert sum(lease.num_slots for lease in here) <= slots, "no slot is leased twice"
            for lease in here:
                taken = [slot for part in lease.parts for slot in part.slots]
                assert len(taken) == len(set(taken)), "no slot of a lease is two attempts'"
                assert len({part.slots[0] for part in lease.parts}) == len(lease.parts), "no two attempts have one launcher"
                assert set(taken) <= set(range(lease.num_slots))


@given(moves=st.lists(st.tuples(st.sampled_from(["start", "start", "end"]), WIDTHS, st.integers(0, 9)), max_size=60))
def test_what_packing_starts_where_there_is_room_can_always_be_leased(moves: list[tuple[str, int, int]]) -> None:
    leases, floor = LeasesOfNobody(), Floor(SLOTS)
    running: dict[int, list[Part]] = {}
    for number, (move, width, which) in enumerate(moves):
        if move == "start":
            shape = Shape.of(width, gpus_per_node=8)
            found = floor.next_start([WaitingGang(shape=shape, seconds=1.0)], now=0.0, rooms=leases.rooms())
            if found is not None:
                floor.take(number, shape, found.nodes, ends_at=1.0)
                running[number] = leases.take(shape.slots_per_node, found.nodes, program="")
                assert [(part.node, len(part.slots)) for part in running[number]] == [(node, shape.slots_per_node) for node in found.nodes]
        elif running:
            ended = sorted(running)[which % len(running)]
            leases.put_back(running.pop(ended))
            floor.give_back(ended)
        leases.check()
    for parts in running.values():
        leases.put_back(parts)
    for node, slots in SLOTS.items():
        assert node not in leases.rooms() or leases.rooms()[node].widest == slots, "once all are idle a node takes whatever it holds"


@given(widths=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=40))
def test_a_node_that_a_wide_gang_has_leased_serves_narrower_ones_with_the_same_agent(widths: list[int]) -> None:
    leases = LeasesOfNobody()
    leases.put_back(leases.take(8, ["a"], program=""))
    for width in widths:
        leases.put_back(leases.take(width, ["a"], program=""))
    assert leases.num_formed == 1


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
    assert leases.rooms()["a"].widest == 6
    assert leases.rooms()["a"].standing == 4
    (part,) = leases.take(6, ["a"], program="")
    assert part.slots == (0, 1, 2, 3, 4, 5)
    assert leases.rooms()["a"].widest == 0
    leases.put_back([*second, part])
