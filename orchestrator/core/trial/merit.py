"""The merits of a layout that a front compares: its speed, its free memory, its use of energy.

Within a cell every objective of a sweep file orders layouts as one of these does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.trial.protocol import DriverMemoryKind


class Merit(StrEnum):
    """A number of a layout of which more is better."""

    SPEED = "speed"  # tokens per second
    HEADROOM = "headroom"  # free share of the device's memory
    EFFICIENCY = "efficiency"  # tokens per joule


def highest_peak(
    *,
    reserved_bytes: int | None,
    allocated_bytes: int | None,
    driver_bytes: int | None,
    driver_kind: DriverMemoryKind | None,
) -> int | None:
    """Return the memory that a layout took of its fullest device; None if it was not read.

    If the program tells nothing of its allocator, it is what the driver saw.
    """
    from orchestrator.core.trial.protocol import DriverMemoryKind  # pydantic, 0.05 s

    of_device = driver_bytes if driver_kind is DriverMemoryKind.NVML else None
    # A counter of 0 was not read.
    return reserved_bytes or allocated_bytes or of_device or None


def headroom(peak_bytes: float | None, device_bytes: float | None) -> float | None:
    """Return the share of the device's memory that stays free; None if it is not known."""
    if not peak_bytes or not device_bytes:
        return None
    return 1.0 - peak_bytes / device_bytes
