"""Measures how well a calibration agrees with observations, and how well each constant is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from orchestrator.core.physics.calibration import MEMORY_FACTORS, Calibration
from orchestrator.core.physics.observation import Observation, by_cell
from orchestrator.core.physics.step_time_constants import CONSTANTS
from orchestrator.core.physics.trainer import MEMORY_CONSTANTS
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable

CLOSE = 0.15  # relative: what counts as well predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """One constant before and after a fit.

    The standard deviations of a factor are of its logarithm, those of an amount in its unit.
    """

    name: str
    is_factor: bool
    prior: float
    prior_sd: float
    fitted: float
    fitted_sd: float

    @property
    def from_data(self) -> float:
        """The share of the uncertainty that trials have removed, 0 to 1."""
        return max(1.0 - self.fitted_sd / self.prior_sd, 0.0)


def fitted_times(prior: Calibration, fitted: Calibration) -> list[Fitted]:
    """Return the constants of step time, in the order of CONSTANTS."""
    before, after = ((one.log_constants, one.step_covariance) for one in (prior, fitted))
    return _fitted(CONSTANTS, len(CONSTANTS), *before, *after)


def fitted_memory(prior: Calibration, fitted: Calibration) -> list[Fitted]:
    """Return the calibrated constants of the trainer, in the order of MEMORY_CONSTANTS.

    Factors come first, then amounts, the reserve in GiB.
    """
    before, after = ((one.memory_values, one.memory_covariance) for one in (prior, fitted))
    return _fitted(MEMORY_CONSTANTS, len(MEMORY_FACTORS), *before, *after)


def _fitted(
    names: Sequence[str],
    num_factors: int,
    prior: Floats,
    prior_covariance: Floats,
    fitted: Floats,
    fitted_covariance: Floats,
) -> list[Fitted]:
    return [
        Fitted(
            name=name,
            is_factor=i < num_factors,
            prior=exp(prior[i]) if i < num_factors else float(prior[i]),
            prior_sd=float(np.sqrt(prior_covariance[i, i])),
            fitted=exp(fitted[i]) if i < num_factors else max(float(fitted[i]), 0.0),
            fitted_sd=float(np.sqrt(fitted_covariance[i, i])),
        )
        for i, name in enumerate(names)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """Predicted against measured, in seconds of a step or in bytes at the peak."""

    layouts: Sequence[Layout]  # of all observations
    places: Sequence[int]  # of the measured ones, among all
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Predicted over measured, of each measured observation."""
        return [p / m for p, m in zip(self.predicted, self.measured, strict=True)]

    def quantiles(self) -> dict[str, float] | None:
        """Return quantiles of predicted over measured; None if nothing was measured.

        `median_error` is relative, `within_15_percent` a share.
        """
        if not self.ratios:
            return None
        ratios = np.array(self.ratios)
        errors = np.abs(ratios - 1.0)
        return {
            "median": float(np.median(ratios)),
            "p10": float(np.quantile(ratios, 0.1)),
            "p90": float(np.quantile(ratios, 0.9)),
            "median_error": float(np.median(errors)),
            "within_15_percent": float((errors <= CLOSE).mean()),
        }

    def worst(self, most: int) -> list[tuple[int, float, float]]:
        """Return place, predicted and measured of the observations farthest off by their ratio.

        At most so many, the worst first.
        """
        by_error = np.argsort(-np.abs(np.log(self.ratios)), kind="stable").tolist()
        return [(self.places[i], self.predicted[i], self.measured[i]) for i in by_error[:most]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreements:
    """The agreement of step times, of peaks, and of what did not fit."""

    step_time: Agreement
    memory: Agreement
    # For each out-of-memory, whether it was predicted not to fit.
    foretold: Sequence[bool]


def agreement(observations: Sequence[Observation], calibration: Calibration) -> Agreements:
    """Compare every observation with what the formulas predict for it.

    Residuals are left out: they were fitted to the same rows, and would hide errors.
    """
    calibration = replace(calibration, residuals={})
    layouts = [row.layout for row in observations]
    seconds, memory = np.empty(len(observations)), np.empty(len(observations))
    for group in by_cell(observations):
        for trainer in {row.trainer for row in group.rows}:
            mine = [n for n, row in enumerate(group.rows) if row.trainer == trainer]
            places = [group.places[n] for n in mine]
            of_trainer = replace(calibration, base_trainer=trainer or calibration.base_trainer)
            seconds[places], memory[places] = of_trainer.expect(
                LayoutTable.of(group.rows[n].layout for n in mine),
                group.cell,
                group.hardware,
                gpus_per_node=group.gpus_per_node,
                stage=group.stage,
            )

    def compared(predicted: Floats, measured: Sequence[float | None]) -> Agreement:
        both = [(n, float(predicted[n]), m) for n, m in enumerate(measured) if m is not None]
        return Agreement(
            layouts=layouts,
            places=[place for place, _, _ in both],
            predicted=[one for _, one, _ in both],
            measured=[one for _, _, one in both],
        )

    return Agreements(
        step_time=compared(seconds, [row.step_seconds for row in observations]),
        memory=compared(memory, [row.peak_memory_bytes for row in observations]),
        foretold=[
            bool(memory[place] > row.limit_bytes)
            for place, row in enumerate(observations)
            if row.out_of_memory
        ],
    )
