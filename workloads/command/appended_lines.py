"""The lines that a program appends to a file, read as they come."""

from __future__ import annotations

from pathlib import Path

from layout_sweep.regular_file import read_regular
from orchestrator.core.trial.protocol import MAX_RESULT_BYTES

APPEND = 'append to it (mode "a"), one line for each step'
# So much of what was read before is compared at each read. Lines are about as long.
_COMPARED_BYTES = 256
_MAX_BYTES = 64 * MAX_RESULT_BYTES


class AppendedLines:
    """Reads what was appended since the last read, and notices lines that were lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Why not every line could be read.
        self.lost: str | None = None
        # True if the file was written without becoming longer. That proves nothing: a network file
        # system changes the time of a file after its content.
        self.may_have_lost_lines = False
        self._offset = 0
        self._rest = b""
        # The end of what was read: bytes that a file to which lines are appended keeps.
        self._last_bytes = b""
        # When the file was last written, if all of it has been read; else 0.
        self._read_at_ns = 0
        # When the file was last written before it was read, in ns since 1970; 0: never read.
        self.written_at_ns = 0
        # True while the end of a line that is too long has not come.
        self._is_in_long_line = False

    def read(self) -> tuple[list[bytes], bool]:
        """Return the new complete lines, and whether the file had no more of them."""
        new = self._read_new()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if self._is_in_long_line:
            # Its beginning was returned; the rest of it is left out.
            self._is_in_long_line = not lines
            lines, self._rest = lines[1:], self._rest if lines else b""
        if len(self._rest) > MAX_RESULT_BYTES:
            lines, self._rest = [*lines, self._rest[:MAX_RESULT_BYTES]], b""
            self._is_in_long_line = True
        return lines, len(new) < MAX_RESULT_BYTES

    def read_to_the_end(self) -> list[bytes]:
        """Return the lines that are left of a program that has ended, the last without its end."""
        found: list[bytes] = []
        before = -1
        while before != self._offset and self._offset < _MAX_BYTES:
            before = self._offset
            found += self.read()[0]
        rest, self._rest = self._rest, b""
        return [*found, rest]

    def _read_new(self) -> bytes:
        known = self._last_bytes
        try:
            found = read_regular(
                self.path,
                offset=self._offset - len(known),
                num_bytes=len(known) + MAX_RESULT_BYTES,
            )
        except FileNotFoundError:
            return b""
        except OSError as exc:
            self.lost = f"{self.path.name}: {exc.strerror}"
            return b""
        if not found.content.startswith(known):
            self.lost = f"{self.path.name} was written anew, and lines were lost: {APPEND}"
        new = found.content[len(known) :]
        self._last_bytes = (known + new)[-_COMPARED_BYTES:]
        is_changed = found.changed_at_ns != self._read_at_ns
        self.may_have_lost_lines |= bool(self._read_at_ns) and is_changed and not new
        is_read = self._offset + len(new) == found.size
        self._read_at_ns = found.changed_at_ns if is_read else 0
        self.written_at_ns = found.changed_at_ns
        return new
