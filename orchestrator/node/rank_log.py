"""A rank's output on disk: its head and its tail, however much it writes, without the secrets it was given; and its last lines for a person."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from orchestrator.core.trial.redaction import Secrets, SecretStream

logger = logging.getLogger(__name__)

HEAD_BYTES = 5 << 20
TAIL_BYTES = 5 << 20
_TERMINAL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_READ_BYTES = 1 << 18
_READS_AT_ONCE = 64  # a rank that writes without end must not keep the launcher from the others


class RankLog:
    """Copies a pipe into a file until `head_bytes`, then keeps the last `tail_bytes` and writes them at the end."""

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
        self._file = path.open("xb", buffering=0)
        self._head_left = head_bytes
        self._tail_bytes = tail_bytes
        self._recent = bytearray()  # the last tail_bytes of everything, also of what the file holds
        self._num_beyond_head_bytes = 0
        self._is_told = False  # that it cannot be written

    def copy(self, pipe: int) -> bool:
        """Take what a non-blocking pipe holds now. False: its last writer has closed it."""
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
        """The last lines, without what would play tricks on a terminal or a database."""
        return plain_text(bytes(self._recent[-num_bytes:]))

    def close(self) -> None:
        """Write the tail that was held back, after a line that says how much is missing before it."""
        if self._stream is not None:
            self._keep(self._stream.close())
        if self._num_beyond_head_bytes:
            tail = self._recent[-min(self._tail_bytes, self._num_beyond_head_bytes) :]
            cut = self._num_beyond_head_bytes - len(tail)
            note = (
                f"\n[... {cut} bytes cut here: a rank's log keeps its head and its tail ...]\n".encode()
                if cut
                else b""
            )
            try:
                self._file.write(note + tail)
            except OSError as exc:
                self._tell(exc)
            self._num_beyond_head_bytes = 0
        self._file.close()

    def _keep(self, chunk: bytes) -> None:
        head = chunk[: self._head_left]
        if head:
            try:
                self._file.write(head)
            except OSError as exc:  # a full disk must not take the launcher with it; the end of the output is still reported
                self._tell(exc)
            self._head_left -= len(head)
        self._num_beyond_head_bytes += len(chunk) - len(head)
        self._recent += chunk
        if len(self._recent) > 2 * self._tail_bytes:
            del self._recent[: -self._tail_bytes]

    def _tell(self, exc: OSError) -> None:
        """Warn once: a rank may write a line every millisecond."""
        if not self._is_told:
            logger.warning("Cannot write %s: %s", self.path, exc)
        self._is_told = True


def plain_text(raw: bytes) -> str:
    """Decode what a program printed, without terminal codes and control characters; a carriage return starts a line."""
    text = raw.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL_CHARACTERS.sub("", _TERMINAL_CODES.sub("", text))
