"""The memory that a layout leaves free."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.merit import headroom, highest_peak
from orchestrator.core.trial.protocol import DriverMemoryKind


@pytest.mark.parametrize(
    ("peak", "device", "free"),
    [
        (60.0, 80.0, 0.25),
        (80.0, 80.0, 0.0),
        (100.0, 80.0, -0.25),
        # A counter of 0 was not read, and nobody knows the memory of some devices.
        (None, 80.0, None),
        (0.0, 80.0, None),
        (60.0, None, None),
        (60.0, 0.0, None),
    ],
)
def test_the_headroom_is_the_share_of_the_memory_that_stays_free(
    peak: float | None, device: float | None, free: float | None
) -> None:
    assert headroom(peak, device) == free


@pytest.mark.parametrize(
    ("reserved", "allocated", "driver", "kind", "peak"),
    [
        (9, 7, 12, DriverMemoryKind.NVML, 9),
        (None, 7, 12, DriverMemoryKind.NVML, 7),
        (0, 7, 12, DriverMemoryKind.NVML, 7),
        (None, None, 12, DriverMemoryKind.NVML, 12),
        # What a kernel counts is a process's memory, not a device's.
        (None, None, 12, DriverMemoryKind.RSS, None),
        (None, None, None, None, None),
        (0, 0, 0, DriverMemoryKind.NVML, None),
    ],
)
def test_a_peak_is_what_the_allocator_reserved_or_else_what_was_seen_of_the_device(
    reserved: int | None,
    allocated: int | None,
    driver: int | None,
    kind: DriverMemoryKind | None,
    peak: int | None,
) -> None:
    found = highest_peak(
        reserved_bytes=reserved, allocated_bytes=allocated, driver_bytes=driver, driver_kind=kind
    )
    assert found == peak
