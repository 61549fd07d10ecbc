"""What leases hold, added up: slots by seconds from the moment they are reserved until they are given back, with and without an attempt on them.

It has no clock: times are seconds of its caller's, real or simulated. It does not know what a lease is, beyond telling one from another.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from orchestrator.core.held import Leased


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


@dataclass(kw_only=True)
class _Span:
    num_slots: int
    busy_since: float | None = None  # with an attempt


class LeaseMeter:
    """Of one scheduler, from when it was opened."""

    def __init__(self, now: float) -> None:
        self._spans: dict[Hashable, _Span] = {}
        self._held, self._busy = _SlotSeconds(), _SlotSeconds()
        self._capacity, self._seen_at = 0.0, now

    def stands(self, lease: Hashable, *, num_slots: int, at: float) -> None:
        """The slots of a lease are reserved."""
        self._spans[lease] = _Span(num_slots=num_slots)
        self._held.begin(num_slots, at)

    def knows(self, lease: Hashable) -> bool:
        return lease in self._spans

    def begins(self, lease: Hashable, at: float) -> None:
        """An attempt has a standing lease for itself."""
        span = self._spans[lease]
        span.busy_since = at
        self._busy.begin(span.num_slots, at)

    def ends(self, lease: Hashable, at: float) -> float:
        """The attempt on it is over. The GPU-seconds that it held; 0 where it never got as far as to begin."""
        span = self._spans.get(lease)
        if span is None or span.busy_since is None:
            return 0.0
        seconds, span.busy_since = at - span.busy_since, None
        self._busy.end(span.num_slots, at)
        return seconds * span.num_slots

    def returned(self, lease: Hashable, at: float) -> None:
        """Its slots are given back, whatever was on them; nothing happens where they never were reserved."""
        span = self._spans.pop(lease, None)
        if span is None:
            return
        self._held.end(span.num_slots, at)
        if span.busy_since is not None:
            self._busy.end(span.num_slots, at)

    def leased(self, now: float, *, total_slots: int) -> Leased:
        """Up to now. The cluster counts as having had so many slots since this was last asked: nodes come and go."""
        self._capacity += (now - self._seen_at) * total_slots
        self._seen_at = now
        held = self._held.until(now)
        # Of large numbers the last digits are lost, and what is 0 may come out below it.
        return Leased(held=held, idle=max(held - self._busy.until(now), 0.0), capacity=self._capacity)
