"""Tracks what a sweep has spent, and whether another attempt should stay within its budgets.

It starts and stops nothing: it names the budget that would be exceeded.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.sweepfile.budget import Budget, Limit
from orchestrator.core.trial.gpu_hours_text import gpu_hours_text
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.sweep.progress import StopReason

REASONS = {Limit.GPU_HOURS: StopReason.GPU_HOURS, Limit.COST: StopReason.COST}
# Budgets of GPU time. A cell may still keep within one if running attempts take less than expected.
SPENT = frozenset(REASONS.values())


class Spending:
    """Counts what one call of `run_sweep` spends.

    `leased`: what its gangs have reserved so far, idle or not. Budgets count that, not what
    succeeded.
    """

    def __init__(
        self,
        budget: Budget | None,
        *,
        max_wall_seconds: float | None,
        earlier_gpu_seconds: float,
        leased: Callable[[], Leased],
        clock: Callable[[], float],
        began: float,
    ) -> None:
        self._budget, self._max_wall_seconds, self.earlier_gpu_seconds = (
            budget,
            max_wall_seconds,
            earlier_gpu_seconds,
        )
        self._leased, self._clock = leased, clock
        self._began = began

    @property
    def reserved_gpu_seconds(self) -> float:
        """GPU-seconds that all calls have reserved."""
        return self.earlier_gpu_seconds + self._leased().reserved

    @property
    def gpu_seconds_left(self) -> float | None:
        """Return what is left of the budget of GPU time. None: there is no such budget."""
        return None if self._budget is None else max(self._left(self._budget), 0.0)

    @property
    def wall_seconds_left(self) -> float | None:
        """Seconds left of this call. None: it has no limit."""
        return (
            None
            if self._max_wall_seconds is None
            else max(self._max_wall_seconds - (self._clock() - self._began), 0.0)
        )

    @property
    def is_limited(self) -> bool:
        """True if there is a budget of GPU time."""
        return self._budget is not None

    @property
    def is_shared(self) -> bool:
        """True if the cells share a budget of any kind."""
        return self._budget is not None or self._max_wall_seconds is not None

    def out_of_time(self, seconds: float) -> StopReason | None:
        """Return the budget of time that an attempt of `seconds` would exceed, if any."""
        if self._max_wall_seconds is None:
            return None
        return (
            StopReason.WALL_TIME
            if self._clock() - self._began + seconds > self._max_wall_seconds
            else None
        )

    def spent(self) -> StopReason | None:
        """Return the budget that is spent."""
        if self._budget is not None and self.reserved_gpu_seconds >= self._budget.gpu_seconds:
            return REASONS[self._budget.limit]
        if (
            self._max_wall_seconds is not None
            and self._clock() - self._began >= self._max_wall_seconds
        ):
            return StopReason.WALL_TIME
        return None

    def passed_by(self, expected_gpu_seconds: float, *, to_come: float) -> StopReason | None:
        """Return the budget that an attempt would exceed, in addition to what is under way."""
        if self._budget is None:
            return None
        return (
            REASONS[self._budget.limit]
            if expected_gpu_seconds > self._left(self._budget) - to_come
            else None
        )

    def why(self, expected_gpu_seconds: float, *, kept: float = 0.0) -> str:
        """Explain `passed_by` to people, when nothing is under way any more."""
        assert self._budget is not None
        left = max(self._left(self._budget), 0.0)
        for_others = (
            f", of which {gpu_hours_text(kept)} are kept for first trials and repeats"
            if kept
            else ""
        )
        return (
            f"the next trial is expected to reserve {gpu_hours_text(expected_gpu_seconds)}"
            f" GPU-hours, and search.{self._budget.limit} leaves {gpu_hours_text(left)}"
            f"{for_others}"
        )

    def _left(self, budget: Budget) -> float:
        return budget.gpu_seconds - self.reserved_gpu_seconds
