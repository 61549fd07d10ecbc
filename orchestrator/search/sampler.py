"""The interface of a sampler: it chooses the next of the rows that are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from orchestrator.core.problem.arrays import Mask
from orchestrator.core.search.outcome import Outcome
from orchestrator.core.search.proposer import Reason


class Sampler(Protocol):
    """Chooses rows of one lattice. `RowSearcher` tells it of every change, in order.

    A row is open until it is asked for, ruled out or set aside.
    """

    def choose(self, open_rows: Mask) -> tuple[int, Reason] | None:
        """Return the open row to measure next, and why: in words, or what is expected of it.

        At least one is open.
        None: it prefers none of them, and the best by prediction is next.
        """
        ...

    def start(self, row: int) -> None:
        """Note that a row is under way, asked for or not."""
        ...

    def tell(self, row: int, outcome: Outcome) -> None:
        """Note how a row ended; a second outcome replaces the first."""
        ...

    def forget(self, row: int) -> None:
        """Drop the outcome of a row, or that it is under way. The sampler may not know the row."""
        ...

    def rebuild(self, told: Mapping[int, Outcome], under_way: Sequence[int]) -> None:
        """Forget everything except these outcomes, in the order of telling, and rows under way."""
        ...
