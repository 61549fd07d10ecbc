"""The code that attempts measure: a user's program may be edited while a sweep runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.trial.fingerprint import Fingerprint

# Checking for edits takes at most this share of the time,
CHECKING_SHARE = 0.05
# unless it takes no longer than this.
ALWAYS_CHECKED_SECONDS = 0.05


@dataclass(eq=False)
class MeasuredCode:
    """The fingerprint of the code, as of the start and the first step of each attempt.

    `edited` returns the new one if the code has changed since it was last asked, else None; without
    it the code stays the same.
    """

    now: Fingerprint
    edited: Callable[[], Fingerprint | None] | None = None
    clock: Callable[[], float] = time.monotonic
    _not_before: float = field(default=0.0, init=False)

    @property
    def may_change(self) -> bool:
        """True if it is the program of a user, who may edit it."""
        return self.edited is not None

    def as_of_now(self) -> Fingerprint:
        """Return the code that a program loads which starts now."""
        began = self.clock()
        if self.edited is not None and began >= self._not_before:
            before, self.now = self.now, self.edited() or self.now
            ended = self.clock()
            # An edit seldom comes alone: after one, the next start checks again.
            if self.now == before and ended - began > ALWAYS_CHECKED_SECONDS:
                self._not_before = ended + (ended - began) / CHECKING_SHARE
        return self.now
