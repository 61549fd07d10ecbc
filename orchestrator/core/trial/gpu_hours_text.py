"""Short texts of known GPU time in hours, the same in tables, progress and messages."""

from __future__ import annotations

from math import floor, log10


def gpu_hours_text(gpu_seconds: float) -> str:
    """`220.43`, `2.00`, `0.050`, `0.00069`: at least two digits that say something."""
    hours = gpu_seconds / 3600
    digits = 1 - floor(log10(hours)) if 0 < hours < 0.1 else 2
    return f"{hours:,.{digits}f}"
