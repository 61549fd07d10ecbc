"""What gangs hold, compared with a count of every slot in every second."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cluster.lease_meter import LeaseMeter


@dataclass
class Gang:
    """What a second-by-second count knows of a gang."""

    num_slots: int
    busy: bool = False
    is_returned: bool = False


@dataclass
class Counted:
    gangs: list[Gang] = field(default_factory=list)
    reserved: int = 0
    idle: int = 0
    ended: float = 0.0  # the meter's, of all attempts

    def pass_a_second(self) -> None:
        for gang in self.gangs:
            self.reserved += gang.num_slots * (not gang.is_returned)
            self.idle += gang.num_slots * (not gang.is_returned and not gang.busy)


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["form", "begin", "end", "return", "wait"]), st.integers(0, 7)),
        max_size=60,
    )
)
def test_leases_add_up_to_the_slots_held_in_each_second(moves: list[tuple[str, int]]) -> None:
    meter, counted, now = LeaseMeter(0.0), Counted(), 0
    for move, which in moves:
        gang = counted.gangs[which % len(counted.gangs)] if counted.gangs else None
        if move == "form":
            counted.gangs.append(Gang(which + 1))
            meter.reserved(id(counted.gangs[-1]), num_slots=which + 1, at=now)
        elif move == "wait":
            for _ in range(which):
                counted.pass_a_second()
            now += which
        elif gang is not None and not gang.is_returned:
            if move == "begin" and not gang.busy:
                gang.busy = True
                meter.begins(id(gang), num_slots=gang.num_slots, at=now)
            elif move == "end" and gang.busy:
                gang.busy = False
                counted.ended += meter.ends(id(gang), now)
            elif move == "return" and not gang.busy:
                gang.is_returned = True
                meter.returned(id(gang), now)
    leased = meter.leased(now, total_slots=100)
    assert (leased.reserved, leased.idle, leased.capacity) == (
        counted.reserved,
        counted.idle,
        100 * now,
    )
    if not any(gang.busy for gang in counted.gangs):
        assert leased.reserved - leased.idle == counted.ended


def test_what_of_a_lease_no_attempt_has_is_idle() -> None:
    meter = LeaseMeter(0.0)
    meter.reserved("lease", num_slots=8, at=1.0)
    meter.begins("first", num_slots=2, at=2.0)
    meter.begins("second", num_slots=4, at=3.0)
    assert meter.ends("first", 4.0) == 4.0
    assert meter.ends("second", 5.0) == 8.0
    meter.returned("lease", 5.0)
    leased = meter.leased(9.0, total_slots=8)
    # 4 s of 8 slots; attempts had 2 of them for 2 s, and 4 for 2 s.
    assert (leased.reserved, leased.idle) == (32.0, 20.0)


def test_an_attempt_whose_gang_never_stood_held_nothing() -> None:
    meter = LeaseMeter(0.0)
    assert meter.ends("gang", 5.0) == 0.0
    meter.returned("gang", 5.0)
    assert meter.leased(5.0, total_slots=8).reserved == 0.0


def test_a_cluster_that_grows_gives_more_from_then_on() -> None:
    meter = LeaseMeter(0.0)
    assert meter.leased(10.0, total_slots=8).capacity == pytest.approx(80.0)
    assert meter.leased(20.0, total_slots=16).capacity == pytest.approx(80.0 + 160.0)
