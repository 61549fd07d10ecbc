"""The memory of the first training steps by kind, from the allocations of tensors.

These come from tracked tensors on a CPU, and from the history of CUDA's allocator on a GPU.
Times are numbers that grow, of any clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from orchestrator.core.trial.step_part import StepPart

TIMELINE_STEPS = 4
MOMENTS_PER_STEP = 18
MOST_MOMENTS = TIMELINE_STEPS * MOMENTS_PER_STEP


class MemoryKind(StrEnum):
    """The uses of memory, as training programs name them."""

    PARAMETERS = "parameters"  # with constants, such as rotation tables
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    # Kept by a forward pass for its backward pass.
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"  # anything else


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One allocation, from when it was made until it was freed."""

    num_bytes: int
    made_at: float
    freed_at: float | None = None  # None: it is never freed
    kind: MemoryKind | None = None  # None: its times show it


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The time at which a part of a step begins. Steps count from 1."""

    at: float
    step: int
    part: StepPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    step: int
    part: StepPart
    num_bytes: Mapping[MemoryKind, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Addresses that are known to hold memory of a kind at this time."""

    at: float
    kind: MemoryKind
    addresses: Collection[int]


def timeline(
    allocations: Sequence[Allocation], marks: Sequence[Mark], *, end: float
) -> list[Moment]:
    """Return moments in order: each is the fullest one of its share of a step.

    A tensor of no known kind that a forward pass made and that outlives it is an activation.
    """
    known = [_with_kind(allocation, marks) for allocation in allocations]
    changes = sorted(
        [(allocation.made_at, allocation.num_bytes, allocation.kind) for allocation in known]
        + [
            (allocation.freed_at, -allocation.num_bytes, allocation.kind)
            for allocation in known
            if allocation.freed_at is not None
        ],
        # At one time, frees come before allocations.
        key=lambda change: change[:2],
    )
    found = []
    live_bytes = dict.fromkeys(MemoryKind, 0)
    at = 0
    for start, stop, mark in _bins(marks, end, [change[0] for change in changes]):
        while at < len(changes) and changes[at][0] <= start:
            _apply(live_bytes, changes[at])
            at += 1
        fullest = dict(live_bytes)
        while at < len(changes) and changes[at][0] < stop:
            _apply(live_bytes, changes[at])
            at += 1
            if sum(live_bytes.values()) > sum(fullest.values()):
                fullest = dict(live_bytes)
        found.append(Moment(step=mark.step, part=mark.part, num_bytes=fullest))
    return found


def _with_kind(allocation: Allocation, marks: Sequence[Mark]) -> Allocation:
    if allocation.kind is not None:
        return allocation
    place = bisect_right(marks, allocation.made_at, key=lambda mark: mark.at) - 1
    is_forward = place >= 0 and marks[place].part is StepPart.FORWARD
    ends = marks[place + 1].at if place + 1 < len(marks) else None
    outlives = ends is not None and (allocation.freed_at is None or allocation.freed_at > ends)
    kept = is_forward and outlives
    return replace(allocation, kind=MemoryKind.ACTIVATIONS if kept else MemoryKind.TEMPORARIES)


def _apply(live_bytes: dict[MemoryKind, int], change: tuple[float, int, MemoryKind | None]) -> None:
    assert change[2] is not None  # since _with_kind
    live_bytes[change[2]] += change[1]


def _bins(
    marks: Sequence[Mark], end: float, times: Sequence[float]
) -> list[tuple[float, float, Mark]]:
    """Cut each step into shares of about equally many changes, each within one part if possible."""
    spans = [
        (mark.at, following.at if following is not None else end, mark)
        for mark, following in zip(marks, [*marks[1:], None], strict=True)
    ]
    found: list[tuple[float, float, Mark]] = []
    for step in sorted({mark.step for mark in marks}):
        own = [span for span in spans if span[2].step == step and span[0] < span[1]]
        if len(own) > MOMENTS_PER_STEP:  # many micro-batches
            every = -(-len(own) // MOMENTS_PER_STEP)
            groups = [own[i : i + every] for i in range(0, len(own), every)]
            found += [(some[0][0], some[-1][1], some[-1][2]) for some in groups]
            continue
        counts = [bisect_right(times, stop) - bisect_right(times, start) for start, stop, _ in own]
        shares = _shares(counts, MOMENTS_PER_STEP)
        for (start, stop, mark), share in zip(own, shares, strict=True):
            first, last = bisect_right(times, start), bisect_right(times, stop)
            cuts = [times[first + (last - first) * k // share] for k in range(1, share)]
            edges = [start, *(cut for cut in cuts if start < cut < stop), stop]
            found += [(a, b, mark) for a, b in pairwise(edges) if a < b]
    return found


def _shares(counts: Sequence[int], total: int) -> list[int]:
    """Divide a number by counts, at least one each."""
    shares = [1] * len(counts)
    for _ in range(total - len(counts)):
        neediest = max(range(len(counts)), key=lambda i: counts[i] / shares[i], default=None)
        if neediest is None or counts[neediest] <= shares[neediest]:
            break
        shares[neediest] += 1
    return shares


def allocations_of_history(
    entries: Iterable[Mapping[str, Any]],
    *,
    before: Mapping[int, int],
    notes: Iterable[Note],
) -> list[Allocation]:
    """Return what a device allocated by the history of CUDA's allocator in torch's snapshot.

    `before`: bytes by address of what was allocated when the history began. A note tells the kind
    of what is allocated at its time.
    """
    allocations = [Allocation(num_bytes=size, made_at=float("-inf")) for size in before.values()]
    # The place in `allocations` of each that is not freed yet.
    index_by_address = dict(zip(before, range(len(allocations)), strict=True))
    pending_notes = deque(sorted(notes, key=lambda note: note.at))

    def assign_kind(note: Note) -> None:
        for address in note.addresses:
            index = index_by_address.get(address)
            if index is not None and allocations[index].kind is None:
                allocations[index] = replace(allocations[index], kind=note.kind)

    for entry in sorted(entries, key=lambda entry: float(entry["time_us"])):
        at, address = float(entry["time_us"]), int(entry.get("addr", 0))
        while pending_notes and pending_notes[0].at <= at:
            assign_kind(pending_notes.popleft())
        if entry["action"] == "alloc":
            index_by_address[address] = len(allocations)
            allocations.append(Allocation(num_bytes=int(entry["size"]), made_at=at))
        elif entry["action"] == "free_completed" and address in index_by_address:
            index = index_by_address.pop(address)
            allocations[index] = replace(allocations[index], freed_at=at)
    for note in pending_notes:
        assign_kind(note)
    return allocations
