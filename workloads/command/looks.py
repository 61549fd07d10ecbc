"""How often a rank looks for new lines of its program, and how it waits in between."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress

LONGEST_SECONDS, SHORTEST_SECONDS = 0.05, 0.01
# Until the first line has come, which may be one of short steps.
FIRST_SECONDS = 0.02
# Looks in the time that a line reports. The pace of lines is known by the looks between which they
# came, and a dozen lines that each report half of their time have to show it.
_LOOKS_PER_STEP = 4


def seconds_between(step_seconds: Sequence[float]) -> float:
    """Return the seconds from one look to the next, by the steps that were reported so far."""
    if not step_seconds:
        return FIRST_SECONDS
    return min(max(step_seconds[-1] / _LOOKS_PER_STEP, SHORTEST_SECONDS), LONGEST_SECONDS)


def code_within(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the program's exit code; None if it has not ended after these seconds.

    `Popen.wait` wakes up many times in 0.05 s, which costs a program with short steps.
    """
    if (code := process.poll()) is not None:
        return code
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # a kernel before 5.3
        with suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None
    try:
        end = select.poll()
        end.register(handle, select.POLLIN)
        end.poll(seconds * 1000)
    finally:
        os.close(handle)
    return process.poll()
