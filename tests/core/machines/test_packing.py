"""Which waiting gang starts next, and where: no slot twice, no large gang delayed, none starved."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing import Job, first_come, lower_bound, packing, simulate
from orchestrator.core.machines.packing import PATIENCE, FreeOnNode, FreeSlots, Shape, WaitingGang
from tests.examples import examples

EIGHT = {f"node-{number}": 8 for number in range(4)}


def shape(num_slots: int) -> Shape:
    return Shape.of(num_slots, gpus_per_node=8)


def gang(
    num_slots: int,
    seconds: float = 60.0,
    *,
    passed_over: int = 0,
    is_first: bool = False,
    exclusive: bool = False,
) -> WaitingGang:
    return WaitingGang(
        shape=shape(num_slots),
        seconds=seconds,
        passed_over=passed_over,
        is_first=is_first,
        exclusive=exclusive,
    )


def started(
    free_slots: FreeSlots, *waiting: WaitingGang, now: float = 0.0
) -> tuple[int, tuple[str, ...]] | None:
    found = free_slots.next_start(waiting, now=now)
    return None if found is None else (found.index, found.nodes)


def test_the_largest_that_fits_starts_first() -> None:
    assert started(FreeSlots(EIGHT), gang(1), gang(16), gang(8)) == (1, ("node-0", "node-1"))


def test_small_gangs_share_a_node_and_leave_the_others_whole() -> None:
    free_slots = FreeSlots(EIGHT)
    for key in range(4):
        found = started(free_slots, gang(2))
        assert found == (0, ("node-0",))
        free_slots.take(key, shape(2), found[1], ends_at=60.0)
    assert started(free_slots, gang(4)) == (0, ("node-1",))


def test_a_gang_that_fits_on_no_single_node_is_not_split_over_two() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8})
    free_slots.take(1, shape(4), ["a"], ends_at=60.0)
    free_slots.take(2, shape(4), ["b"], ends_at=60.0)
    assert free_slots.count == 8
    assert started(free_slots, gang(8)) is None


def test_what_would_end_after_the_reservation_stays_off_its_nodes() -> None:
    free_slots = FreeSlots(EIGHT)
    free_slots.take(1, shape(8), ["node-0"], ends_at=100.0)
    free_slots.take(2, shape(8), ["node-1"], ends_at=50.0)
    # 32 slots are free at 100: every node is reserved until then.
    assert started(free_slots, gang(32), gang(8, 101.0)) is None
    assert started(free_slots, gang(32), gang(8, 100.0)) == (1, ("node-2",))
    # 16 slots could start at once; 24 have to wait for node-1 only, so that node-2 or node-3 is
    # reserved with it, and node-0 is not.
    assert started(free_slots, gang(24), gang(8, 1000.0)) is None


def test_the_nodes_reserved_are_those_that_are_free_last() -> None:
    free_slots = FreeSlots(EIGHT)
    for key, (node, end) in enumerate((("node-0", 10.0), ("node-1", 20.0))):
        free_slots.take(key, shape(8), [node], ends_at=end)
    # Three nodes are free together at 10: node-0, and the two that are free now; nothing long may
    # go there.
    assert started(free_slots, gang(24), gang(8, 11.0)) is None
    assert started(free_slots, gang(24), gang(8, 10.0)) == (1, ("node-2",))
    free_slots.take(2, shape(8), ["node-2"], ends_at=10.0)
    # Two are free together now and at 10; of node-0, node-2 and node-3, the two that are free last
    # are kept, and node-3 is open.
    free_slots.take(3, shape(4), ["node-3"], ends_at=5.0)
    assert started(free_slots, gang(16), gang(4, 1000.0)) == (1, ("node-3",))


def test_a_node_with_room_enough_counts_once_however_many_gangs_end_there() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8})
    free_slots.take(1, shape(2), ["a"], ends_at=10.0)
    free_slots.take(2, shape(2), ["a"], ends_at=1000.0)
    free_slots.take(3, shape(8), ["b"], ends_at=100.0)
    # It waits for node b until 100. Node a has four free slots now, and more at 10.
    wide = WaitingGang(shape=Shape(num_nodes=2, slots_per_node=4), seconds=60.0)
    assert started(free_slots, wide, gang(4, 50.0)) == (1, ("a",))


def test_a_gang_beyond_the_cluster_holds_up_nobody() -> None:
    assert started(FreeSlots(EIGHT), gang(64), gang(8, 1e9)) == (1, ("node-0",))


def test_one_that_was_passed_over_for_long_goes_before_larger_ones() -> None:
    free_slots = FreeSlots({"a": 8})
    assert started(free_slots, gang(8), gang(1, passed_over=2 * PATIENCE - 1)) == (0, ("a",))
    assert started(free_slots, gang(8), gang(1, passed_over=2 * PATIENCE)) == (1, ("a",))


def test_the_first_trials_of_every_cell_go_before_the_later_ones_of_a_larger_one() -> None:
    assert started(FreeSlots(EIGHT), gang(32), gang(16, is_first=True), gang(8, is_first=True)) == (
        2,
        ("node-0",),
    )


def test_an_overdue_gang_s_nodes_are_kept_even_from_what_is_predicted_to_end_in_time() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8})
    free_slots.take(1, shape(8), ["a"], ends_at=100.0)
    late = gang(16, passed_over=2 * PATIENCE)
    assert started(free_slots, gang(16), gang(8, 1.0)) == (1, ("b",))
    assert started(free_slots, late, gang(8, 1.0)) is None


def test_an_exclusive_gang_wants_empty_nodes_and_keeps_them() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8})
    free_slots.take(1, shape(1), ["a"], ends_at=10.0)
    assert started(free_slots, gang(2, exclusive=True)) == (0, ("b",))
    free_slots.take(2, shape(2), ["b"], ends_at=10.0, exclusive=True)
    assert free_slots.count == 7
    assert started(free_slots, gang(8)) is None
    assert started(free_slots, gang(2)) == (0, ("a",))
    free_slots.give_back(2)
    assert free_slots.count == 15


def test_an_exclusive_gang_waits_for_nodes_that_become_empty() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8, "c": 8})
    for key, (node, num_slots, end) in enumerate((("a", 1, 100.0), ("b", 4, 10.0), ("c", 8, 50.0))):
        free_slots.take(key, shape(num_slots), [node], ends_at=end)
    # Nodes a and b have enough free slots now and are not empty; b and c are empty at 50.
    wide = WaitingGang(shape=Shape(num_nodes=2, slots_per_node=4), seconds=60.0, exclusive=True)
    assert started(free_slots, wide, gang(2, 49.0)) == (1, ("b",))
    assert started(free_slots, wide, gang(2, 51.0)) == (1, ("a",))


@pytest.mark.parametrize(
    ("num_gpus", "nodes"),
    [
        (8, ("node-1",)),
        (16, ("node-1", "node-3")),
        (24, ("node-0", "node-1", "node-3")),
        (4, ("node-1",)),
    ],
    ids=["one of them", "all of them", "more than stand", "part of one"],
)
def test_a_gang_starts_where_agents_have_room_and_then_elsewhere(
    num_gpus: int, nodes: tuple[str, ...]
) -> None:
    free_slots = FreeSlots(EIGHT)
    free_on_nodes = {
        "node-1": FreeOnNode(standing=8, widest=8),
        "node-2": FreeOnNode(standing=4, widest=8),
        "node-3": FreeOnNode(standing=8, widest=8),
    }
    found = free_slots.next_start([gang(num_gpus)], now=0.0, free_on_nodes=free_on_nodes)
    assert found is not None
    assert found.nodes == nodes


def test_an_idle_agent_on_a_node_without_room_draws_nobody() -> None:
    free_slots = FreeSlots(EIGHT)
    free_slots.take(1, shape(4), ["node-3"], ends_at=1.0)
    whole = FreeOnNode(standing=8, widest=8)
    found = free_slots.next_start(
        [gang(16)], now=0.0, free_on_nodes={"gone": whole, "node-3": whole, "node-2": whole}
    )
    assert found is not None
    assert found.nodes == ("node-0", "node-2")


def test_a_gang_waits_while_the_free_slots_of_a_node_are_in_pieces_too_small_for_it() -> None:
    free_slots = FreeSlots({"a": 8})
    free_slots.take(1, shape(2), ["a"], ends_at=1.0)
    in_pieces = {"a": FreeOnNode(standing=3, widest=3)}
    assert free_slots.next_start([gang(4)], now=0.0, free_on_nodes=in_pieces) is None
    found = free_slots.next_start([gang(4), gang(3)], now=0.0, free_on_nodes=in_pieces)
    assert found is None, "the larger one was first, and waits for this node"
    found = free_slots.next_start([gang(4), gang(3, seconds=0.5)], now=0.0, free_on_nodes=in_pieces)
    assert found is not None
    assert found.index == 1, "it has ended before what the larger one waits for"


@pytest.mark.parametrize("num_taken", [2, 4])
def test_a_gang_that_waits_for_a_node_waits_for_an_end_there_and_no_other(num_taken: int) -> None:
    free_slots = FreeSlots({"a": 8, "b": 2})
    free_slots.take(1, shape(num_taken), ["a"], ends_at=50.0)
    free_slots.take(2, shape(1), ["b"], ends_at=10.0)
    in_pieces = {"a": FreeOnNode(standing=2, widest=2)}
    on_a = [gang(4, seconds=1.0), gang(2, seconds=40.0)]
    found = free_slots.next_start(on_a, now=0.0, free_on_nodes=in_pieces)
    assert found is not None
    assert (found.index, found.nodes) == (1, ("a",)), (
        "it ends before the gang on its node, at 50; the gang that ends at 10 is on the other node"
    )
    on_a[1] = gang(2, seconds=60.0)
    assert free_slots.next_start(on_a, now=0.0, free_on_nodes=in_pieces) is None


def test_a_gang_s_nodes_are_in_the_order_of_its_ranks_whichever_was_found_first() -> None:
    assert started(FreeSlots({"a": 9, "b": 8}), gang(16)) == (
        0,
        ("a", "b"),
        # b is left with fewer free slots.
    )


def test_no_slot_is_given_twice() -> None:
    free_slots = FreeSlots({"a": 8})
    free_slots.take(1, shape(5), ["a"], ends_at=1.0)
    with pytest.raises(ValueError, match="needs 4 free slots on a, which has 3"):
        free_slots.take(2, shape(4), ["a"], ends_at=1.0)
    with pytest.raises(ValueError, match="has nodes already"):
        free_slots.take(1, shape(1), ["a"], ends_at=1.0)
    with pytest.raises(ValueError, match="needs 2 nodes, not 1"):
        free_slots.take(3, shape(16), ["a", "a"], ends_at=1.0)


def test_nodes_come_and_go() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8})
    free_slots.take(1, shape(16), ["a", "b"], ends_at=10.0)
    free_slots.resize({"b": 8, "c": 8})
    assert free_slots.holds(shape(16))
    assert free_slots.count == 8
    assert started(free_slots, gang(8)) == (0, ("c",))
    free_slots.give_back(1)
    assert free_slots.count == 16
    free_slots.resize({"c": 8})
    assert not free_slots.holds(shape(16))


@st.composite
def queues(draw: st.DrawFn) -> list[list[Job]]:
    sizes = st.sampled_from([1, 2, 4, 8, 16, 32])
    found = []
    for _ in range(draw(st.integers(1, 6))):
        num_slots = draw(sizes)
        durations = draw(
            st.lists(st.tuples(st.floats(1, 100), st.floats(0.3, 3.0)), min_size=1, max_size=12)
        )
        found.append(
            [
                Job(shape=shape(num_slots), predicted_seconds=p, seconds=p * error)
                for p, error in durations
            ]
        )
    return found


def test_a_node_that_blinks_is_reserved_for_nobody_that_it_cannot_hold() -> None:
    """The node was away and is back; the other nodes are larger."""
    free_slots = FreeSlots({"small": 4, "large": 8})
    free_slots.take(1, shape(4), ["small"], ends_at=10.0, exclusive=True)
    free_slots.take(2, shape(4), ["large"], ends_at=50.0)
    for slots_of in ({"large": 8}, {"small": 4, "large": 8}):
        free_slots.resize(slots_of)
    assert started(free_slots, gang(8), gang(4, seconds=1000.0)) is None, (
        "the first waits for the large node, until 50"
    )
    assert started(free_slots, gang(8), gang(4, seconds=40.0)) == (1, ("large",))


@settings(max_examples=examples(150))
@given(queues())
def test_every_gang_starts_and_none_waits_for_ever(jobs: Sequence[Sequence[Job]]) -> None:
    # `FreeSlots.take` raises where a slot would be given twice, and the simulation ends only when
    # every job has run.
    outcome = simulate(jobs, EIGHT, packing)
    assert outcome.makespan >= lower_bound(jobs, 32) * (1 - 1e-9)
    # Others may start before a gang until it is overdue. Then only those may that are overdue for
    # longer, and those that do not delay it.
    assert outcome.longest_wait_starts <= PATIENCE * len(jobs) + 32 * len(jobs)


@settings(max_examples=examples(60))
@given(queues())
def test_it_keeps_the_cluster_at_least_as_busy_as_greed_must(jobs: Sequence[Sequence[Job]]) -> None:
    # A schedule that never idles what the next gang could use needs at most the work plus the
    # longest trial, for gangs that divide nodes; a reservation idles nodes for at most one trial
    # per change of size, of which there is one for each waiting cell and overdue turn.
    outcome = simulate(jobs, EIGHT, packing)
    longest = max(max(job.seconds, job.predicted_seconds) for queue in jobs for job in queue)
    num_turns = sum(map(len, jobs)) // PATIENCE + len(jobs)
    assert outcome.makespan <= lower_bound(jobs, 32) + 2 * longest * num_turns


def test_the_mix_of_the_study_is_packed_to_within_a_tenth_of_the_bound() -> None:
    # Sizes of sweeps/playbook.yaml: for each of four models 1 to 64 nodes; 32 trials each, of a
    # minute and what steps take.
    rng = random.Random(1)
    mix = [
        [
            Job(
                shape=shape(8 << size),
                predicted_seconds=90.0,
                seconds=90.0 * rng.lognormvariate(0.0, 0.3),
            )
            for _ in range(32)
        ]
        for _ in range(4)
        for size in range(7)
    ]
    nodes = {f"node-{number}": 8 for number in range(64)}
    bound = lower_bound(mix, 512)
    packed, in_line = simulate(mix, nodes, packing), simulate(mix, nodes, first_come)
    assert packed.makespan <= 1.10 * bound
    assert packed.used_until_tail >= 0.95 * 512 * packed.tail_began
    assert in_line.makespan > 1.15 * bound


def test_gangs_that_share_a_budget_start_by_the_order_of_their_cells() -> None:
    free_slots = FreeSlots({"a": 8})
    orders = [(1.0, 3.0, -0.1), (1.0, 2.0, -0.1), (0.0, 5.0, 9.0)]
    waiting = [
        WaitingGang(
            shape=Shape(num_nodes=1, slots_per_node=8),
            seconds=60.0,
            is_first=True,
            cell_order=order,
        )
        for order in orders
    ]
    start = free_slots.next_start(waiting, now=0.0)
    assert start is not None
    assert start.index == 2
    start = free_slots.next_start(waiting[:2], now=0.0)
    assert start is not None
    assert start.index == 1


def test_a_cell_that_is_suspected_lets_every_other_go_first_and_starts_where_there_is_none() -> (
    None
):
    free_slots = FreeSlots({"a": 8})
    suspected = gang(8, passed_over=1000, is_first=True)._replace(is_suspected=True)
    assert started(free_slots, suspected, gang(1)) == (1, ("a",))
    assert started(free_slots, suspected) == (0, ("a",))


def test_a_gang_is_placed_on_other_nodes_where_they_have_room() -> None:
    free_slots = FreeSlots({"a": 8, "b": 8, "c": 4})
    assert free_slots.place_elsewhere(gang(8), {"a"}, free_on_nodes={}) == ("b",)
    assert free_slots.holds_without(shape(8), {"a"})
    free_slots.take(1, shape(8), ["b"], ends_at=1.0)
    assert free_slots.place_elsewhere(gang(8), {"a"}, free_on_nodes={}) is None
    assert free_slots.holds_without(shape(8), {"a"}), "once it is free"
    assert not free_slots.holds_without(shape(8), {"a", "b"})


def test_nodes_are_unused_while_no_gang_has_a_slot_of_any() -> None:
    free_slots = FreeSlots(EIGHT)
    assert free_slots.are_unused(EIGHT)
    free_slots.take(1, shape(2), ("node-1",), ends_at=60.0)
    assert not free_slots.are_unused(["node-0", "node-1"])
    assert free_slots.are_unused(["node-0", "node-2"])
    assert free_slots.are_unused([])


def test_gangs_go_first_by_their_waiting_then_first_trials_then_size() -> None:
    """Two gangs that wait: the one that is earlier in this list starts."""
    cheap, dear = gang(1, is_first=True), gang(2, 99.0, is_first=True)
    in_order = [
        gang(1, passed_over=17),
        gang(2, passed_over=16),
        gang(8, 1.0)._replace(cell_order=(-100.0,)),
        cheap._replace(passed_over=15, seconds=61.0),
        cheap,
        dear,
        gang(8, 61.0, passed_over=15),
        gang(8),
        gang(4, 600.0),
        gang(1, passed_over=17)._replace(is_suspected=True),
        cheap._replace(is_suspected=True),
        gang(8)._replace(is_suspected=True),
    ]
    for place, earlier in enumerate(in_order):
        for later in in_order[place + 1 :]:
            assert started(FreeSlots({"a": 8}), earlier, later) == (0, ("a",)), (earlier, later)
            assert started(FreeSlots({"a": 8}), later, earlier) == (1, ("a",)), (earlier, later)


def test_a_gang_of_which_nothing_is_told_is_like_others() -> None:
    ordinary = WaitingGang(shape=shape(1), seconds=1.0)
    assert ordinary == (shape(1), 1.0, 0, False, False, False, ())


def test_an_exclusive_gang_takes_no_node_with_another() -> None:
    free_slots = FreeSlots({"a": 8})
    free_slots.take(1, shape(1), ["a"], ends_at=1.0)
    with pytest.raises(ValueError, match="needs 2 free slots on a, which has 7"):
        free_slots.take(2, shape(2), ["a"], ends_at=1.0, exclusive=True)
    with pytest.raises(ValueError, match="needs 2 free slots on gone, which has 0"):
        free_slots.take(2, shape(2), ["gone"], ends_at=1.0)


def test_the_last_slot_of_a_node_is_used_and_all_of_a_gang_are_counted() -> None:
    assert started(FreeSlots({"a": 1}), gang(1)) == (0, ("a",))
    free_slots = FreeSlots(EIGHT)
    free_slots.take(1, shape(24), ["node-0", "node-1", "node-2"], ends_at=1.0)
    assert free_slots.count == 8
    free_slots.give_back(1)
    assert free_slots.count == 32


def test_a_long_gang_starts_where_nothing_is_reserved() -> None:
    """The first waits for node a until 100; node b has room for the other."""
    free_slots = FreeSlots({"a": 8, "b": 8})
    free_slots.take(1, shape(6), ["a"], ends_at=100.0)
    free_slots.take(2, shape(4), ["b"], ends_at=1000.0)
    assert started(free_slots, gang(8), gang(4, 1e6)) == (1, ("b",))
