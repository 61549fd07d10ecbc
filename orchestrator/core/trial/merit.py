"""The merits of a layout that a front compares: its speed, its free memory, its use of energy.

Within a cell every objective of a sweep file orders layouts as one of these does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Merit(StrEnum):
    """A number of a layout; larger is better."""

    SPEED = "speed"  # tokens per second
    HEADROOM = "headroom"  # free share of the device's memory
    EFFICIENCY = "efficiency"  # tokens per joule


@dataclass(frozen=True, kw_only=True)
class OtherMerits:
    """The values of a layout that are compared besides its speed; None: not read."""

    headroom: float | None = None
    joules_per_token: float | None = None


# For a layout whose speed alone is known.
NOTHING_ELSE = OtherMerits()


def headroom(peak_bytes: float | None, device_bytes: float | None) -> float | None:
    """Return the share of the device's memory that stays free; None if it is not known."""
    if not peak_bytes or not device_bytes:
        return None
    return 1.0 - peak_bytes / device_bytes


def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: float, price_per_gpu_hour: float
) -> float:
    """Return what a billion tokens cost at this speed."""
    return price_per_gpu_hour / 3600 / tokens_per_second_per_gpu * 1e9
