"""Profiles the winner of each cell by itself, once the sweep has nothing left to measure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from db.read.rows import TrialRow
from db.store import Store
from db.write.writes import ProfileEnd
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.measurement_section import Profiled
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.rank_profile import ProfilePlan
from orchestrator.sweep.call import Call
from orchestrator.sweep.profiling import (
    ProfileUnderWay,
    refusal,
    started_profile,
)
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.spending import Spending

logger = logging.getLogger(__name__)


def profiles_to_come(
    spec: SweepSpec, store: Store, sweep_id: int, tied: Mapping[Cell, Sequence[Layout]]
) -> list[TrialRow]:
    """Return the winners that are still to be profiled, by the sweep file.

    A winner whose profile failed is not profiled again.
    """
    is_asked = spec.measurement.profile is Profiled.WINNERS
    if not is_asked or refusal(spec) is not None or spec.name.endswith(SIMULATED_SUFFIX):
        return []
    done = store.profiled_trials(sweep_id)
    cells = {row.id: row.cell for row in store.cells(sweep_id)}
    winners = {cell: layouts[0] for cell, layouts in tied.items() if layouts}
    return [
        trial
        for trial in store.trials(sweep_id)
        if trial.layout == winners.get(cells[trial.cell_id]) and trial.id not in done
    ]


class WinnerProfiles:
    """The profiles of one call of `run_sweep`, one after the other, within the budgets."""

    def __init__(self, call: Call, spending: Spending) -> None:
        self._call, self._spending = call, spending

    def to_come(self, tied: Mapping[Cell, Sequence[Layout]]) -> list[TrialRow]:
        """Return the winners that are still to be profiled."""
        call = self._call
        if (why := refusal(call.spec)) and call.spec.measurement.profile is Profiled.WINNERS:
            logger.warning("measurement.profile: winners is ignored: %s", why)
        return profiles_to_come(call.spec, call.store, call.sweep_id, tied)

    def passed_by(self, trial: TrialRow) -> StopReason | None:
        """Return the budget that the profile would exceed, if any.

        It is expected to take what the trial's last attempt took.
        """
        expected = trial.gpu_seconds or 0.0
        seconds = expected / trial.layout.world_size
        return (
            self._spending.spent()
            or self._spending.out_of_time(seconds)
            or self._spending.passed_by(expected, to_come=0.0)
        )

    def start(self, trial: TrialRow) -> AbstractContextManager[ProfileUnderWay]:
        """Start the profile of a winner. Poll it to its end within the context."""
        call = self._call
        logger.info(
            "Profiling trial %d, the fastest of its cell",
            trial.id,
            extra={"action": "profiling", "trial_id": trial.id},
        )
        return started_profile(
            call.store.trial(trial.id),
            call.spec,
            ProfilePlan(),
            scheduler=call.scheduler,
            store=call.store,
            epoch=call.epoch,
        )


def log_unpaid(trial: TrialRow, budget: StopReason) -> None:
    """Log that a winner is not profiled, since its profile would exceed a budget."""
    logger.warning(
        "Trial %d is not profiled: %s",
        trial.id,
        budget,
        extra={"action": "not_profiled", "trial_id": trial.id},
    )


def log_profile(result: ProfileEnd) -> None:
    """Log what a profile showed, or how it failed."""
    extra = {"action": "profiled", "trial_id": result.trial_id}
    if result.failure is not None:
        logger.warning(
            "Trial %d: no profile: %s", result.trial_id, result.failure.message, extra=extra
        )
        return
    said = "; ".join(result.advice) or "nothing to improve was found"
    logger.info("Trial %d profiled: %s", result.trial_id, said, extra=extra)
