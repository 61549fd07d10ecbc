"""How often a rank reads new lines of its program, and how it waits in between."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress

LONGEST_SECONDS, SHORTEST_SECONDS = 0.05, 0.01
# Until the first line has come, which may be one of short steps.
FIRST_SECONDS = 0.02
# Reads in the time of the last step. The pace of lines is known by the reads between which they
# came, and a dozen lines that each report half of their time have to show it.
_READS_PER_STEP = 4


def poll_seconds(step_seconds: Sequence[float]) -> float:
    """Return the seconds from one read to the next, by the steps that were reported so far."""
    if not step_seconds:
        return FIRST_SECONDS
    return min(max(step_seconds[-1] / _READS_PER_STEP, SHORTEST_SECONDS), LONGEST_SECONDS)


def exit_code_within(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the program's exit code; None if it has not ended after these seconds.

    `Popen.wait` wakes up many times in 0.05 s, which costs a program with short steps.
    """
    if (code := process.poll()) is not None:
        return code
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        # A Python that was built for kernels before 5.3, or one that runs on such a kernel.
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
