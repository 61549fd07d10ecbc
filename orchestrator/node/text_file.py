"""Reads the text of any file a user names: also an empty pipe, or a file without end."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

# Longest wait for a pipe's writer to begin, and for its next piece.
PIPE_SECONDS = 30.0
_PIECE_BYTES = 1 << 20


class TooLarge(Exception):
    """The file is longer than `most_bytes`."""


def read_text(file: Path, *, most_bytes: int) -> str:
    """Read UTF-8 text. Raises TooLarge, OSError, UnicodeDecodeError."""
    # Without O_NONBLOCK, opening a pipe without a writer would block forever.
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
            if not select.select([descriptor], [], [], PIPE_SECONDS)[0]:
                text = f"nothing came out of it for {PIPE_SECONDS:.0f} s"
                raise TimeoutError(errno.ETIMEDOUT, text) from None
            continue
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        num_bytes += len(piece)
    raise TooLarge
