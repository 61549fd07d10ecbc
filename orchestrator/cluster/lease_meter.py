"""What leases hold, added up: slots by seconds from the moment they are reserved until they are given back, with and without an attempt on them.

It has no clock: times are seconds of its caller's, real or simulated. It does not know what a lease is, beyond telling one from another.
"""

from __future__ import annotations

from collections.abc import Hashable

from orchestrator.core.trial.reserved_time import Leased


class _SlotSeconds:
    """Slots times seconds of what begins and ends at any times, told in any order: known at once, however much there is of it."""

    def __init__(self) -> None:
        self._slots = 0
        self._weight = 0.0  # slots x when they began, less slots x when they ended

    def begin(self, num_slots: int, at: float) -> None:
        self._slots += num_slots
        self._weight += num_slots * at

    def end(self, num_slots: int, at: float) -> None:
        self.begin(-num_slots, at)

    def until(self, now: float) -> float:
        return self._slots * now - self._weight


class LeaseMeter:
    """Adds up what the leases of one scheduler hold, from when it was opened. It does not know which lease's slots an attempt has."""

    def __init__(self, now: float) -> None:
        self._leased: dict[Hashable, int] = {}  # lease -> slots
        self._attempts: dict[Hashable, tuple[int, float]] = {}  # slots, and since when
        self._held, self._busy = _SlotSeconds(), _SlotSeconds()
        self._capacity, self._seen_at = 0.0, now

    def stands(self, lease: Hashable, *, num_slots: int, at: float) -> None:
        """The slots of a lease are reserved."""
        self._leased[lease] = num_slots
        self._held.begin(num_slots, at)

    def begins(self, attempt: Hashable, *, num_slots: int, at: float) -> None:
        """An attempt has so many slots of a standing lease for itself."""
        self._attempts[attempt] = num_slots, at
        self._busy.begin(num_slots, at)

    def ends(self, attempt: Hashable, at: float) -> float:
        """The attempt on them is over, before its lease is returned. The GPU-seconds that it held; 0 where it never got as far as to begin."""
        if attempt not in self._attempts:
            return 0.0
        num_slots, since = self._attempts.pop(attempt)
        self._busy.end(num_slots, at)
        return (at - since) * num_slots

    def returned(self, lease: Hashable, at: float) -> None:
        """Its slots are given back; nothing happens where they never were reserved."""
        if lease in self._leased:
            self._held.end(self._leased.pop(lease), at)

    def leased(self, now: float, *, total_slots: int) -> Leased:
        """Up to now. The cluster counts as having had so many slots since this was last asked: nodes come and go."""
        self._capacity += (now - self._seen_at) * total_slots
        self._seen_at = now
        held = self._held.until(now)
        # Of large numbers the last digits are lost, and what is 0 may come out below it.
        return Leased(
            held=held, idle=max(held - self._busy.until(now), 0.0), capacity=self._capacity
        )
