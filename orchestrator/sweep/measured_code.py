"""The code that attempts measure: a user's program may be edited while a sweep runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.trial.fingerprint import Fingerprint

# Checks for edits that can wait take at most this share of the time. One check that cannot is made
# for all attempts that have ended since the last poll.
CHECKING_SHARE = 0.05
# A check that takes no longer is made each time.
ALWAYS_CHECKED_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class AttemptCode:
    """The code when an attempt was started, and when it was checked after that.

    That is the first check after its first step, or its end, was seen: if checks take long, it may
    come many steps later. None: nobody edits the code, or it is not known yet.
    """

    at_start: Fingerprint | None = None
    when_checked: Fingerprint | None = None

    @property
    def was_edited(self) -> bool:
        """True if the code changed in between."""
        return self.when_checked not in (None, self.at_start)


@dataclass(eq=False)
class MeasuredCode:
    """The fingerprint of the code, which a user may edit meanwhile.

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
        """Return the code that a program loads which starts now, or what was last found.

        If that is older, the check after the first step finds an edit.
        """
        self.checked()
        return self.now

    def checked(self, *, at_once: bool = False) -> Fingerprint | None:
        """Check for an edit and return the code. None: a check now would take too much time.

        `at_once`: check whatever it takes.
        """
        if self.edited is None:
            return self.now
        began = self.clock()
        if began < self._not_before and not at_once:
            return None
        before, self.now = self.now, self.edited() or self.now
        ended = self.clock()
        # An edit seldom comes alone: after one, the next start checks again.
        if self.now == before and ended - began > ALWAYS_CHECKED_SECONDS:
            self._not_before = ended + (ended - began) / CHECKING_SHARE
        return self.now
