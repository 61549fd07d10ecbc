"""Ends what a test run left when pytest is gone: databases, Ray, ranks, programs under test.

Every pytest process marks what it starts by a variable, and has a guard: `python -m tests.guard
MARK FOLDER`. It waits for the end of the last process named in MARK, kills what has the mark and
all below, and removes the folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

from orchestrator.node.processes import descendants, kill, kill_found, start_time

# PID:START of pytest, after those of a pytest around it: MARK/PID:START.
VARIABLE = "TEST_RUN"
# To end its own processes and free its shared memory, before it is killed.
POSTGRESQL_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2  # where the kernel knows no pidfd


def begin(environment: MutableMapping[str, str], folder: Path) -> None:
    """Mark what this process starts from now on, and have a guard wait for its end."""
    unmarked = {name: value for name, value in environment.items() if name != VARIABLE}
    outer = environment.get(VARIABLE)
    own = f"{os.getpid()}:{start_time(os.getpid())}"
    environment[VARIABLE] = mark = f"{outer}/{own}" if outer else own
    # It returns at once: the guard is a fork of it, and no child of pytest, whose children tests
    # count.
    subprocess.run(
        [sys.executable, "-m", "tests.guard", mark, str(folder)],
        env=unmarked,
        cwd=Path(__file__).parents[1],
        check=True,
    )


def of_run(mark: str) -> list[int]:
    """Living processes with a mark, or that of a pytest inside, and all below; never this one."""
    entry = f"{VARIABLE}={mark}".encode()
    marked = [pid for pid, found in _marks() if found == entry or found.startswith(entry + b"/")]
    # PostgreSQL writes over the environment of its processes, and a program may have emptied its
    # own.
    below = [child for pid in marked for child in descendants(pid)]
    return [pid for pid in dict.fromkeys([*marked, *below]) if pid != os.getpid()]


def _marks() -> list[tuple[int, bytes]]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                entries = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # ended, or another user's
            found += [
                (int(process.name), entry)
                for entry in entries
                if entry.startswith(f"{VARIABLE}=".encode())
            ]
    return found


def _await_end(pid: int, start: str) -> None:
    if str(start_time(pid)) != start:
        return
    try:
        process = os.pidfd_open(pid)
    except OSError:
        while str(start_time(pid)) == start:
            time.sleep(_POLL_SECONDS)
        return
    if str(start_time(pid)) == start:
        select.select([process], [], [])


def _end_postgresql(mark: str) -> None:
    """Ask servers for an immediate shutdown: a killed one leaves a segment of shared memory."""
    servers = {pid: start_time(pid) for pid in of_run(mark) if _name(pid) == "postgres"}
    for pid in servers:
        kill(pid, signal.SIGQUIT)
    until = time.monotonic() + POSTGRESQL_SECONDS
    while time.monotonic() < until and any(
        start is not None and start_time(pid) == start for pid, start in servers.items()
    ):
        time.sleep(0.01)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _apart() -> None:
    """Continue as a detached process in a session of its own, with no descriptor of the caller."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)


def main() -> int:
    mark, folder = sys.argv[1], sys.argv[2]
    _apart()
    pid, _, start = mark.rpartition("/")[2].partition(":")
    _await_end(int(pid), start)
    _end_postgresql(mark)
    kill_found(lambda: of_run(mark), patience_seconds=PATIENCE_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
