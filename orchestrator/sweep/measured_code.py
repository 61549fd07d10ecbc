"""The code that attempts measure: a user's program may be edited while a sweep runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.trial.fingerprint import Fingerprint

# Looking for edits takes at most this share of the time.
LOOKING_SHARE = 0.05


@dataclass(eq=False)
class MeasuredCode:
    """The fingerprint of the code, as of the start of each attempt.

    `edited` returns the new one if the code has changed since it was last asked, else None; without
    it the code stays the same.
    """

    now: Fingerprint
    edited: Callable[[], Fingerprint | None] | None = None
    clock: Callable[[], float] = time.monotonic
    _not_before: float = field(default=0.0, init=False)

    def at_start(self) -> Fingerprint:
        """Return the code that an attempt measures which starts now."""
        began = self.clock()
        if self.edited is not None and began >= self._not_before:
            self.now = self.edited() or self.now
            ended = self.clock()
            self._not_before = ended + (ended - began) / LOOKING_SHARE
        return self.now


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
    except OSError:  # it is gone, or may not be read
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
