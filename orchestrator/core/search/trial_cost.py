"""The GPU-hours that a plan will reserve: the median, and what nine of ten plans stay under.

A trial reserves GPUs for its steps and for the launch around them. Formulas: docs/measuring.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np

from orchestrator.core.physics.calibration import CELL_OFFSET_SD
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.quantile import Z90
from orchestrator.core.search.expectation import even_selection
from orchestrator.core.search.planner import Candidates
from orchestrator.core.sweepfile.measurement_section import Measuring
from orchestrator.core.trial.measurement import LAUNCH_SECONDS
from orchestrator.core.trial.protocol import Device

TIMED_STEPS = 22.0  # of a typical measurement
# Standard deviations of logarithms. Launches differ threefold between clusters, less on one.
LAUNCH_SD, MEASURED_LAUNCH_SD = 0.6, 0.2
STEPS_SD, MEASURED_STEPS_SD = 0.3, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCost:
    """The seconds for which one trial reserves its GPUs. Standard deviations are of logarithms."""

    launch_seconds: float
    launch_sd: float
    num_steps: float  # warm-up and timed
    num_steps_sd: float
    # All steps together, at least: short steps are timed for seconds.
    least_seconds: float = 0.0

    @property
    def is_launch_measured(self) -> bool:
        """True if the time of launches was measured.

        Otherwise it is a guess that is only right for trials of minutes on GPUs.
        """
        return self.launch_sd == MEASURED_LAUNCH_SD

    def seconds(self, step_seconds: float) -> float:
        """Return how long a trial with such steps reserves its GPUs."""
        return self.launch_seconds + max(self.num_steps * step_seconds, self.least_seconds)

    @classmethod
    def of(
        cls,
        plan: Measuring,
        *,
        launch_seconds: float | None,
        timed_steps: float | None,
        device: Device = Device.CPU,
    ) -> TrialCost:
        """Return the cost by the times of stored trials if there are any, else by usual ones.

        `launch_seconds` and `timed_steps` are those of stored trials; None: there are none.
        """
        asked = plan.plan(device)
        timed = TIMED_STEPS if timed_steps is None else timed_steps
        timed = min(max(timed, plan.min_steps), plan.max_steps)
        return cls(
            launch_seconds=launch_seconds if launch_seconds is not None else LAUNCH_SECONDS,
            launch_sd=MEASURED_LAUNCH_SD if launch_seconds is not None else LAUNCH_SD,
            num_steps=plan.warmup_steps + timed,
            num_steps_sd=MEASURED_STEPS_SD if timed_steps is not None else STEPS_SD,
            least_seconds=asked.warmup_seconds + asked.min_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCost:
    """The GPU-hours of some trials, log-normal about their median."""

    gpu_hours: float
    # In log GPU-hours, by errors that cells share: in constants, launches, numbers of steps.
    shared_sd: float
    own_sd: float  # by errors of this cell alone

    @property
    def sd(self) -> float:
        """The standard deviation of the logarithm of the GPU-hours."""
        return sqrt(self.shared_sd**2 + self.own_sd**2)

    @property
    def gpu_hours_p90(self) -> float:
        """The GPU-hours that nine of ten such plans stay under."""
        return self.gpu_hours * exp(Z90 * self.sd)


def cost_of(
    candidates: Candidates,
    cell: Cell,
    *,
    num_trials: int,
    trial: TrialCost,
    knows_cell: bool = False,
) -> PlannedCost | None:
    """Return the cost of the first trials; None if no time is predicted.

    A layout predicted not to fit costs a launch. `knows_cell`: this cell has trials, which show
    the common error of its predictions.
    """
    rows = candidates.order[:num_trials]
    if candidates.predict is None or not len(rows):
        return None
    by_steps = candidates.step_seconds[rows] * trial.num_steps
    is_longer = by_steps > trial.least_seconds
    steps = np.where(candidates.fits[rows], np.maximum(by_steps, trial.least_seconds), 0.0)
    launches = trial.launch_seconds * len(rows)
    seconds = float(steps.sum()) + launches
    in_launches = launches / seconds
    selected = even_selection(len(rows))
    predicted = candidates.predict(candidates.table.take(rows[selected]))
    # A trial that takes only its minimum of seconds takes them with steps of any length.
    uncertain = np.where(is_longer[selected], steps[selected], 0.0)
    shares = uncertain * (1 - in_launches) / (steps[selected].sum() or 1.0)
    # The derivatives of the logarithm of the seconds by the logarithms of the constants.
    slope = shares @ predicted.step_jacobian
    constants = float(slope @ predicted.step_covariance @ slope)
    in_steps = float(shares.sum())
    of_cell = 0.0 if knows_cell else (in_steps * CELL_OFFSET_SD) ** 2
    return PlannedCost(
        gpu_hours=seconds * cell.num_gpus / 3600,
        shared_sd=sqrt(
            constants + (in_launches * trial.launch_sd) ** 2 + (in_steps * trial.num_steps_sd) ** 2
        ),
        own_sd=sqrt(float((shares**2).sum()) * predicted.step_residual_sd**2 + of_cell),
    )


def total(costs: Sequence[PlannedCost | None]) -> PlannedCost | None:
    """Return the cost of several cells; None if one is unknown.

    Shared errors add up, errors of single cells partly cancel out.
    """
    known = [cost for cost in costs if cost is not None]
    if not known or len(known) < len(costs):
        return None
    hours = sum(cost.gpu_hours for cost in known)
    weights = [cost.gpu_hours / hours for cost in known]
    return PlannedCost(
        gpu_hours=hours,
        shared_sd=sum(weight * cost.shared_sd for weight, cost in zip(weights, known, strict=True)),
        own_sd=sqrt(
            sum((weight * cost.own_sd) ** 2 for weight, cost in zip(weights, known, strict=True))
        ),
    )
