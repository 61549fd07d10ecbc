"""How long a gang waits for the rank that made another one lose communication to fail itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

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
    # The wait of each living process for a core until this one began.
    _core_wait_seconds: dict[int, float] = field(default_factory=dict)

    def note_failure(self, now: float, *, may_be_innocent: bool, alive: Collection[int]) -> None:
        """Note that a rank has failed. A failure with a cause of its own ends the gang at once."""
        if not may_be_innocent:
            self.until = self._latest = now
        elif self.until is None:
            self._latest = now + LONGEST_SECONDS
            self._wait(now, alive)

    def is_over(self, now: float, alive: Collection[int]) -> bool:
        """Return whether the gang is to end. Otherwise the wait may just have become longer."""
        if self.until is None or now < self.until:
            return False
        before = self._core_wait_seconds
        late_seconds = sum(core_wait_seconds(pid) - before[pid] for pid in alive if pid in before)
        if now >= self._latest or late_seconds < LATE_SHARE * WAIT_SECONDS:
            return True
        self._wait(now, alive)
        return False

    def _wait(self, now: float, alive: Collection[int]) -> None:
        self.until = min(now + WAIT_SECONDS, self._latest)
        self._core_wait_seconds = {pid: core_wait_seconds(pid) for pid in alive}
