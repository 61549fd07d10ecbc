"""Ends a local Ray with the orchestrator that started it, and removes Ray's folder.

Ray's own agents notice such an end too, but they live on for a minute, while they report it to the
head that is gone. The guard is two processes, each in its own session, and each does the work if
the other is killed. They start before Ray, and wait for the end of a pipe whose other end only the
orchestrator has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from layout_sweep.start import command, installed_python_path
from orchestrator.cluster.ray import session_folder
from orchestrator.core.trial.rank_environment import RAY_FOLDER_VARIABLE, ray_environment
from orchestrator.node.cgroups import orphaned_cgroups
from orchestrator.node.processes import (
    carries,
    descendants,
    has_ended,
    kill,
    launcher_of,
    process_identity,
    start_time,
)

# Time for wardens to end: they take 0.1 s, and also end processes without our mark.
GRACE_SECONDS = 3.0
KILL_SECONDS = 30.0
DISMISS_SECONDS = 10.0
# If one of these processes ends, Ray answers no more, and many calls of its driver wait forever.
VITAL = ("raylet", "gcs_server")
CHECK_SECONDS = 0.1  # between two checks whether Ray runs
# Searches in a row, 20 ms apart, that must find nothing: Ray may just be starting a process.
_EMPTY_SCANS = 5
_OWNER_FILE = "owner"  # has the orchestrator's identity


class RayGuard:
    """The guard of a local Ray that keeps its files in `folder`. Create it before Ray starts."""

    def __init__(self) -> None:
        self.folder = _new_folder()
        self._vital: dict[int, int] = {}  # process id -> start time
        self._is_gone, self._checked_at = False, -inf  # monotonic
        self._pipes: list[int] = []
        self._begin()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Set the environment in which Ray starts, and which all that it starts inherits.

        It names the folder, and hides the database, all secrets, and the user's folders on
        PYTHONPATH.
        """
        added = dict.fromkeys((RAY_FOLDER_VARIABLE, session_folder.VARIABLE), str(self.folder))
        if python_path := installed_python_path(os.environ.get("PYTHONPATH", "")):
            added["PYTHONPATH"] = python_path
        kept = ray_environment(os.environ).keys() - added.keys() - {"PYTHONPATH"}
        hidden = {name: value for name, value in os.environ.items() if name not in kept}
        try:
            for name in hidden:
                del os.environ[name]
            os.environ.update(added)
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
            os.environ.update(hidden)
        below = {pid: start_time(pid) for pid in descendants(os.getpid()) if _name(pid) in VITAL}
        self._vital = {pid: started for pid, started in below.items() if started is not None}

    def ray_is_gone(self) -> bool:
        """Return whether Ray was ended from outside, as of the last tenth of a second.

        Also starts a guard again that was ended from outside, unless it was dismissed.
        """
        if time.monotonic() - self._checked_at > CHECK_SECONDS:
            self._checked_at = time.monotonic()
            if self._pipes and self._process.poll() is not None:
                # The second process still waits at the first pipe.
                self._begin()
            self._is_gone = any(start_time(pid) != started for pid, started in self._vital.items())
        return self._is_gone

    def end_processes(self) -> None:
        """End what a failed start of Ray left behind, and keep the folder for the next start."""
        kill_processes(self.folder, but=(os.getpid(), self._process.pid))

    def dismiss(self) -> None:
        """End what is left of Ray, with its folder, and the guard."""
        while self._pipes:
            os.close(self._pipes.pop())
        # If processes hang in the kernel, the guard goes on waiting for them.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DISMISS_SECONDS)

    def remove_folder(self) -> None:
        """Remove the folder after `ray.shutdown`, which may have created it again."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self) -> None:
        reader, parent_pipe = os.pipe2(os.O_CLOEXEC)
        self._pipes.append(parent_pipe)
        arguments = str(reader), str(os.getpid()), str(self.folder)
        self._process = subprocess.Popen(
            command("orchestrator.cluster.ray.guard", *arguments),
            pass_fds=(reader,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=ray_environment(os.environ),
        )
        os.close(reader)


def _new_folder() -> Path:
    """Return a new name for the folder of one Ray. Raises MachineUnready."""
    return session_folder.usable_parent(os.environ) / session_folder.name(os.getpid())


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def belonging(folder: Path, *, but: Sequence[int]) -> list[int]:
    """Return the living processes of the Ray that keeps its files there.

    They have its folder in their environment, or a file there open for writing: Ray's Python
    processes overwrite their environment with their title.
    """
    entry = f"{RAY_FOLDER_VARIABLE}={folder}".encode()
    return [
        pid
        for pid in _pids()
        if pid not in but
        and start_time(pid) is not None
        and (carries(pid, entry) or _writes_in(pid, folder))
    ]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _writes_in(pid: int, folder: Path) -> bool:
    """Return whether the process has a file there open for writing. Anyone may read logs."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if link.lstat().st_mode & 0o200 and link.readlink().is_relative_to(folder):
                    return True
    return False


def end_ray(folder: Path, *, but: Sequence[int]) -> None:
    """Kill all processes of the Ray of this folder, and remove the folder."""
    kill_processes(folder, but=but)
    for group in orphaned_cgroups():
        group.end()
    shutil.rmtree(folder, ignore_errors=True)


def kill_processes(folder: Path, *, but: Sequence[int]) -> None:
    """Kill what belongs to the Ray of this folder, until nothing does.

    Wardens get a while to end what their launchers have started.
    """
    began = time.monotonic()
    num_empty_scans = 0
    while num_empty_scans < _EMPTY_SCANS and time.monotonic() - began < KILL_SECONDS:
        found = belonging(folder, but=but)
        num_empty_scans = 0 if found else num_empty_scans + 1
        is_over = time.monotonic() - began > GRACE_SECONDS
        for pid in found:
            if is_over or launcher_of(pid) is None:
                kill(pid)
        time.sleep(0.02)


def end_orphaned(beside: Path) -> None:
    """End Rays with folders next to this one whose orchestrator and guard were killed together."""
    for file in beside.parent.glob(f"{session_folder.PREFIX}*/{_OWNER_FILE}"):
        with suppress(OSError, ValueError):
            pid, start, namespace = file.read_text().split(":")
            if (
                file.parent != beside
                and file.stat().st_uid == os.getuid()
                and has_ended(pid, start, namespace)
            ):
                end_ray(file.parent, but=(os.getpid(),))


def main() -> int:
    parent_pipe, orchestrator, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    if os.fork() == 0:
        os.setsid()
        return _wait_and_end(parent_pipe, orchestrator, folder)
    with suppress(OSError):  # Ray reports errors of the folder
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / _OWNER_FILE).write_text(process_identity(orchestrator))
        end_orphaned(folder)
    return _wait_and_end(parent_pipe, orchestrator, folder)


def _wait_and_end(parent_pipe: int, orchestrator: int, folder: Path) -> int:
    while os.read(parent_pipe, 1):
        pass
    end_ray(folder, but=(orchestrator, os.getpid()))
    return 0
