"""The kernel's log, record by record, as Linux keeps it in /dev/kmsg. Where this process may not read it, that is an OSError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
MOST_RECORD_BYTES, MOST_RECORDS = 8192, 100_000  # one read gives one record


def kernel_records() -> Iterator[str]:
    """What the kernel still remembers, oldest first."""
    log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(MOST_RECORDS):
            try:
                yield os.read(log, MOST_RECORD_BYTES).decode(errors="replace")
            except BlockingIOError:
                return
            except (
                BrokenPipeError
            ):  # a record was overwritten before it was read: the next read goes on behind it
                continue
    finally:
        os.close(log)
