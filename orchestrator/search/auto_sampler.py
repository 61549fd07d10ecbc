"""The sampler of strategy `auto`: this project's model over the rows that it considers.

It alone can say which results are doubtful, what an untried row should gain, and whether any fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.search.outcome import Outcome
from orchestrator.core.search.proposer import Proposer, Reason
from orchestrator.search.blas_threads import one_blas_thread

# Rows that `auto` considers: the first of the order, those that need least memory, and an even
# spread over the rest.
CONSIDERED = 16_384
# How many of them are those predicted to need least: they show whether anything fits.
LEAST = CONSIDERED // 16


class AutoSampler:
    """A `Sampler` with a model of speed, memory and failures."""

    def __init__(
        self, proposer: Proposer, considered: Ints, *, num_rows: int, knows_least: bool
    ) -> None:
        """`proposer` numbers the `considered` rows from 0.

        `knows_least`: those predicted to need least memory are among them.
        """
        self._proposer, self._considered = proposer, considered
        self._knows_least = knows_least
        # The number of a row among the considered; -1: it is none of them.
        self._place = np.full(num_rows, -1, dtype=np.int64)
        self._place[considered] = np.arange(len(considered))

    def choose(self, open_rows: Mask) -> tuple[int, Reason] | None:
        among = open_rows[self._considered]
        if not among.any():
            return None
        with one_blas_thread():
            row, reason = self._proposer.choose(among)
        return int(self._considered[row]), reason

    def start(self, row: int) -> None:
        if self._place[row] >= 0:
            self._proposer.add_pending(int(self._place[row]))

    def tell(self, row: int, outcome: Outcome) -> None:
        if self._place[row] >= 0:
            self._proposer.tell(int(self._place[row]), outcome)

    def forget(self, row: int) -> None:
        if self._place[row] >= 0:
            self._proposer.forget(int(self._place[row]))

    def rebuild(self, told: Mapping[int, Outcome], under_way: Sequence[int]) -> None:
        among = {int(self._place[row]): one for row, one in told.items() if self._place[row] >= 0}
        started = [int(self._place[row]) for row in under_way if self._place[row] >= 0]
        self._proposer.rebuild(among, started)

    # -- what only a model can say ---------------------------------------------------------------

    def doubtful(self, *, but: Iterable[int] = ()) -> tuple[int, float] | None:
        """Return a told row far worse than its neighbours suggest, and the score they suggest.

        The rows of `but` are left out. None: no row is.
        """
        with one_blas_thread():
            found = self._proposer.doubtful(but={int(self._place[row]) for row in but})
        return None if found is None else (int(self._considered[found[0]]), found[1])

    def expected_gain(self, open_rows: Mask) -> float | None:
        """The largest expected gain of an open row over the best, relative. None: nothing ran."""
        with one_blas_thread():
            return self._proposer.expected_gain(open_rows[self._considered])

    def probability_of_fitting(self) -> Floats | None:
        """Each row's probability to fit, NaN for rows that are not considered.

        None: no limit is known.
        """
        with one_blas_thread():
            fits = self._proposer.probability_of_fitting()
        if fits is None:
            return None
        found = np.full(len(self._place), np.nan)
        found[self._considered] = fits
        return found

    def hopeless(self, open_rows: Mask) -> int | None:
        """The row whose out-of-memory shows that nothing fits, if so: it needs least of all."""
        if not self._knows_least:
            return None
        with one_blas_thread():
            found = self._proposer.hopeless(open_rows[self._considered])
        return None if found is None else int(self._considered[found])


def considered_rows(order: Ints, memory: Floats | None) -> Ints:
    """Return the considered rows in their own order; of a small lattice these are all.

    `order` holds all rows, best prediction first; `memory` is what each is predicted to need.
    """
    if len(order) <= CONSIDERED:
        return np.arange(len(order), dtype=np.int64)
    first = CONSIDERED * 3 // 4
    least = np.array([], dtype=np.int64)
    if memory is not None:
        least = np.argsort(memory, kind="stable")[:LEAST]
    spread = np.linspace(first, len(order) - 1, CONSIDERED - first - len(least)).astype(np.int64)
    return np.unique(np.concatenate([order[:first], order[spread], least]))
