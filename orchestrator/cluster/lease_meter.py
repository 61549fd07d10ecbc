"""Adds up what leases hold: slots times seconds from reservation to return, used or idle.

It has no clock: times are the caller's seconds, real or simulated. A lease is any hashable value.
"""

from __future__ import annotations

from collections.abc import Hashable

from orchestrator.core.trial.reserved_time import Leased


class _SlotSeconds:
    """Slots times seconds of intervals; begins and ends may come in any order."""

    def __init__(self) -> None:
        self._slots = 0
        self._weight = 0.0  # slots x (begin - end)

    def begin(self, num_slots: int, at: float) -> None:
        self._slots += num_slots
        self._weight += num_slots * at

    def end(self, num_slots: int, at: float) -> None:
        self.begin(-num_slots, at)

    def until(self, now: float) -> float:
        return self._slots * now - self._weight


class LeaseMeter:
    """Adds up what the leases of one scheduler hold."""

    def __init__(self, now: float) -> None:
        self._leased: dict[Hashable, int] = {}  # lease -> slots
        self._attempts: dict[Hashable, tuple[int, float]] = {}  # slots and begin
        self._reserved, self._busy = _SlotSeconds(), _SlotSeconds()
        self._capacity, self._counted_at = 0.0, now

    def reserved(self, lease: Hashable, *, num_slots: int, at: float) -> None:
        """Note that the slots of a lease are reserved."""
        self._leased[lease] = num_slots
        self._reserved.begin(num_slots, at)

    def begins(self, attempt: Hashable, *, num_slots: int, at: float) -> None:
        """Note that an attempt has this many slots of a reserved lease for itself."""
        self._attempts[attempt] = num_slots, at
        self._busy.begin(num_slots, at)

    def ends(self, attempt: Hashable, at: float) -> float:
        """Note that an attempt is over, before its lease is returned; return its GPU-seconds."""
        if attempt not in self._attempts:
            return 0.0
        num_slots, since = self._attempts.pop(attempt)
        self._busy.end(num_slots, at)
        return (at - since) * num_slots

    def returned(self, lease: Hashable, at: float) -> None:
        """Note that the slots of a lease are given back, if they were reserved."""
        if lease in self._leased:
            self._reserved.end(self._leased.pop(lease), at)

    def leased(self, now: float, *, total_slots: int) -> Leased:
        """Return the sums until now. `total_slots`: slots of the cluster since the last call."""
        self._capacity += (now - self._counted_at) * total_slots
        self._counted_at = now
        reserved = self._reserved.until(now)
        # Rounding may turn 0 into a negative number.
        return Leased(
            reserved=reserved,
            idle=max(reserved - self._busy.until(now), 0.0),
            capacity=self._capacity,
        )
