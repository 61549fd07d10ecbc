"""Counts how long agents of an attempt have not answered, while the orchestrator listened.

A node that is cut off closes no connection, and Ray takes a minute to call it dead. Time in which
the orchestrator was stopped, or waited for its database, does not count: an answer may have come.
"""

from __future__ import annotations

from collections.abc import Collection

# An agent is lost after this long without an answer; on a node that swaps, answers take seconds.
UNANSWERED_SECONDS = 20.0
# Most time that counts between two calls of `count`, which are usually 1 s apart.
LISTENED_SECONDS = 2.0


class UnansweredCalls:
    """Counts by an agent's index in its attempt."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counted_at: float | None = None

    def count(self, now: float, unanswered: Collection[int]) -> None:
        """Add the time since the last call for these agents; all others have answered."""
        since = now if self._counted_at is None else self._counted_at
        self._counted_at, listened = now, min(now - since, LISTENED_SECONDS)
        self._seconds = {index: self._seconds.get(index, 0.0) + listened for index in unanswered}

    def lost(self) -> int | None:
        """Return the agent that has not answered for the longest, if that is too long."""
        index = max(self._seconds, key=lambda i: self._seconds[i], default=None)
        return index if index is not None and self._seconds[index] > UNANSWERED_SECONDS else None
