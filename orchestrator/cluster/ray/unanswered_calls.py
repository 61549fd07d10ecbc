"""How long the agents of an attempt have left a question unanswered, by the time that somebody listened.

A node that is cut off closes no connection, and Ray takes a minute to call it dead. Time in which the orchestrator itself did not
look, because it was stopped or waited for its database, is not held against anybody: the answer may have come meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection

UNANSWERED_SECONDS = (
    20.0  # beyond it an agent is lost; on a node that swaps, an answer takes seconds
)
LISTENED_SECONDS = 2.0  # that one look after another counts for at most; twice what lies between them where all is well


class UnansweredCalls:
    """Counts how long each of one attempt's agents has been silent, by its index."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._looked_at: float | None = None

    def listen(self, now: float, unanswered: Collection[int]) -> None:
        """Look whose answer is still outstanding; the others have spoken."""
        listened = (
            min(now - self._looked_at, LISTENED_SECONDS) if self._looked_at is not None else 0.0
        )
        self._looked_at = now
        self._seconds = {index: self._seconds.get(index, 0.0) + listened for index in unanswered}

    def lost(self) -> int | None:
        """The agent that has been silent for the longest, if that is too long."""
        index = max(self._seconds, key=lambda i: self._seconds[i], default=None)
        return index if index is not None and self._seconds[index] > UNANSWERED_SECONDS else None
