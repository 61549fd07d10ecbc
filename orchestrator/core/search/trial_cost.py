"""What measuring the layouts of a plan will hold, in GPU-hours: a median, and what it stays under in nine cases of ten.

Held is what is paid for: a trial's steps, and the launch around them. Formulas are in docs/measuring.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np

from orchestrator.core.physics.calibration import CELL_OFFSET_SD
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.normal import Z90
from orchestrator.core.search.planner import Candidates
from orchestrator.core.sweepfile.sections import Measuring
from orchestrator.core.trial.measurement import LAUNCH_SECONDS

TIMED_STEPS = 22.0  # of a typical measurement
# Standard deviations of logarithms. Launches differ threefold between clusters; on one of them, as stored ones do.
LAUNCH_SD, MEASURED_LAUNCH_SD = 0.6, 0.2
STEPS_SD, MEASURED_STEPS_SD = 0.3, 0.1
MAX_ROWS = 4096  # whose uncertainty is looked at; of more, an even selection


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCost:
    """What one trial holds its GPUs for, beside the time of a step. The standard deviations are of logarithms."""

    launch_seconds: float
    launch_sd: float
    num_steps: float  # warm-up and timed
    num_steps_sd: float

    @property
    def is_launch_measured(self) -> bool:
        """Else it is a guess that fits trials of minutes on GPUs, and misleads of any shorter ones."""
        return self.launch_sd == MEASURED_LAUNCH_SD

    def seconds(self, step_seconds: float) -> float:
        """What a trial with such steps holds its GPUs for."""
        return self.launch_seconds + self.num_steps * step_seconds

    @classmethod
    def of(
        cls, plan: Measuring, *, launch_seconds: float | None, timed_steps: float | None
    ) -> TrialCost:
        """From what trials of the store took, where there are any, else from what is usual."""
        timed = min(
            max(timed_steps if timed_steps is not None else TIMED_STEPS, plan.min_steps),
            plan.max_steps,
        )
        return cls(
            launch_seconds=launch_seconds if launch_seconds is not None else LAUNCH_SECONDS,
            launch_sd=MEASURED_LAUNCH_SD if launch_seconds is not None else LAUNCH_SD,
            num_steps=plan.warmup_steps + timed,
            num_steps_sd=MEASURED_STEPS_SD if timed_steps is not None else STEPS_SD,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCost:
    """GPU-hours that some trials will hold, log-normal about their median."""

    gpu_hours: float
    shared_sd: float  # of the logarithm, by errors that other cells share: constants, launches, numbers of steps
    own_sd: float  # by errors of this cell alone

    @property
    def sd(self) -> float:
        return sqrt(self.shared_sd**2 + self.own_sd**2)

    @property
    def gpu_hours_p90(self) -> float:
        return self.gpu_hours * exp(Z90 * self.sd)


def cost_of(
    candidates: Candidates,
    cell: Cell,
    *,
    num_trials: int,
    trial: TrialCost,
    knows_cell: bool = False,
) -> PlannedCost | None:
    """What the first trials of the order hold; None where no time is predicted. What is predicted not to fit holds a launch.

    `knows_cell`: trials of this very cell have shown how far the whole of it is off.
    """
    rows = candidates.order[:num_trials]
    if candidates.predict is None or not len(rows):
        return None
    steps = np.where(candidates.fits[rows], candidates.step_seconds[rows] * trial.num_steps, 0.0)
    launches = trial.launch_seconds * len(rows)
    held = float(steps.sum()) + launches
    in_launches = launches / held
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MAX_ROWS)).astype(np.int64))
    predicted = candidates.predict(candidates.table.take(rows[chosen]))
    shares = (
        steps[chosen] / steps[chosen].sum() * (1 - in_launches)
        if steps[chosen].any()
        else np.zeros(len(chosen))
    )
    slope = (
        shares @ predicted.step_jacobian
    )  # of the logarithm of what is held, by those of the constants
    constants = float(slope @ predicted.step_covariance @ slope)
    of_cell = 0.0 if knows_cell else ((1 - in_launches) * CELL_OFFSET_SD) ** 2
    return PlannedCost(
        gpu_hours=held * cell.num_gpus / 3600,
        shared_sd=sqrt(
            constants
            + (in_launches * trial.launch_sd) ** 2
            + ((1 - in_launches) * trial.num_steps_sd) ** 2
        ),
        own_sd=sqrt(float((shares**2).sum()) * predicted.step_residual_sd**2 + of_cell),
    )


def total(costs: Sequence[PlannedCost | None]) -> PlannedCost | None:
    """The cost of several cells: what they share errs in one direction, what is each one's own partly evens out. None where one is unknown."""
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
