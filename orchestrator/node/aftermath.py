"""How long a gang waits for the rank that made another one lose communication to fail itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.node.processes import core_wait_seconds

WAIT_SECONDS = 0.5
# At most, while the living ranks wait for a core: theirs may be the cause, and only late.
LONGEST_SECONDS = 5.0
# Share of a wait in which processes of a rank were ready to run and had no core.
LATE_SHARE = 0.2


@dataclass(eq=False)
class Aftermath:
    """The wait that begins when a rank fails. Times are monotonic; `alive` are ids of processes."""

    # When the gang is ended. None: no rank has failed.
    until: float | None = None
    _latest: float = 0.0
    _core_wait_seconds: float = 0.0  # of the living, when the wait began

    def note_failure(self, now: float, *, may_be_innocent: bool, alive: Iterable[int]) -> None:
        """Note that a rank has failed. A failure with a cause of its own ends the gang at once."""
        if not may_be_innocent:
            self.until = self._latest = now
        elif self.until is None:
            self._latest = now + LONGEST_SECONDS
            self._wait(now, alive)

    def is_over(self, now: float, alive: Iterable[int]) -> bool:
        """Return whether the gang is to end. Otherwise the wait may just have become longer."""
        if self.until is None or now < self.until:
            return False
        alive = list(alive)
        late_seconds = core_wait_seconds(alive) - self._core_wait_seconds
        if now >= self._latest or late_seconds < LATE_SHARE * WAIT_SECONDS:
            return True
        self._wait(now, alive)
        return False

    def _wait(self, now: float, alive: Iterable[int]) -> None:
        self.until = min(now + WAIT_SECONDS, self._latest)
        self._core_wait_seconds = core_wait_seconds(alive)
