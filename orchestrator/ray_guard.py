"""Ends the processes of a local Ray when the orchestrator that started it is killed.

Ray's own agents notice that too, but while they report it to the head that is gone as well they live on for a minute. This is a
process of its own, in a session of its own: it waits for the end of a pipe whose other end only the orchestrator holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.processes import descendants, kill, start_time

GRACE_SECONDS = 2.0  # launchers and rank servers end by themselves within 0.1 s, and clean up; what is killed cannot


@dataclass(frozen=True, kw_only=True)
class RayGuard:
    """A guard over processes as they stood when it was made."""

    process: subprocess.Popen[bytes]
    life_line: int

    @classmethod
    def over(cls, pids: Sequence[int]) -> RayGuard:
        """Watch this process; once it is gone, end those of `pids` that are left (each known by its id and start time)."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        named = [f"{pid}:{start}" for pid in pids if (start := start_time(pid)) is not None]
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.ray_guard", str(reader), *named],
            pass_fds=(reader,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reader)
        return cls(process=process, life_line=writer)

    def dismiss(self) -> None:
        """Ray was shut down in order: nothing is left to end."""
        self.process.kill()
        self.process.wait()
        os.close(self.life_line)


def ray_processes() -> list[int]:
    """What runs below this process: right after a local Ray has started, that is Ray."""
    return descendants(os.getpid())


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
