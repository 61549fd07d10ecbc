"""The memory of steps by kind, from allocations whose arithmetic is in the test."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as some

from orchestrator.core.trial.memory_timeline import (
    MOMENTS_PER_STEP,
    Allocation,
    Mark,
    MemoryKind,
    Moment,
    Note,
    allocations_of_history,
    timeline,
)
from orchestrator.core.trial.step_part import StepPart

FORWARD, BACKWARD, OPTIMIZER = StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER
STEP = [
    Mark(at=0, step=1, part=FORWARD),
    Mark(at=10, step=1, part=BACKWARD),
    Mark(at=20, step=1, part=OPTIMIZER),
]


def last(moments: list[Moment], part: StepPart, kind: MemoryKind) -> int:
    return [moment.num_bytes[kind] for moment in moments if moment.part is part][-1]


def most(moments: list[Moment], part: StepPart, kind: MemoryKind) -> int:
    return max(moment.num_bytes[kind] for moment in moments if moment.part is part)


def test_what_a_forward_pass_leaves_to_its_backward_pass_is_an_activation() -> None:
    kept = Allocation(num_bytes=100, made_at=3, freed_at=15)
    freed = Allocation(num_bytes=70, made_at=4, freed_at=5)
    made_later = Allocation(num_bytes=30, made_at=12, freed_at=13)
    moments = timeline([kept, freed, made_later], STEP, end=30)
    assert most(moments, FORWARD, MemoryKind.ACTIVATIONS) == 100
    assert most(moments, FORWARD, MemoryKind.TEMPORARIES) == 70
    assert most(moments, BACKWARD, MemoryKind.TEMPORARIES) == 30
    assert last(moments, OPTIMIZER, MemoryKind.ACTIVATIONS) == 0


def test_known_kinds_stay_what_they_are() -> None:
    weights = Allocation(num_bytes=8, made_at=-1, kind=MemoryKind.PARAMETERS)
    gradient = Allocation(num_bytes=8, made_at=11, freed_at=28, kind=MemoryKind.GRADIENTS)
    state = Allocation(num_bytes=16, made_at=21, kind=MemoryKind.OPTIMIZER)
    moments = timeline([weights, gradient, state], STEP, end=30)
    assert {moment.num_bytes[MemoryKind.PARAMETERS] for moment in moments} == {8}
    assert most(moments, FORWARD, MemoryKind.GRADIENTS) == 0
    assert last(moments, BACKWARD, MemoryKind.GRADIENTS) == 8
    assert last(moments, BACKWARD, MemoryKind.OPTIMIZER) == 0
    assert last(moments, OPTIMIZER, MemoryKind.OPTIMIZER) == 16


def test_a_step_of_many_micro_batches_has_no_more_moments_than_another() -> None:
    marks = [
        Mark(at=i, step=1, part=(FORWARD, BACKWARD)[i % 2]) for i in range(10 * MOMENTS_PER_STEP)
    ]
    allocations = [
        Allocation(num_bytes=1, made_at=i + 0.5, freed_at=i + 0.75) for i in range(len(marks))
    ]
    assert 0 < len(timeline(allocations, marks, end=len(marks))) <= MOMENTS_PER_STEP


_allocations = some.lists(
    some.builds(
        lambda size, made_at, lasted, kind: Allocation(
            num_bytes=size,
            made_at=made_at,
            freed_at=None if lasted is None else made_at + lasted,
            kind=kind,
        ),
        some.integers(1, 9),
        some.integers(-5, 35),
        some.none() | some.integers(1, 20),
        some.none() | some.sampled_from(MemoryKind),
    )
)


@given(_allocations)
@example([Allocation(num_bytes=1, made_at=-1, freed_at=5), Allocation(num_bytes=1, made_at=5)])
def test_the_peak_of_the_moments_is_the_peak_of_the_allocations(
    allocations: list[Allocation],
) -> None:
    def exists(one: Allocation, at: float) -> bool:
        return one.made_at <= at and (one.freed_at is None or at < one.freed_at)

    moments = timeline(allocations, STEP, end=30)
    allocated = [sum(one.num_bytes for one in allocations if exists(one, at)) for at in range(30)]
    assert max(sum(moment.num_bytes.values()) for moment in moments) == max(allocated)
    assert all(size >= 0 for moment in moments for size in moment.num_bytes.values())
    assert len(moments) <= MOMENTS_PER_STEP


def test_a_history_of_the_allocator_becomes_allocations() -> None:
    """Entries as torch.cuda.memory._snapshot()["device_traces"][0] has them."""

    def entry(action: str, addr: int, size: int, time_us: int) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us}

    entries = [
        entry("segment_alloc", 4096, 1 << 21, 10),
        entry("alloc", 4096, 512, 11),
        entry("free_requested", 4096, 512, 15),
        entry("free_completed", 4096, 512, 16),
        # Another tensor at the same address.
        entry("alloc", 4096, 256, 18),
        entry("alloc", 8192, 1024, 19),
        entry("free_completed", 77, 5, 20),
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 30},
    ]
    notes = [
        # At address 55 nothing is allocated.
        Note(at=5, kind=MemoryKind.PARAMETERS, addresses=[100, 55]),
        # What is known stays so.
        Note(at=6, kind=MemoryKind.GRADIENTS, addresses=[100]),
        Note(at=12, kind=MemoryKind.GRADIENTS, addresses=[4096]),
        Note(at=40, kind=MemoryKind.OPTIMIZER, addresses=[8192]),
    ]
    assert allocations_of_history(entries, before={100: 64}, notes=notes) == [
        Allocation(num_bytes=64, made_at=float("-inf"), kind=MemoryKind.PARAMETERS),
        Allocation(num_bytes=512, made_at=11, freed_at=16, kind=MemoryKind.GRADIENTS),
        Allocation(num_bytes=256, made_at=18),
        Allocation(num_bytes=1024, made_at=19, kind=MemoryKind.OPTIMIZER),
    ]


def test_a_part_with_many_changes_is_cut_where_equally_many_were_made() -> None:
    """A thousand bytes are allocated in the forward pass, and freed together in the optimizer's.

    Half of the changes are in the forward pass, so half of the step's moments.
    """
    allocations = [Allocation(num_bytes=1, made_at=(i + 1) / 100, freed_at=25) for i in range(1000)]
    moments = [one for one in timeline(allocations, STEP, end=30) if one.part is FORWARD]
    live_bytes = [sum(one.num_bytes.values()) for one in moments]
    num = MOMENTS_PER_STEP // 2
    assert live_bytes == [1000 // num * (number + 1) for number in range(num)]


def test_many_micro_batches_share_moments_of_equally_many_parts() -> None:
    """40 parts in 18 moments at most: three in each, named by the last; it has the most bytes."""
    marks = [Mark(at=i, step=1, part=(FORWARD, BACKWARD)[i % 2]) for i in range(40)]
    allocations = [
        Allocation(num_bytes=i + 1, made_at=i + 0.5, freed_at=i + 0.75, kind=MemoryKind.TEMPORARIES)
        for i in range(40)
    ]
    moments = timeline(allocations, marks, end=40)
    last_ones = [*range(2, 40, 3), 39]
    assert [(one.part, sum(one.num_bytes.values())) for one in moments] == [
        (marks[i].part, i + 1) for i in last_ones
    ]


def test_each_step_has_its_own_moments_and_activations() -> None:
    marks = [
        Mark(at=0, step=1, part=FORWARD),
        Mark(at=10, step=1, part=BACKWARD),
        Mark(at=20, step=2, part=FORWARD),
        Mark(at=30, step=2, part=BACKWARD),
    ]
    before = Allocation(num_bytes=1, made_at=-1)
    kept = [Allocation(num_bytes=4, made_at=at, freed_at=at + 12) for at in (3, 23)]
    gone = Allocation(num_bytes=2, made_at=4, freed_at=10)
    later = Allocation(num_bytes=8, made_at=14, freed_at=25)
    moments = timeline([before, *kept, gone, later], marks, end=40)
    assert [one.step for one in moments] == sorted(one.step for one in moments)
    for step in (1, 2):
        own = [one for one in moments if one.step == step]
        assert [one.part for one in own] == sorted((one.part for one in own), reverse=True)
        assert most(own, FORWARD, MemoryKind.ACTIVATIONS) == 4
    # Made before all steps, freed as the forward pass ended, or made in a backward pass.
    first = [one for one in moments if one.step == 1]
    assert most(first, FORWARD, MemoryKind.TEMPORARIES) == 1 + 2
    assert most(first, BACKWARD, MemoryKind.TEMPORARIES) == 1 + 8


def test_a_note_counts_for_what_is_freed_at_its_time() -> None:
    entries = [
        {"action": "alloc", "addr": 16, "size": 8, "time_us": 1},
        {"action": "free_completed", "addr": 16, "size": 8, "time_us": 5},
        {"action": "alloc", "size": 4, "time_us": 6},
    ]
    notes = [
        Note(at=5, kind=MemoryKind.GRADIENTS, addresses=[16]),
        Note(at=7, kind=MemoryKind.OPTIMIZER, addresses=[0]),
    ]
    assert allocations_of_history(entries, before={}, notes=notes) == [
        Allocation(num_bytes=8, made_at=1.0, freed_at=5.0, kind=MemoryKind.GRADIENTS),
        Allocation(num_bytes=4, made_at=6.0, kind=MemoryKind.OPTIMIZER),
    ]
