"""Ends the processes of a local Ray when the orchestrator that started it is killed.

Ray's own agents notice that too, but while they report it to the head that is gone as well they live on for a minute. This is a
process of its own, in a session of its own: it waits for the end of a pipe whose other end only the orchestrator holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.processes import descendants, kill, kill_found, start_time

GRACE_SECONDS = 2.0  # launchers and rank servers end by themselves within 0.1 s, and clean up; what is killed cannot
VITAL = ("raylet", "gcs_server")  # without one of them Ray answers no more, and many calls of its driver wait for ever


@dataclass(frozen=True, kw_only=True)
class RayGuard:
    """A guard over processes as they stood when it was made."""

    process: subprocess.Popen[bytes]
    life_line: int
    watched: Mapping[int, int]  # process id -> start time
    vital: Sequence[int]

    @classmethod
    def over(cls, pids: Sequence[int]) -> RayGuard:
        """Watch this process; once it is gone, end those of `pids` that are left (each known by its id and start time)."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        watched = {pid: start for pid in pids if (start := start_time(pid)) is not None}
        named = [f"{pid}:{start}" for pid, start in watched.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.ray_guard", str(reader), *named],
            pass_fds=(reader,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reader)
        return cls(process=process, life_line=writer, watched=watched, vital=[pid for pid in watched if _name(pid) in VITAL])

    def ray_is_gone(self) -> bool:
        """Whether Ray was ended from outside, as by a SIGTERM to the whole process group or job."""
        return any(start_time(pid) != self.watched[pid] for pid in self.vital)

    def dismiss(self) -> None:
        """Ray was shut down: end what is left of it, and the guard."""
        kill_found(lambda: [pid for pid, start in self.watched.items() if start_time(pid) == start], patience_seconds=GRACE_SECONDS)
        self.process.kill()
        self.process.wait()
        os.close(self.life_line)


def ray_processes() -> list[int]:
    """What runs below this process: right after a local Ray has started, that is Ray."""
    return descendants(os.getpid())


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def main() -> int:
    life_line = int(sys.argv[1])
    watched = [(int(pid), int(start)) for pid, _, start in (argument.partition(":") for argument in sys.argv[2:])]
    while os.read(life_line, 1):
        pass
    time.sleep(GRACE_SECONDS)
    for pid, start in watched:
        if start_time(pid) == start:
            kill(pid)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
