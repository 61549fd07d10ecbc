"""The peak memory of a layout, from the counters of its fullest device.

Three questions have three answers: what the layout needed, what its allocator reserved, and what
it took of the device. A counter of 0 was not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from orchestrator.core.trial.protocol import DriverMemoryKind

ALLOCATED, RESERVED = "allocated", "reserved"


class MemoryCounters(Protocol):
    """The counters as a measurement and a row of the store have them; None: not read."""

    @property
    def peak_memory_allocated_bytes(self) -> int | None: ...

    @property
    def peak_memory_reserved_bytes(self) -> int | None: ...

    @property
    def peak_memory_driver_bytes(self) -> int | None: ...

    @property
    def peak_memory_driver_kind(self) -> DriverMemoryKind | None: ...


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The memory that a layout needed, and its counter: `allocated`, `reserved`, `nvml`..."""

    bytes: int
    source: str


def needed_peak(counters: MemoryCounters) -> Peak | None:
    """Return what tables and pictures show as peak memory; None if no counter was read.

    It is what the program allocated, which predictions are about; else the nearest that is known.
    """
    for found, source in (
        (counters.peak_memory_allocated_bytes, ALLOCATED),
        (counters.peak_memory_reserved_bytes, RESERVED),
        (counters.peak_memory_driver_bytes, str(counters.peak_memory_driver_kind)),
    ):
        if found:
            return Peak(bytes=found, source=source)
    return None


def needed_bytes(counters: MemoryCounters) -> int | None:
    """Return the bytes of `needed_peak`."""
    peak = needed_peak(counters)
    return peak.bytes if peak is not None else None


def sources_of(some: Iterable[MemoryCounters]) -> str:
    """Name the sources of some peaks for a title: `allocated`, `allocated or nvml`."""
    found = (peak.source for one in some if (peak := needed_peak(one)) is not None)
    return " or ".join(dict.fromkeys(found))


def allocator_peak(counters: MemoryCounters) -> int | None:
    """Return the peak that the program's allocator reported; None if it reported none.

    It is what the allocator reserved, else what it allocated.
    """
    return counters.peak_memory_reserved_bytes or counters.peak_memory_allocated_bytes or None


def taken_peak(counters: MemoryCounters) -> int | None:
    """Return the memory that a layout used: the rest is its headroom. None: it was not read.

    If the program tells nothing of its allocator, it is what the driver saw of a GPU.
    """
    from orchestrator.core.trial.protocol import DriverMemoryKind  # pydantic, 0.05 s

    if (peak := allocator_peak(counters)) is not None:
        return peak
    if counters.peak_memory_driver_kind is DriverMemoryKind.NVML:
        return counters.peak_memory_driver_bytes or None
    return None
