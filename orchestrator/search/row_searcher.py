"""Ask and tell over the rows of a lattice: which to measure next, by any strategy.

Knows nothing of layouts: `Searcher` gives it those of a cell, a benchmark the rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.search.lattice import Lattice, LatticeAxis
from orchestrator.core.search.outcome import Measured, Outcome
from orchestrator.core.search.proposer import Proposer, Reason
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.core.trial.merit import Merit
from orchestrator.search.auto_sampler import AutoSampler, considered_rows
from orchestrator.search.fixed_orders import FixedOrder
from orchestrator.search.optuna_proposals import OptunaProposals
from orchestrator.search.sampler import Sampler


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
        self.rank = np.empty(num, dtype=np.int64)
        self.rank[order] = np.arange(num)
        self._status = np.full(num, RowStatus.UNTRIED, dtype=np.int8)
        self._counts = _count(self._status)
        self.told: dict[int, Outcome] = {}  # in the order of telling
        self._best_predicted = FixedOrder(order)
        # Strategy `auto` has a model, which can say more than the next row.
        self._auto: AutoSampler | None = None
        seed = np.random.SeedSequence((search.seed, sequence))
        number = int(seed.generate_state(1)[0])
        self._sampler: Sampler = self._best_predicted
        match search.strategy:
            case Strategy.AUTO if not num:
                pass  # no layout is legal
            case Strategy.AUTO:
                costs = {"launch_seconds": launch_seconds, "steps_per_trial": steps_per_trial}
                considered = considered_rows(order, memory)
                proposer = Proposer(
                    lattice(considered),
                    seed=number,
                    merits=merits,
                    **{name: value for name, value in costs.items() if value is not None},
                )
                knows_least = memory is not None or len(considered) == num
                self._sampler = self._auto = AutoSampler(
                    proposer, considered, num_rows=num, knows_least=knows_least
                )
            case Strategy.TPE | Strategy.GP:
                self._sampler = OptunaProposals(
                    sampled, rank=self.rank, seed=number, gp=search.strategy is Strategy.GP
                )
            case Strategy.RANDOM:
                shuffled = np.random.default_rng(seed).permutation(num).astype(np.int64)
                self._sampler = FixedOrder(shuffled, is_random=True)
            case Strategy.EXHAUSTIVE:
                pass
            case _:
                assert_never(search.strategy)

    def count(self, status: RowStatus) -> int:
        return int(self._counts[status])

    def status(self, row: int) -> RowStatus:
        return RowStatus(int(self._status[row]))

    def ask(self) -> tuple[int, Reason] | None:
        """Return an untried row, which is under way from now on, and why it was chosen.

        None: no row is untried.
        """
        if self.count(RowStatus.UNTRIED) == 0:
            return None
        open_rows = self._is(RowStatus.UNTRIED)
        row, reason = self._sampler.choose(open_rows) or self._best_predicted.choose(open_rows)
        self.start(row)
        return row, reason

    def start(self, row: int) -> None:
        """Put a row under way, asked for or not."""
        self._set(row, RowStatus.UNDER_WAY)
        self._sampler.start(row)

    def tell(self, row: int, outcome: Outcome) -> None:
        """Record how a row ended; a second telling replaces the first.

        A useless outcome sets the row aside.
        """
        if _is_useless(outcome):
            self.set_aside(row)
            return
        self._set(row, RowStatus.TOLD)
        self.told[row] = outcome
        self._sampler.tell(row, outcome)

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
        self.told.pop(row, None)
        self._sampler.forget(row)

    def rebuild(
        self, told: Mapping[int, Outcome], *, under_way: Sequence[int], set_aside: Sequence[int]
    ) -> None:
        """Start again from what is known: `told` has outcomes by row, in the order of telling.

        Rows with a useless outcome are set aside too.
        """
        self.told = {row: outcome for row, outcome in told.items() if not _is_useless(outcome)}
        self._status[:] = RowStatus.UNTRIED
        self._status[list(self.told)] = RowStatus.TOLD
        self._status[list(under_way)] = RowStatus.UNDER_WAY
        self._status[[*set_aside, *(told.keys() - self.told.keys())]] = RowStatus.SET_ASIDE
        self._counts = _count(self._status)
        rows: list[int] = np.flatnonzero(self._is(RowStatus.UNDER_WAY)).tolist()
        self._sampler.rebuild(self.told, rows)

    def doubtful(self, *, but: Iterable[int] = ()) -> tuple[int, float] | None:
        """Return a told row far worse than its neighbours suggest, and the score they suggest.

        The rows of `but` are left out. None: no row is, or the strategy has no model.
        """
        return None if self._auto is None else self._auto.doubtful(but=but)

    def expected_gain(self) -> float | None:
        """The largest expected gain of an untried row over the best, relative.

        None: the strategy has no model, or nothing has run yet.
        """
        if self._auto is None:
            return None
        return self._auto.expected_gain(self._is(RowStatus.UNTRIED))

    def probability_of_fitting(self) -> Floats | None:
        """Each row's probability to fit, NaN for rows that are not considered.

        None: no limit is known, or the strategy has no model.
        """
        return None if self._auto is None else self._auto.probability_of_fitting()

    def hopeless(self) -> int | None:
        """The row whose out-of-memory shows that nothing fits, if so: it needs least of all."""
        return None if self._auto is None else self._auto.hopeless(self._is(RowStatus.UNTRIED))

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


def _is_useless(outcome: Outcome) -> bool:
    return isinstance(outcome, Measured) and outcome.is_useless


def _count(statuses: NDArray[np.int8]) -> Ints:
    """Count the rows of each status."""
    return np.bincount(statuses, minlength=len(RowStatus))
