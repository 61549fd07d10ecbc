"""The end of a program whose numbers are enough: a file asks it, then SIGTERM.

If it does not end, its rank's end kills it.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from workloads.command.handover import Handover
from workloads.command.polling import exit_code_within, poll_seconds

# A program looks for the file once per step, and writes its result after the last one.
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 10.0
_STEPS = 2.0
# After SIGTERM, for a program that has to end others.
_TERM_SECONDS = 2.0
# A document that does not change for this long, and for this many of its steps, is the last one.
_SETTLED_SECONDS, _SETTLED_STEPS = 5.0, 3.0


class FinalDocument:
    """Notices that a program has written its document, and does not end."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        # Time and size of the file, and the number of steps until then.
        self._seen: tuple[int, int, int] | None = None
        self._since = 0.0
        self._patience_seconds = _SETTLED_SECONDS

    def is_written(self) -> bool:
        """Return whether a valid document, and no step after it, has been there for some time."""
        seen, now = self._state(), time.monotonic()
        if seen is None or seen != self._seen:
            self._seen, self._since, self._patience_seconds = seen, now, _SETTLED_SECONDS
        if seen is None or now - self._since < self._patience_seconds:
            return False
        slowest = self._handover.slowest_step()
        if slowest is None:
            self._since = now  # it may become valid
            return False
        self._patience_seconds = max(_SETTLED_SECONDS, _SETTLED_STEPS * slowest)
        return now - self._since >= self._patience_seconds

    def _state(self) -> tuple[int, int, int] | None:
        with suppress(OSError):
            stat = self._handover.document.stat()
            return stat.st_mtime_ns, stat.st_size, self._handover.metrics.num_steps_told
        return None


def ask_to_end(stop_file: Path) -> None:
    """Show the program, and the other ranks of this node, that the numbers are enough."""
    # The program may have removed the folder.
    with suppress(OSError):
        stop_file.touch()


def end_patience_seconds(step_seconds: Sequence[float]) -> float:
    """Return how long a program with such steps has to end by itself, once it was asked."""
    step = statistics.median(step_seconds) if step_seconds else 0.0
    return min(max(_LEAST_SECONDS, _STEPS * step), _MOST_SECONDS)


def wait_for_end(
    process: subprocess.Popen[bytes],
    step_seconds: Sequence[float],
    *,
    meanwhile: Callable[[], None],
) -> bool:
    """Wait until a program that was asked has ended, or need not be waited for any longer.

    Calls `meanwhile` until the program gets a signal. Returns False if it did not end by
    itself.
    """
    until = time.monotonic() + end_patience_seconds(step_seconds)
    while (left := until - time.monotonic()) > 0:
        if exit_code_within(process, min(left, poll_seconds(step_seconds))) is not None:
            return True
        meanwhile()
    # Launchers such as torchrun print a traceback when they get a signal.
    sys.stderr.write("\nended by sweep: the numbers of this attempt are enough\n")
    sys.stderr.flush()
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_SECONDS)
    return False
