"""A rank's output on disk: its head and its tail, without the rank's secrets."""

from __future__ import annotations

import logging
import os
from io import FileIO
from pathlib import Path

from orchestrator.core.trial.redaction import Secrets, SecretStream
from orchestrator.core.trial.terminal_text import plain_text

logger = logging.getLogger(__name__)

HEAD_BYTES = 5 << 20
TAIL_BYTES = 5 << 20
_READ_BYTES = 1 << 18
# Most reads in a row: a rank that writes without end must not block the other ranks' output.
_READS_AT_ONCE = 64


class RankLog:
    """Copies a pipe into a file up to `head_bytes`; writes the last `tail_bytes` when it closes.

    The constructor creates no file: `create` does, before the first `copy`.
    """

    def __init__(
        self,
        path: Path,
        *,
        secrets: Secrets | None = None,
        head_bytes: int = HEAD_BYTES,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        self.path = path
        self._stream = SecretStream(secrets) if secrets else None
        self._file: FileIO | None = None
        self._head_left = head_bytes
        self._tail_bytes = tail_bytes
        self._recent = bytearray()  # the last tail_bytes of everything
        self._num_beyond_head_bytes = 0
        self._has_warned = False

    def create(self) -> None:
        """Create the file. Without it, output is kept as a tail only."""
        try:
            self._file = FileIO(self.path, "x")
        except OSError as exc:
            self._warn(exc)

    def copy(self, pipe: int) -> bool:
        """Read what a non-blocking pipe contains now. False: its last writer has closed it."""
        for _ in range(_READS_AT_ONCE):
            try:
                chunk = os.read(pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.write(chunk)
        return True

    def write(self, chunk: bytes) -> None:
        self._keep(self._stream.take(chunk) if self._stream is not None else chunk)

    def tail(self, num_bytes: int) -> str:
        """The last lines, safe for a terminal and a database."""
        return plain_text(bytes(self._recent[-num_bytes:]))

    def close(self) -> None:
        """Write the tail, after a line that says how many bytes before it are missing."""
        if self._stream is not None:
            self._keep(self._stream.close())
        if self._num_beyond_head_bytes:
            tail = self._recent[-min(self._tail_bytes, self._num_beyond_head_bytes) :]
            cut = self._num_beyond_head_bytes - len(tail)
            note = f"\n[... {cut} bytes cut here: a rank's log keeps its head and its tail ...]\n"
            self._write_file((note if cut else "").encode() + tail)
            self._num_beyond_head_bytes = 0
        if self._file is not None:
            self._file.close()

    def _keep(self, chunk: bytes) -> None:
        head = chunk[: self._head_left]
        if head:
            self._write_file(head)
            self._head_left -= len(head)
        self._num_beyond_head_bytes += len(chunk) - len(head)
        self._recent += chunk
        if len(self._recent) > 2 * self._tail_bytes:
            del self._recent[: -self._tail_bytes]

    def _write_file(self, data: bytes) -> None:
        """Write, or warn once: a full disk must not end the launcher, which still has the tail."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as exc:
            self._warn(exc)

    def _warn(self, exc: OSError) -> None:
        if not self._has_warned:
            logger.warning("Cannot write %s: %s", self.path, exc)
        self._has_warned = True
