"""A sampler that learns nothing: the best prediction first, or at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from orchestrator.core.problem.arrays import Ints, Mask
from orchestrator.core.search.outcome import Outcome
from orchestrator.core.search.proposer import Reason


class FixedOrder:
    """A `Sampler` that takes the rows in an order that is known from the start.

    If `is_random`, it says that the order is one of chance.
    """

    def __init__(self, order: Ints, *, is_random: bool = False) -> None:
        self._order, self._is_random = order, is_random

    def choose(self, open_rows: Mask) -> tuple[int, Reason]:
        why = f"random among {np.count_nonzero(open_rows)} untried" if self._is_random else ""
        return int(self._order[np.argmax(open_rows[self._order])]), why

    def start(self, row: int) -> None:
        pass

    def tell(self, row: int, outcome: Outcome) -> None:
        pass

    def forget(self, row: int) -> None:
        pass

    def rebuild(self, told: Mapping[int, Outcome], under_way: Sequence[int]) -> None:
        pass
