"""The text of a file that somebody names, whatever it is: a pipe that nobody writes to, a device without end, a file of gigabytes."""

from __future__ import annotations

import errno
import os
import select
import time
from pathlib import Path

PIPE_SECONDS = 30.0  # for what writes into a pipe to begin, and between two of its pieces
_PIECE_BYTES = 1 << 20


class TooLarge(Exception):
    """It holds more than was asked for at most."""


def read_text(file: Path, *, most_bytes: int) -> str:
    """Read UTF-8 text. Raises TooLarge, OSError, UnicodeDecodeError."""
    # A pipe that nobody has opened for writing would block the opening for ever; read so, it is empty.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read(descriptor, most_bytes).decode()
    finally:
        os.close(descriptor)


def _read(descriptor: int, most_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    while num_bytes <= most_bytes:
        try:
            piece = os.read(descriptor, min(_PIECE_BYTES, most_bytes + 1 - num_bytes))
        except BlockingIOError:
            _await_more(descriptor)
            continue
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        num_bytes += len(piece)
    raise TooLarge


def _await_more(descriptor: int) -> None:
    began = time.monotonic()
    if not select.select([descriptor], [], [], PIPE_SECONDS)[0]:
        raise TimeoutError(
            errno.ETIMEDOUT, f"nothing came out of it for {time.monotonic() - began:.0f} s"
        )
