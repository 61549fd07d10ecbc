"""The resident memory of a program's processes, as the kernel counts it."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

from layout_sweep.child_processes import children

_HIGH_WATER = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def peak_resident_bytes(pid: int) -> int | None:
    """Return the highest resident memory of the largest process of a program; None: not known.

    Counted are the processes that have ended and were waited for, here or by their parents, and
    those below `pid` that still run. The fork of this process that became the program counts too,
    so it is never less than what this process needs.
    """
    # Linux counts in KiB.
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return max([ended, *map(_high_water_bytes, _tree(pid))]) or None


def _high_water_bytes(pid: int) -> int:
    with suppress(OSError):
        match = _HIGH_WATER.search(Path(f"/proc/{pid}/status").read_bytes())
        if match is not None:
            return int(match[1]) * 1024
    return 0


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        found += children(parent)
    return found
