"""Reads a file that a program may have made of any kind: a FIFO would block, a device has no end.

The ranks of a program and their launcher read such files.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Bytes of a file, and the file after they were read."""

    content: bytes
    size: int
    changed_at_ns: int


def read_regular(path: Path, *, offset: int = 0, num_bytes: int) -> Portion:
    """Read `num_bytes` of a regular file from the offset on, or as many as there are.

    Raises OSError; a link to a regular file is one.
    """
    # Without O_NONBLOCK a FIFO that nobody writes is waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file", str(path))
        file.seek(offset)
        content = file.read(num_bytes)
        found = os.fstat(descriptor)
    return Portion(content=content, size=found.st_size, changed_at_ns=found.st_mtime_ns)
