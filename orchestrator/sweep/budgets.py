"""Decides whether a cell may start another attempt within the budgets that the cells share."""

from __future__ import annotations

import logging

from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.search.proposal import Proposal
from orchestrator.sweep import sharing
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.placement import most_at_once
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.spending import SPENT, Spending

logger = logging.getLogger(__name__)


class Budgets:
    """The budgets of one call of `run_sweep`."""

    def __init__(self, call: Call, spending: Spending) -> None:
        self._call, self._spending = call, spending

    @property
    def spent(self) -> StopReason | None:
        """The budget that is spent."""
        return self._spending.spent()

    @property
    def are_set(self) -> bool:
        """True if the sweep has a budget that its cells share."""
        return self._spending.is_shared

    def passed_by(
        self,
        search: CellSearch,
        proposal: Proposal | None,
        cost: TrialCost,
        *,
        is_repeat: bool = False,
    ) -> StopReason | None:
        """Return the budget that the cell's next attempt would exceed, if any."""
        # Skip the sum over running attempts, which only a shared budget needs.
        if not self._spending.is_shared:
            return None
        reserved = self._reserved(search, is_repeat=is_repeat)
        # The time of this attempt is not added: the last reserved attempt only has to begin in
        # time, and its own time makes up for this one.
        late = self._spending.out_of_time(reserved.seconds) if reserved.seconds else None
        if late is not None or not self._spending.is_limited:
            return late
        expected = self.expected(search, proposal, cost)
        if expected is None:
            if not self._call.attempts:
                # Nothing is measured and nothing runs: this attempt shows what a trial costs.
                return None
            expected = search.cost.guessed_gpu_seconds
        to_come = self._to_come() + reserved.gpu_seconds
        return self._spending.passed_by(expected, to_come=to_come)

    def may_still_suffice(self, reason: StopReason) -> bool:
        """Return whether running attempts may still take less than expected, and leave enough."""
        return reason in SPENT and bool(self._call.attempts)

    def expected(
        self, search: CellSearch, proposal: Proposal | None, cost: TrialCost
    ) -> float | None:
        """Return GPU-seconds that the cell's next attempt is expected to reserve; None: unknown.

        They follow from its own trials, else from those of other cells.
        """
        own = search.cost.expected_gpu_seconds(proposal, cost)
        return (
            sharing.expected_by_others(search, list(self._call.searches.values()))
            if own is None
            else own
        )

    def stop(self, search: CellSearch, reason: StopReason, cost: TrialCost) -> None:
        """End a cell's search, since its next attempt would exceed a budget."""
        if reason in SPENT:
            expected = self.expected(search, search.ahead, cost)
            assert expected is not None
            why = self._spending.why(expected, kept=self._reserved(search).gpu_seconds)
        else:
            why = "what is left of search.max_wall_time is kept for first trials and repeats"
        search.stop(reason)
        search.take_back()
        logger.info(
            "%s: no new layout is started: %s", search.cell.key, why, extra={"action": "budget"}
        )

    def _reserved(self, search: CellSearch, *, is_repeat: bool = False) -> sharing.ReservedBudget:
        """Return the share of the budgets that a cell leaves to first trials and repeats."""
        slots = self._call.scheduler.slots
        return sharing.reserved_from(
            search,
            list(self._call.searches.values()),
            confirm=self._call.spec.search.confirm,
            is_repeat=is_repeat,
            slots=slots.total,
            at_once=most_at_once(self._call.spec.search, slots),
        )

    def _to_come(self) -> float:
        """Return the GPU-seconds that attempts under way are still expected to reserve.

        Each attempt has the expectation of when it began. An attempt without one has what its cell
        has shown since, or a guess.
        """
        guesses = {
            search.id: search.cost.guessed_gpu_seconds for search in self._call.searches.values()
        }
        now, total = self._call.clock(), 0.0
        for one in self._call.attempts:
            foreseen = one.expected_gpu_seconds
            expected = guesses[one.cell_id] if foreseen is None else foreseen
            total += max(expected - (now - one.since) * one.cell.num_gpus, 0.0)
        return total
