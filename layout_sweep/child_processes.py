"""Reads from /proc which processes a process has started.

Launchers and ranks use it to find the processes below one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Children of all threads of a process: a child belongs to the thread that forked it."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_bytes().split())
    return found
