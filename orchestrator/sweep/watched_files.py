"""Notices that files were written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """Notices that files were written: by their sizes, their times and their places on the disk."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._seen = self._facts()

    def have_changed(self) -> bool:
        """Return whether one of them changed since the last call."""
        before, self._seen = self._seen, self._facts()
        return before != self._seen

    def _facts(self) -> list[tuple[int, int, int] | None]:
        return [_facts_of(file) for file in self._files]


def _facts_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        # It is gone, or may not be read.
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
