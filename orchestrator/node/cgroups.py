"""Cgroups of version 2: one per rank server, so that the kernel ends all its processes at once.

They lie below the cgroup that we run in: limits and accounts stay the same. Also finds the counters
of our own cgroup, v2 or v1. Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator.node.processes import has_ended

_PREFIX = "sweep-"
_REMOVE_SECONDS = 1.0


@dataclass(frozen=True)
class Cgroup:
    """One group. Methods do nothing if it is gone, or not to be written."""

    path: Path

    def join(self) -> bool:
        """Move this process and its future children into it. False: that is not allowed."""
        try:
            (self.path / "cgroup.procs").write_text("0")
        except OSError:
            return False
        return True

    def pids(self) -> list[int]:
        """The processes in it, and in groups below it."""
        found: list[int] = []
        for folder in self._folders():
            with suppress(OSError, ValueError):
                found += map(int, (folder / "cgroup.procs").read_text().split())
        return found

    def end(self) -> list[int]:
        """Kill all processes in it at once, forks under way included, and remove it.

        Returns the processes that were in it.
        """
        killed = self.pids()
        if killed:
            with suppress(OSError):
                (self.path / "cgroup.kill").write_text("1")
        until = time.monotonic() + _REMOVE_SECONDS
        while not self._remove() and time.monotonic() < until:
            time.sleep(0.002)
        return killed

    def _remove(self) -> bool:
        """False: processes in it have not ended yet."""
        for folder in self._folders():
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def _folders(self) -> list[Path]:
        """The groups below it, the deepest first, and then itself."""
        return [Path(folder) for folder, _, _ in os.walk(self.path, topdown=False)]


def make_cgroup(launcher: str, number: int) -> Cgroup | None:
    """Make a group for a `launcher_identity`. None: this machine allows none."""
    parent = _parent()
    if parent is None:
        return None
    pid, start, namespace, launcher_number, _ = launcher.split(":", 4)
    group = Cgroup(parent / f"{_PREFIX}{pid}-{start}-{namespace}-{launcher_number}-{number}")
    try:
        group.path.mkdir()
    except OSError:
        return None
    return group


def orphaned_cgroups() -> list[Cgroup]:
    """Groups of launchers that are dead."""
    parent = _parent()
    found = []
    for path in parent.glob(f"{_PREFIX}*-*-*-*-*") if parent is not None else ():
        match path.name.removeprefix(_PREFIX).split("-"):
            case [pid, start, namespace, _, _] if has_ended(pid, start, namespace):
                found.append(Cgroup(path))
    return found


def why_no_cgroup() -> str | None:
    """Return why no group can be made here; None: one can."""
    own = own_cgroup()
    if own is None:
        return "no cgroup of version 2 is mounted that this process is in"
    if _parent() is None:
        return f"{own} is not ours to make groups in, or the kernel is older than 5.14"
    return None


def own_cgroup() -> Path | None:
    """The folder of the version 2 cgroup that this process is in."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if after.split(" ")[0] == "cgroup2":
                # In a container without a cgroup namespace both paths are the host's, and only a
                # part of the tree is mounted.
                root, mount = before.split(" ")[3:5]
                below = os.path.relpath(own, root)
                path = Path(mount, below)
                return path.resolve() if path.is_dir() and not below.startswith("..") else None
    return None


def num_oom_kills() -> int:
    """Return how many processes of our memory cgroup the OOM killer has ended; 0 if unknown."""
    for path in cgroup_files("memory.events", "memory", "memory.oom_control"):
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def cgroup_files(name_v2: str, controller: str, name_v1: str) -> Iterator[Path]:
    """Return where this process's cgroup may keep a counter: v2, then v1.

    In a container the path is often the host's, and the files lie at the mount itself.
    """
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, name = Path("/sys/fs/cgroup"), name_v2
            elif controller in controllers.split(","):
                mount, name = Path("/sys/fs/cgroup", controller), name_v1
            else:
                continue
            yield from (mount / path.lstrip("/") / name, mount / name)


@cache
def _parent() -> Path | None:
    """The group in which we can make others, found by making one; None: there is no such group."""
    own = own_cgroup()
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
        return None
    attempt = own / f"{_PREFIX}try-{os.getpid()}"
    try:
        attempt.mkdir()
    except OSError:
        return None
    is_usable = False
    with suppress(OSError):
        is_domain = (attempt / "cgroup.type").read_text().strip() == "domain"
        is_usable = is_domain and os.access(attempt / "cgroup.kill", os.W_OK)
    with suppress(OSError):
        attempt.rmdir()
    return own if is_usable else None
