"""Ask and tell over the rows of a lattice: which to measure next, by any strategy. Knows nothing of layouts.

`Searcher` gives it the layouts of a cell; a benchmark, rows of a table. Nothing told, held or condemned is asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from orchestrator.core.search.lattice import Axis, Floats, Ints, Lattice
from orchestrator.core.search.proposer import Choice, Mask, Proposer, Told
from orchestrator.core.sweepfile.sections import Search, Strategy
from orchestrator.search.blas_threads import one_blas_thread
from orchestrator.search.optuna_proposals import OptunaProposals

CONSIDERED = 16_384  # rows that `auto` thinks about: the first of the order, those that need least, and an even spread over the rest
LEAST = (
    CONSIDERED // 16
)  # of them are those that are predicted to need least: they show whether anything fits


class RowStatus(IntEnum):
    UNTRIED = 0
    IN_FLIGHT = 1
    TOLD = 2
    CONDEMNED = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    row: int
    choice: Choice | None  # what `auto` expects of it
    why: str  # of the other strategies


class RowSearcher:
    """The state of one search. Several asks may be outstanding."""

    def __init__(
        self,
        *,
        order: Ints,
        lattice: Callable[[Ints], Lattice],
        sampled: Sequence[Axis],
        search: Search,
        sequence: int = 0,
        memory: Floats | None = None,
        launch_seconds: float | None = None,
        steps_per_trial: float | None = None,
    ) -> None:
        """`order` holds the rows, best prediction first; `lattice` gives the points of some; `sampled` are the axes for Optuna's samplers.
        `memory` is what each row is predicted to need, where that is known (else NaN): so that what needs least is among those thought about.

        Raises UsageInvalid when the strategy needs packages that are not installed.
        """
        num = len(order)
        self._order = order
        self.rank = np.empty(num, dtype=np.int64)
        self.rank[order] = np.arange(num)
        self._status = np.full(num, RowStatus.UNTRIED, dtype=np.int8)
        self._counts = Counter({RowStatus.UNTRIED: num})
        self._told: dict[int, Told] = {}  # in the order of telling
        seed = np.random.SeedSequence((search.seed, sequence))
        self._shuffled = np.random.default_rng(seed).permutation(num).astype(np.int64)
        self._strategy = search.strategy
        number = int(seed.generate_state(1)[0])
        self._optuna: OptunaProposals | None = None
        self._proposer: Proposer | None = None
        match search.strategy:
            case Strategy.AUTO if not num:
                pass  # no layout is legal: nothing to think about
            case Strategy.AUTO:
                self._considered = _considered(order, memory)
                self._knows_least = memory is not None or len(self._considered) == num
                self._place = np.full(num, -1, dtype=np.int64)  # of a row among the considered
                self._place[self._considered] = np.arange(len(self._considered))
                costs = {"launch_seconds": launch_seconds, "steps_per_trial": steps_per_trial}
                self._proposer = Proposer(
                    lattice(self._considered),
                    seed=number,
                    **{name: value for name, value in costs.items() if value is not None},
                )
            case Strategy.TPE | Strategy.GP:
                self._optuna = OptunaProposals(
                    sampled, num, seed=number, gp=search.strategy is Strategy.GP
                )
            case Strategy.RANDOM | Strategy.EXHAUSTIVE:
                pass

    def count(self, status: RowStatus) -> int:
        return self._counts[status]

    def status(self, row: int) -> RowStatus:
        return RowStatus(int(self._status[row]))

    @property
    def told(self) -> dict[int, Told]:
        return self._told

    def ask(self) -> Asked | None:
        """Choose a row and hold it in flight; None when every one is told, in flight or condemned."""
        num_open = self._counts[RowStatus.UNTRIED]
        if num_open == 0:
            return None
        open_rows = self._status == RowStatus.UNTRIED
        choice, why = None, ""
        if self._strategy is Strategy.RANDOM:
            row = int(self._shuffled[np.argmax(open_rows[self._shuffled])])
            why = f"random among {num_open} untried"
        elif self._proposer is not None and open_rows[self._considered].any():
            with one_blas_thread():
                choice = self._proposer.choose(open_rows[self._considered])
            row = int(self._considered[choice.row])
        elif self._optuna is not None and num_open > 1:
            row, why = self._optuna.propose(open_rows, self.rank)
        else:
            row = int(self._order[np.argmax(open_rows[self._order])])
        self.hold(row)
        return Asked(row=row, choice=choice, why=why)

    def tell(self, told: Told) -> None:
        """Record what came of a row; of one that is told again, what it came to last."""
        self._mark(told.row, RowStatus.TOLD)
        self._told[told.row] = told
        if self._proposer is not None and (mine := self._mine(told)) is not None:
            self._proposer.tell(mine)
        if self._optuna is not None:
            self._optuna.tell(told)

    def set_aside(self, row: int) -> None:
        """Never ask for a row again, and learn nothing of it."""
        self.forget(row)
        self._mark(row, RowStatus.CONDEMNED)

    def condemn(self, rows: Mask) -> list[int]:
        """Never ask for these. Returns those of them that were untried."""
        found = np.flatnonzero(rows & (self._status == RowStatus.UNTRIED))
        self._status[found] = RowStatus.CONDEMNED
        self._counts[RowStatus.CONDEMNED] += len(found)
        self._counts[RowStatus.UNTRIED] -= len(found)
        return [int(row) for row in found]

    def free(self, rows: Ints) -> list[int]:
        """Put condemned rows among these back to untried. Return them."""
        found = rows[self._status[rows] == RowStatus.CONDEMNED]
        self._status[found] = RowStatus.UNTRIED
        self._counts[RowStatus.CONDEMNED] -= len(found)
        self._counts[RowStatus.UNTRIED] += len(found)
        return [int(row) for row in found]

    def forget(self, row: int) -> None:
        """Put a row back to untried."""
        self._mark(row, RowStatus.UNTRIED)
        was_told = self._told.pop(row, None) is not None
        if self._proposer is not None and self._place[row] >= 0:
            self._proposer.forget(int(self._place[row]))
        if self._optuna is not None:
            if was_told:
                self._optuna.rebuild(self._told.values(), self._in_flight())
            else:
                self._optuna.drop(row)

    def rebuild(
        self, told: Iterable[Told], *, in_flight: Iterable[int], condemned: Iterable[int]
    ) -> None:
        """Start again from what is known."""
        self._told = {one.row: one for one in told}
        self._status[:] = RowStatus.UNTRIED
        for status, rows in (
            (RowStatus.TOLD, self._told),
            (RowStatus.IN_FLIGHT, in_flight),
            (RowStatus.CONDEMNED, condemned),
        ):
            self._status[np.fromiter(rows, dtype=np.int64)] = status
        self._counts = Counter(
            {status: int(np.count_nonzero(self._status == status)) for status in RowStatus}
        )
        if self._proposer is not None:
            held = [int(self._place[row]) for row in self._in_flight() if self._place[row] >= 0]
            self._proposer.rebuild(
                [mine for one in self._told.values() if (mine := self._mine(one)) is not None], held
            )
        if self._optuna is not None:
            self._optuna.rebuild(self._told.values(), self._in_flight())

    def doubtful(self, *, but: Iterable[int] = ()) -> tuple[int, float] | None:
        """A told row, `but` none of these, far worse than its neighbours say, and the score that they say.

        None where there is none, or no model to say so.
        """
        if self._proposer is None:
            return None
        with one_blas_thread():
            found = self._proposer.doubtful(but={int(self._place[row]) for row in but})
        return None if found is None else (int(self._considered[found[0]]), found[1])

    def expected_gain(self) -> float | None:
        """The most that an untried row is expected to gain over the best, relative; None where no model says so, or nothing has run yet."""
        if self._proposer is None:
            return None
        with one_blas_thread():
            return self._proposer.expected_gain(
                (self._status == RowStatus.UNTRIED)[self._considered]
            )

    def hopeless(self) -> int | None:
        """The row whose out-of-memory shows that nothing fits, if so. It needs least of all rows, thought about or not."""
        if self._proposer is None or not self._knows_least:
            return None
        with one_blas_thread():
            found = self._proposer.hopeless((self._status == RowStatus.UNTRIED)[self._considered])
        return None if found is None else int(self._considered[found])

    def hold(self, row: int) -> None:
        """A row is in flight, whoever chose it."""
        self._mark(row, RowStatus.IN_FLIGHT)
        if self._proposer is not None and self._place[row] >= 0:
            self._proposer.hold(int(self._place[row]))
        if self._optuna is not None:
            self._optuna.hold(row)

    def _mark(self, row: int, status: RowStatus) -> None:
        self._counts[self.status(row)] -= 1
        self._counts[status] += 1
        self._status[row] = status

    def _in_flight(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(self._status == RowStatus.IN_FLIGHT)]

    def _mine(self, told: Told) -> Told | None:
        """As the proposer counts rows; None of what it does not consider."""
        place = int(self._place[told.row])
        return replace(told, row=place) if place >= 0 else None


def _considered(order: Ints, memory: Floats | None) -> Ints:
    """Rows in their own order, so that a small lattice is taken as it is."""
    if len(order) <= CONSIDERED:
        return np.arange(len(order), dtype=np.int64)
    first = CONSIDERED * 3 // 4
    least = (
        np.zeros(0, dtype=np.int64) if memory is None else np.argsort(memory, kind="stable")[:LEAST]
    )
    spread = np.linspace(first, len(order) - 1, CONSIDERED - first - len(least)).astype(np.int64)
    return np.unique(np.concatenate([order[:first], order[spread], least]))
