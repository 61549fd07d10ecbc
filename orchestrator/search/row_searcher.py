"""Ask and tell over the rows of a lattice: which to measure next, by any strategy.

Knows nothing of layouts: `Searcher` gives it those of a cell, a benchmark the rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.search.lattice import Floats, Ints, Lattice, LatticeAxis
from orchestrator.core.search.proposer import Choice, Mask, Proposer
from orchestrator.core.search.told import Told
from orchestrator.core.sweepfile.sections import Search, Strategy
from orchestrator.core.trial.merit import Merit
from orchestrator.search.blas_threads import one_blas_thread
from orchestrator.search.optuna_proposals import OptunaProposals

# Rows that `auto` considers: the first of the order, those that need least memory, and an even
# spread over the rest.
CONSIDERED = 16_384
# How many of them are those predicted to need least: they show whether anything fits.
LEAST = CONSIDERED // 16


class RowStatus(IntEnum):
    UNTRIED = 0
    UNDER_WAY = 1
    TOLD = 2
    CONDEMNED = 3  # ruled out, until `rule_out` frees it
    # Nothing was learned; never asked for again.
    SET_ASIDE = 4


class RowSearcher:
    """The state of one search. Several asks may be outstanding; only untried rows are asked for."""

    def __init__(
        self,
        *,
        order: Ints,
        lattice: Callable[[Ints], Lattice],
        sampled: Sequence[LatticeAxis],
        search: Search,
        sequence: int = 0,
        memory: Floats | None = None,
        launch_seconds: float | None = None,
        steps_per_trial: float | None = None,
        merits: Collection[Merit] = (Merit.SPEED,),
    ) -> None:
        """`order` holds the rows, best prediction first; `lattice` gives the points of some rows;
        `sampled` are the axes for Optuna's samplers; `memory` is what each row is predicted to
        need, NaN where unknown; `merits` are those whose front `auto` looks for.

        Raises UsageInvalid when the strategy needs packages that are not installed.
        """
        num = len(order)
        self._order = order
        self.rank = np.empty(num, dtype=np.int64)
        self.rank[order] = np.arange(num)
        self._status = np.full(num, RowStatus.UNTRIED, dtype=np.int8)
        self._counts = _count(self._status)
        self.told: dict[int, Told] = {}  # in the order of telling
        seed = np.random.SeedSequence((search.seed, sequence))
        self._shuffled = np.random.default_rng(seed).permutation(num).astype(np.int64)
        self._strategy = search.strategy
        number = int(seed.generate_state(1)[0])
        self._optuna: OptunaProposals | None = None
        self._proposer: Proposer | None = None
        match search.strategy:
            case Strategy.AUTO if not num:
                pass  # no layout is legal
            case Strategy.AUTO:
                self._considered = _considered(order, memory)
                self._knows_least = memory is not None or len(self._considered) == num
                self._place = np.full(num, -1, dtype=np.int64)  # of a row among the considered
                self._place[self._considered] = np.arange(len(self._considered))
                costs = {"launch_seconds": launch_seconds, "steps_per_trial": steps_per_trial}
                self._proposer = Proposer(
                    lattice(self._considered),
                    seed=number,
                    merits=merits,
                    **{name: value for name, value in costs.items() if value is not None},
                )
            case Strategy.TPE | Strategy.GP:
                self._optuna = OptunaProposals(
                    sampled, num, told=self.told, seed=number, gp=search.strategy is Strategy.GP
                )
            case Strategy.RANDOM | Strategy.EXHAUSTIVE:
                pass
            case _:
                assert_never(search.strategy)

    def count(self, status: RowStatus) -> int:
        return int(self._counts[status])

    def status(self, row: int) -> RowStatus:
        return RowStatus(int(self._status[row]))

    def ask(self) -> Choice | None:
        """Choose an untried row, which is under way from now on; None when there is none."""
        num_open = self.count(RowStatus.UNTRIED)
        if num_open == 0:
            return None
        open_rows = self._is(RowStatus.UNTRIED)
        if self._strategy is Strategy.RANDOM:
            row = int(self._shuffled[np.argmax(open_rows[self._shuffled])])
            choice = Choice(row=row, why=f"random among {num_open} untried")
        elif self._proposer is not None and open_rows[self._considered].any():
            with one_blas_thread():
                choice = self._proposer.choose(open_rows[self._considered])
            choice = replace(choice, row=int(self._considered[choice.row]))
        elif self._optuna is not None and num_open > 1:
            row, why = self._optuna.propose(open_rows, self.rank)
            choice = Choice(row=row, why=why)
        else:
            choice = Choice(row=int(self._order[np.argmax(open_rows[self._order])]), why="")
        self.start(choice.row)
        return choice

    def start(self, row: int) -> None:
        """Put a row under way, asked for or not."""
        self._set(row, RowStatus.UNDER_WAY)
        if self._proposer is not None and self._place[row] >= 0:
            self._proposer.add_pending(int(self._place[row]))
        if self._optuna is not None:
            self._optuna.start(row)

    def tell(self, told: Told) -> None:
        """Record how a row ended; a second telling replaces the first."""
        self._set(told.row, RowStatus.TOLD)
        is_first = told.row not in self.told
        self.told[told.row] = told
        if self._proposer is not None:
            for considered in self._of_considered([told]):
                self._proposer.tell(considered)
        if self._optuna is not None:
            self._optuna.tell(told, is_first=is_first)

    def set_aside(self, row: int) -> None:
        """Never ask for a row again, and learn nothing of it."""
        self.forget(row)
        self._set(row, RowStatus.SET_ASIDE)

    def rule_out(self, rows: Mask) -> tuple[Ints, Ints]:
        """Condemn the untried ones among these rows, and free the condemned ones among the others.

        Returns both.
        """
        condemned = np.flatnonzero(self._is(RowStatus.UNTRIED) & rows)
        freed = np.flatnonzero(self._is(RowStatus.CONDEMNED) & ~rows)
        self._set_all(condemned, RowStatus.CONDEMNED)
        self._set_all(freed, RowStatus.UNTRIED)
        return condemned, freed

    def forget(self, row: int) -> None:
        """Put a row back to untried."""
        self._set(row, RowStatus.UNTRIED)
        was_told = self.told.pop(row, None) is not None
        if self._proposer is not None and self._place[row] >= 0:
            self._proposer.forget(int(self._place[row]))
        if self._optuna is not None:
            if was_told:
                self._optuna.rebuild(self._under_way())
            else:
                self._optuna.drop(row)

    def rebuild(
        self, told: Iterable[Told], *, under_way: Sequence[int], set_aside: Sequence[int]
    ) -> None:
        """Start again from what is known."""
        found = {one.row: one for one in told}
        self.told.clear()
        self.told.update(found)
        self._status[:] = RowStatus.UNTRIED
        self._status[list(self.told)] = RowStatus.TOLD
        self._status[list(under_way)] = RowStatus.UNDER_WAY
        self._status[list(set_aside)] = RowStatus.SET_ASIDE
        self._counts = _count(self._status)
        if self._proposer is not None:
            started = [int(self._place[row]) for row in self._under_way() if self._place[row] >= 0]
            self._proposer.rebuild(self._of_considered(self.told.values()), started)
        if self._optuna is not None:
            self._optuna.rebuild(self._under_way())

    def doubtful(self, *, but: Iterable[int] = ()) -> tuple[int, float] | None:
        """A told row, `but` none of these, far worse than its neighbours suggest, and their score.

        None if there is none, or no model to find it.
        """
        if self._proposer is None:
            return None
        with one_blas_thread():
            found = self._proposer.doubtful(but={int(self._place[row]) for row in but})
        return None if found is None else (int(self._considered[found[0]]), found[1])

    def expected_gain(self) -> float | None:
        """The largest expected gain of an untried row over the best, relative.

        None: the strategy has no model, or nothing has run yet.
        """
        if self._proposer is None:
            return None
        with one_blas_thread():
            return self._proposer.expected_gain(self._is(RowStatus.UNTRIED)[self._considered])

    def probability_of_fitting(self) -> Floats | None:
        """Each row's probability to fit, NaN for rows that are not considered.

        None: no limit is known, or the strategy has no model.
        """
        if self._proposer is None:
            return None
        with one_blas_thread():
            fits = self._proposer.probability_of_fitting()
        if fits is None:
            return None
        found = np.full(len(self._order), np.nan)
        found[self._considered] = fits
        return found

    def hopeless(self) -> int | None:
        """The row whose out-of-memory shows that nothing fits, if so: it needs least of all."""
        if self._proposer is None or not self._knows_least:
            return None
        with one_blas_thread():
            found = self._proposer.hopeless(self._is(RowStatus.UNTRIED)[self._considered])
        return None if found is None else int(self._considered[found])

    def _is(self, status: RowStatus) -> Mask:
        mask: Mask = self._status == status
        return mask

    def _set(self, row: int, status: RowStatus) -> None:
        self._counts[self._status[row]] -= 1
        self._counts[status] += 1
        self._status[row] = status

    def _set_all(self, rows: Ints, status: RowStatus) -> None:
        """Give distinct rows another status."""
        if len(rows):
            self._counts -= _count(self._status[rows])
            self._counts[status] += len(rows)
            self._status[rows] = status

    def _under_way(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._is(RowStatus.UNDER_WAY)).tolist()
        return found

    def _of_considered(self, told: Iterable[Told]) -> list[Told]:
        """The told rows that the proposer considers, by its numbers."""
        places = ((one, int(self._place[one.row])) for one in told)
        return [replace(one, row=place) for one, place in places if place >= 0]


def _count(statuses: NDArray[np.int8]) -> Ints:
    """How many rows have each status."""
    return np.bincount(statuses, minlength=len(RowStatus))


def _considered(order: Ints, memory: Floats | None) -> Ints:
    """Rows in their own order, so that a small lattice is taken as it is."""
    if len(order) <= CONSIDERED:
        return np.arange(len(order), dtype=np.int64)
    first = CONSIDERED * 3 // 4
    least = np.array([], dtype=np.int64)
    if memory is not None:
        least = np.argsort(memory, kind="stable")[:LEAST]
    spread = np.linspace(first, len(order) - 1, CONSIDERED - first - len(least)).astype(np.int64)
    return np.unique(np.concatenate([order[:first], order[spread], least]))
