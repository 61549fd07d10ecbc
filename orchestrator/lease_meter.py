"""What gangs hold, added up: slots by seconds from the moment they are reserved until they are given back, with and without an attempt on them.

It has no clock: times are seconds of its caller's, real or simulated. It does not know what a gang is, beyond telling one from another.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from orchestrator.core.held import Leased


@dataclass(kw_only=True)
class _Lease:
    num_slots: int
    stood_at: float
    busy_seconds: float = 0.0  # with attempts that have ended
    busy_since: float | None = None  # with one that has not

    def held(self, now: float) -> float:
        return (now - self.stood_at) * self.num_slots

    def idle(self, now: float) -> float:
        under_way = now - self.busy_since if self.busy_since is not None else 0.0
        return (now - self.stood_at - self.busy_seconds - under_way) * self.num_slots


class LeaseMeter:
    """Of one scheduler, from when it was opened."""

    def __init__(self, now: float) -> None:
        self._leases: dict[Hashable, _Lease] = {}
        self._held = self._idle = self._capacity = 0.0  # of leases that are over; of the cluster until `_seen_at`
        self._seen_at = now

    def stands(self, gang: Hashable, *, num_slots: int, at: float) -> None:
        """The slots of a gang are reserved."""
        self._leases[gang] = _Lease(num_slots=num_slots, stood_at=at)

    def knows(self, gang: Hashable) -> bool:
        return gang in self._leases

    def begins(self, gang: Hashable, at: float) -> None:
        """An attempt has a standing gang for itself."""
        self._leases[gang].busy_since = at

    def ends(self, gang: Hashable, at: float) -> float:
        """The attempt on it is over. The GPU-seconds that it held; 0 where it never got as far as to begin."""
        lease = self._leases.get(gang)
        if lease is None or lease.busy_since is None:
            return 0.0
        seconds, lease.busy_since = at - lease.busy_since, None
        lease.busy_seconds += seconds
        return seconds * lease.num_slots

    def returned(self, gang: Hashable, at: float) -> None:
        """Its slots are given back, whatever was on them; nothing happens where they never were reserved."""
        lease = self._leases.pop(gang, None)
        if lease is not None:
            self._held += lease.held(at)
            self._idle += lease.idle(at)

    def leased(self, now: float, *, total_slots: int) -> Leased:
        """Up to now. The cluster counts as having had so many slots since this was last asked: nodes come and go."""
        self._capacity += (now - self._seen_at) * total_slots
        self._seen_at = now
        return Leased(
            held=self._held + sum(lease.held(now) for lease in self._leases.values()),
            idle=self._idle + sum(lease.idle(now) for lease in self._leases.values()),
            capacity=self._capacity,
        )
