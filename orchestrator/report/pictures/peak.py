"""A trial's peak memory: as allocated, else as reserved, else as the driver saw it.

What a layout takes of its device is another number: fronts count what was reserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.core.trial.merit import highest_peak

if TYPE_CHECKING:
    from db.read.rows import TrialRow


def peak_of(trial: TrialRow) -> int | None:
    """Return the bytes; None: no program, allocator or driver told any."""
    found = _known(trial)
    return found[0] if found is not None else None


def taken_of(trial: TrialRow) -> int | None:
    """Return the bytes that a layout took of its fullest device, as the fronts count them."""
    return highest_peak(
        reserved_bytes=trial.peak_memory_reserved_bytes,
        allocated_bytes=trial.peak_memory_allocated_bytes,
        driver_bytes=trial.peak_memory_driver_bytes,
        driver_kind=trial.peak_memory_driver_kind,
    )


def kinds_of(trials: Iterable[TrialRow]) -> str:
    """Name the sources of some trials for an axis: `allocated`, `allocated or reserved`."""
    kinds = (found[1] for trial in trials if (found := _known(trial)) is not None)
    return " or ".join(dict.fromkeys(kinds))


def _known(trial: TrialRow) -> tuple[int, str] | None:
    if trial.peak_memory_allocated_bytes is not None:
        return trial.peak_memory_allocated_bytes, "allocated"
    if trial.peak_memory_reserved_bytes is not None:
        return trial.peak_memory_reserved_bytes, "reserved"
    if trial.peak_memory_driver_bytes is not None:
        return trial.peak_memory_driver_bytes, str(trial.peak_memory_driver_kind)
    return None
