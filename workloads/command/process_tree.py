"""Reads the processes below a program from /proc: how they were started, and what they write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from layout_sweep.child_processes import children
from orchestrator.core.trial.nested_launch import SeenProcess
from orchestrator.core.trial.rank_environment import RANKS_OWN


def tree_of(pid: int) -> list[SeenProcess]:
    """A process and all below it, parents first. Some may have ended meanwhile."""
    found = [_seen(pid, parent=0)]
    for seen in found:
        found += [_seen(child, parent=seen.pid) for child in children(seen.pid)]
    return found


class Writers:
    """The processes that append to one file, while they keep it open."""

    def __init__(self, path: Path) -> None:
        self._name = str(path)
        # /proc/PID/fdinfo/N of each descriptor that may write, and where its next line went first.
        self._first: dict[Path, int] = {}

    def find_among(self, pids: Sequence[int]) -> None:
        """Note which of these processes have the file open for writing."""
        for pid in pids:
            for descriptor in _descriptors(pid):
                info = Path(f"/proc/{pid}/fdinfo/{descriptor.name}")
                with suppress(OSError):
                    if info not in self._first and str(descriptor.readlink()) == self._name:
                        flags, position = _flags_and_position(info)
                        if flags & os.O_ACCMODE != os.O_RDONLY:
                            self._first[info] = position

    @property
    def count(self) -> int:
        """Return how many of them have written on their own since they were found.

        A forked worker shares the open file of its parent, and with it the place where the next
        line goes: both count as one. A line that is written between two looks moves that place, so
        the smallest count of several looks is right.
        """
        return min(self._count_once() for _ in range(3)) if len(self._first) > 1 else 0

    def _count_once(self) -> int:
        positions = set()
        for info, first in self._first.items():
            with suppress(OSError):
                position = _flags_and_position(info)[1]
                if position != first:
                    positions.add(position)
        return len(positions)


def _flags_and_position(info: Path) -> tuple[int, int]:
    """Return the flags and the position of an open file (proc(5)); OSError if it is closed."""
    position, flags = info.read_text().splitlines()[:2]
    return int(flags.split()[1], 8), int(position.split()[1])


def _descriptors(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/fd").iterdir())
    return []


def _seen(pid: int, *, parent: int) -> SeenProcess:
    environment = {}
    for entry in _read(pid, "environ"):
        name, _, value = entry.partition("=")
        if name in RANKS_OWN:
            environment[name] = value
    return SeenProcess(
        pid=pid, parent=parent, argv=tuple(_read(pid, "cmdline")), environment=environment
    )


def _read(pid: int, what: str) -> list[str]:
    """A file of texts, each with a NUL behind it; empty if the process is gone, or not ours."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/{what}").read_bytes().removesuffix(b"\0")
        return [os.fsdecode(part) for part in text.split(b"\0")] if text else []
    return []
