"""The records of the kernel's log, from /dev/kmsg."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
# One read returns one record.
MOST_RECORD_BYTES, MOST_RECORDS = 8192, 100_000


def kernel_records() -> Iterator[str]:
    """The records that the kernel still has, oldest first. Raises OSError if we may not read it."""
    log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(MOST_RECORDS):
            try:
                yield os.read(log, MOST_RECORD_BYTES).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The kernel overwrote a record before it was read: the next read skips it.
                continue
    finally:
        os.close(log)
