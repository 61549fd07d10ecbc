"""How well a calibration agrees with what it was fitted to, and what it has learned of each constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from orchestrator.core.physics.calibration import (
    MEMORY_CONSTANTS,
    MEMORY_FACTORS,
    Calibration,
    Observation,
)
from orchestrator.core.physics.step_time import CONSTANTS
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable

CLOSE = 0.15  # relative: what counts as well predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """One constant before and after. Of a factor, the standard deviations are of its logarithm; of an amount, in its own unit."""

    name: str
    is_factor: bool
    prior: float
    prior_sd: float
    fitted: float
    fitted_sd: float

    @property
    def learned(self) -> float:
        """How much of the uncertainty trials have taken away, 0..1."""
        return max(1.0 - self.fitted_sd / self.prior_sd, 0.0)


def fitted_times(prior: Calibration, fitted: Calibration) -> list[Fitted]:
    """The constants of step time."""
    sds = [np.sqrt(np.diag(each.step_covariance)) for each in (prior, fitted)]
    return [
        Fitted(
            name=name,
            is_factor=True,
            prior=exp(prior.log_constants[i]),
            prior_sd=float(sds[0][i]),
            fitted=exp(fitted.log_constants[i]),
            fitted_sd=float(sds[1][i]),
        )
        for i, name in enumerate(CONSTANTS)
    ]


def fitted_memory(prior: Calibration, fitted: Calibration) -> list[Fitted]:
    """The constants of the trainer that are calibrated: factors, then amounts, the reserve in GiB."""
    sds = [np.sqrt(np.diag(each.memory_covariance)) for each in (prior, fitted)]
    found = []
    for i, name in enumerate(MEMORY_CONSTANTS):
        is_factor = name in MEMORY_FACTORS
        before, after = float(prior.memory_values[i]), float(fitted.memory_values[i])
        found.append(
            Fitted(
                name=name,
                is_factor=is_factor,
                prior=exp(before) if is_factor else before,
                prior_sd=float(sds[0][i]),
                fitted=exp(after) if is_factor else max(after, 0.0),
                fitted_sd=float(sds[1][i]),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """Predicted against measured, of those observations that were."""

    layouts: Sequence[Layout]  # of all observations
    places: Sequence[int]  # of those that count, among them
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return [
            predicted / measured
            for predicted, measured in zip(self.predicted, self.measured, strict=True)
        ]

    def quantiles(self) -> dict[str, float] | None:
        """Quantiles of predicted over measured; None where there is nothing to compare."""
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
        """Place, predicted and measured of those that are farthest off, by their ratio."""
        by_error = np.argsort(-np.abs(np.log(self.ratios)), kind="stable").tolist()
        return [(self.places[i], self.predicted[i], self.measured[i]) for i in by_error[:most]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreements:
    step_time: Agreement
    memory: Agreement
    foretold: Sequence[bool]  # of each out-of-memory, whether it was predicted not to fit


def agreement(observations: Sequence[Observation], calibration: Calibration) -> Agreements:
    """Predict every observation by the formulas, and hold it against what was measured.

    Without the residuals: what was learned of these very rows would flatter.
    """
    calibration = replace(calibration, residuals={})
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(observations):
        groups.setdefault((row.cell, row.hardware.name, row.gpus_per_node, row.stage), []).append(
            place
        )
    layouts = [row.layout for row in observations]
    seconds, memory = np.empty(len(observations)), np.empty(len(observations))
    for places in groups.values():
        first = observations[places[0]]
        table = LayoutTable.of(layouts[place] for place in places)
        seconds[places], memory[places] = calibration.expect(
            table, first.cell, first.hardware, gpus_per_node=first.gpus_per_node, stage=first.stage
        )
    timed = [place for place, row in enumerate(observations) if row.step_seconds is not None]
    peaked = [place for place, row in enumerate(observations) if row.peak_memory_bytes is not None]
    return Agreements(
        step_time=Agreement(
            layouts=layouts,
            places=timed,
            predicted=[float(seconds[place]) for place in timed],
            measured=[row.step_seconds for row in observations if row.step_seconds is not None],
        ),
        memory=Agreement(
            layouts=layouts,
            places=peaked,
            predicted=[float(memory[place]) for place in peaked],
            measured=[
                row.peak_memory_bytes for row in observations if row.peak_memory_bytes is not None
            ],
        ),
        foretold=[
            bool(memory[place] > row.limit_bytes)
            for place, row in enumerate(observations)
            if row.out_of_memory
        ],
    )
