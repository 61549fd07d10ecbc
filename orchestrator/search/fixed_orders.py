"""The samplers that learn nothing: the best prediction first, or at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.core.search.lattice import Ints
from orchestrator.core.search.proposer import Choice, Mask
from orchestrator.core.search.told import Told


class FixedOrder:
    """A `Sampler` that takes the rows in an order that is known from the start."""

    def __init__(self, order: Ints) -> None:
        self._order = order

    def choose(self, open_rows: Mask) -> Choice:
        return Choice(row=int(self._order[np.argmax(open_rows[self._order])]), why="")

    def start(self, row: int) -> None:
        pass

    def tell(self, told: Told) -> None:
        pass

    def forget(self, row: int) -> None:
        pass

    def rebuild(self, told: Sequence[Told], under_way: Sequence[int]) -> None:
        pass


class RandomOrder(FixedOrder):
    """A `Sampler` that takes the rows in an order of chance, and says so."""

    def choose(self, open_rows: Mask) -> Choice:
        row = super().choose(open_rows).row
        return Choice(row=row, why=f"random among {np.count_nonzero(open_rows)} untried")
