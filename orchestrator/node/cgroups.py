"""A cgroup (version 2) for each rank server, where this machine lets us make one: the kernel then ends at once all that is in it.

The groups lie below the cgroup that we run in, so limits and accounts stay what they are. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator.node.processes import has_ended

_PREFIX = "sweep-"
_REMOVE_SECONDS = 1.0


@dataclass(frozen=True)
class Cgroup:
    """One group. Methods that find it gone, or not to be written, do nothing."""

    path: Path

    def join(self) -> bool:
        """Move this process there, and with it what it will start. False: that is not allowed."""
        try:
            (self.path / "cgroup.procs").write_text("0")
        except OSError:
            return False
        return True

    def pids(self) -> list[int]:
        """The processes in it, and in groups below it."""
        found: list[int] = []
        for folder in (self.path, *self._below()):
            with contextlib.suppress(OSError, ValueError):
                found += map(int, (folder / "cgroup.procs").read_text().split())
        return found

    def end(self) -> list[int]:
        """Kill all that is in it at once, forks under way included, and remove it. Returns the processes that were in it."""
        killed = self.pids()
        if killed:
            with contextlib.suppress(OSError):
                (self.path / "cgroup.kill").write_text("1")
        until = time.monotonic() + _REMOVE_SECONDS
        while not self._remove() and time.monotonic() < until:
            time.sleep(0.002)
        return killed

    def _remove(self) -> bool:
        """False: processes in it have not ended yet."""
        for folder in (*self._below(), self.path):
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def _below(self) -> list[Path]:
        """The groups below it, the deepest first."""
        return [
            Path(folder)
            for folder, _, _ in os.walk(self.path, topdown=False)
            if folder != str(self.path)
        ]


def make_cgroup(launcher: str, number: int) -> Cgroup | None:
    """A group of a launcher of this identity (`launcher_identity`). None: this machine allows none."""
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
    """Why no group can be made here; None: one can."""
    own = own_cgroup()
    if own is None:
        return "no cgroup of version 2 is mounted that this process is in"
    parent = _parent()
    return (
        None
        if parent is not None
        else f"{own} is not ours to make groups in, or the kernel is older than 5.14"
    )


def own_cgroup() -> Path | None:
    """The folder of the version 2 cgroup that this process is in."""
    with contextlib.suppress(OSError):
        own = next(
            (
                line[3:]
                for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.startswith("0::")
            ),
            None,
        )
        for line in (
            Path("/proc/self/mountinfo").read_text().splitlines() if own is not None else ()
        ):
            before, _, after = line.partition(" - ")
            if own is not None and after.split(" ")[0] == "cgroup2":
                root, mount = before.split(" ")[3:5]
                # In a container without a cgroup namespace both paths are the host's, and only a part of the tree is mounted.
                path = Path(mount, os.path.relpath(own, root))
                return (
                    path.resolve()
                    if path.is_dir() and not os.path.relpath(own, root).startswith("..")
                    else None
                )
    return None


@cache
def _parent() -> Path | None:
    """Where groups can be made, found by making one."""
    own = own_cgroup()
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
        return None
    trial = own / f"{_PREFIX}try-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError:
        return None
    try:
        is_usable = (
            os.access(trial / "cgroup.kill", os.W_OK)
            and (trial / "cgroup.type").read_text().strip() == "domain"
        )
    except OSError:
        is_usable = False
    with contextlib.suppress(OSError):
        trial.rmdir()
    return own if is_usable else None
