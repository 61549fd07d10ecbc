"""Searches what a program printed for steps, once the launcher has copied it into the log."""

from __future__ import annotations

import fcntl
import struct
import termios
import time
from contextlib import suppress
from pathlib import Path

from layout_sweep.regular_file import read_regular
from orchestrator.core.trial.terminal_text import plain_text
from orchestrator.core.trial.unread_output import why_unread

# The end of the output that is searched.
_MOST_BYTES = 1 << 20
# The wait for the last lines after the launcher has read them, and on a busy machine in all.
_COPY_SECONDS, _LONGEST_SECONDS = 0.5, 10.0
_POLL_SECONDS = 0.02
_STDOUT = 1


def why_steps_are_unread(log: Path, *, pipe: int = _STDOUT) -> str | None:
    """Return why the steps that a program prints are not read; None if it prints none.

    The launcher copies `pipe`, to which this process and the program write, into `log`.
    """
    now = time.monotonic()
    until, latest = now + _COPY_SECONDS, now + _LONGEST_SECONDS
    while True:
        is_copied = _unread_bytes(pipe) == 0
        with suppress(OSError):
            offset = max(0, log.stat().st_size - _MOST_BYTES)
            found = read_regular(log, offset=offset, num_bytes=_MOST_BYTES)
            if why := why_unread(plain_text(found.content).splitlines()):
                return why
        now = time.monotonic()
        if not is_copied:
            until = min(now + _COPY_SECONDS, latest)
        if now > until:
            return None
        time.sleep(_POLL_SECONDS)


def _unread_bytes(pipe: int) -> int:
    """Return how many bytes in a pipe nobody has read yet; 0 for something else."""
    try:
        found = fcntl.ioctl(pipe, termios.FIONREAD, bytes(struct.calcsize("i")))
    except OSError:
        return 0
    return int(struct.unpack("i", found)[0])
