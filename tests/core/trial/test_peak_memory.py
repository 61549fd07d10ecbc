"""The three answers to how much memory a layout's fullest device had in use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orchestrator.core.trial.peak_memory import (
    Peak,
    allocator_peak,
    needed_bytes,
    needed_peak,
    sources_of,
    taken_peak,
)
from orchestrator.core.trial.protocol import DriverMemoryKind

NVML, CGROUP = DriverMemoryKind.NVML, next(it for it in DriverMemoryKind if it != "nvml")


def counters(
    allocated: int | None = None,
    reserved: int | None = None,
    driver: int | None = None,
    kind: DriverMemoryKind | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        peak_memory_allocated_bytes=allocated,
        peak_memory_reserved_bytes=reserved,
        peak_memory_driver_bytes=driver,
        peak_memory_driver_kind=kind,
    )


@pytest.mark.parametrize(
    ("read", "needed", "of_allocator", "taken"),
    [
        (counters(10, 12, 15, NVML), Peak(bytes=10, source="allocated"), 12, 12),
        (counters(10, None, 15, NVML), Peak(bytes=10, source="allocated"), 10, 10),
        (counters(None, 12), Peak(bytes=12, source="reserved"), 12, 12),
        # A counter of 0 was not read.
        (counters(0, 0, 15, NVML), Peak(bytes=15, source="nvml"), None, 15),
        (counters(0, 12, 0, NVML), Peak(bytes=12, source="reserved"), 12, 12),
        # The peak of a host's memory says nothing of the device.
        (counters(driver=15, kind=CGROUP), Peak(bytes=15, source=str(CGROUP)), None, None),
        (counters(0, 0, 0, NVML), None, None, None),
        (counters(), None, None, None),
    ],
)
def test_what_was_needed_reserved_and_taken_follows_from_the_counters_that_were_read(
    read: SimpleNamespace, needed: Peak | None, of_allocator: int | None, taken: int | None
) -> None:
    assert needed_peak(read) == needed
    assert needed_bytes(read) == (needed.bytes if needed is not None else None)
    assert allocator_peak(read) == of_allocator
    assert taken_peak(read) == taken


def test_the_sources_of_some_peaks_are_named_once_each() -> None:
    some = [counters(1), counters(driver=2, kind=NVML), counters(), counters(3)]
    assert sources_of(some) == "allocated or nvml"
