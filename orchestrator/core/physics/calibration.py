"""The constants of memory and step time, with what is still uncertain, and predictions with them.

Constants are a prior (data sheets, papers) or a fit to observations (calibration_fit.py). Knows
nothing of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from orchestrator.core.physics.links import Network
from orchestrator.core.physics.memory import Stage, peaks_by_trainer, predict_peak
from orchestrator.core.physics.prediction_band import FitErrors, step_spreads
from orchestrator.core.physics.residual import Residual, places_of
from orchestrator.core.physics.robust_fit import jacobian
from orchestrator.core.physics.step_time import StepTimeModel
from orchestrator.core.physics.step_time_constants import CONSTANTS, PRIORS, StepTimeConstants
from orchestrator.core.physics.trainer import MEMORY_CONSTANTS, Trainer
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout_table import BLOCK_ROWS, LayoutTable
from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.problem.quantile import Z90

# What the formulas miss within a cell, before anything is measured.
STEP_RESIDUAL_SD = 0.2  # of log seconds
MEMORY_RESIDUAL_SD = 0.08  # of log bytes
# The same for a trainer whose ranks were seen to need as much memory as the formulas say.
COUNTED_RESIDUAL_SD = 0.02
# In log seconds: how far most cells as a whole are from what constants explain. A faulty cell is
# much farther from it (Cauchy).
CELL_OFFSET_SD = 0.15
# How far cells of one machine and stack differ in a constant, as a part of its prior spread.
RELATIVES_SD = 0.3

# What calibration may change of the trainer, and how far: the standard deviations of the logarithms
# of five factors, and of three amounts in their units. The first column is for a trainer whose
# memory was counted: a few times the errors that were seen, at most 2 % on cores and 1.2 % on an
# H200. The second is for a trainer that is declared and for workload synthetic, the third for one
# about which nothing is known.
_SDS: Mapping[str, tuple[float, float, float]] = {
    # Fused kernels keep half of what plain torch keeps; norms in several kernels, 1.3 times as much
    # (ESTIMATORS: 53 instead of 41 bytes).
    "activation_factor": (0.03, 0.12, 0.35),
    # For a trainer that is not known, in addition to `activation_factor`.
    "pipeline_activation_factor": (0.05, 0.2, 0.2),
    # 1 byte in chunks, 6 in bf16, 14 with a copy.
    "logit_bytes": (0.05, 0.25, 0.6),
    # 2 bytes in bf16, 4 in fp32, 6 with both.
    "gradient_bytes": (0.05, 0.2, 0.5),
    # 12 bytes with an fp32 master, 8 without, 4 in bf16.
    "optimizer_bytes": (0.01, 0.05, 0.25),
    "gathered_inputs": (0.1, 0.5, 0.5),
    "gathered_inputs_in_pipeline": (0.1, 0.5, 0.5),
    "reserve_bytes": (1.0, 1.0, 2.0),
}
_NUM_FACTORS = 5
MEMORY_FACTORS: tuple[str, ...] = MEMORY_CONSTANTS[:_NUM_FACTORS]
# Each layout depends on one of them: it has one stage or several.
_ACTIVATION_FACTORS = ("activation_factor", "pipeline_activation_factor")
# A trainer may have no optimizer states.
_LEAST_FACTOR = 1e-3
# The units of the three amounts: two shares, and a reserve in GiB.
_UNITS = np.array([1.0, 1.0, 2.0**30])
_COUNTED_SDS, _MEMORY_SDS, _UNKNOWN_MEMORY_SDS = np.array(
    [_SDS[name] for name in MEMORY_CONSTANTS]
).T
_STEP_SDS = np.array([PRIORS[name].log_sd for name in CONSTANTS])


@dataclass(frozen=True, kw_only=True, eq=False)
class Predicted:
    """Predictions for n layouts, and how sure they are; arrays of n, or n x k for k constants."""

    log_step_seconds: Floats
    log_step_sd: Floats  # from the constants alone
    # Derivatives of log seconds by log constants.
    step_jacobian: Floats
    # Covariance of the log constants (k x k): layouts share the kernel J C J^T.
    step_covariance: Floats
    step_residual_sd: float  # what the formula does not explain
    memory_bytes: Floats
    # Above the prediction, of constants and formula together.
    memory_relative_sd: Floats
    # Derivatives of log bytes by constants of memory.
    memory_jacobian: Floats
    memory_covariance: Floats
    memory_residual_sd: float
    # The share of the memory limit that a peak may fill.
    usable_share: float
    # n: spreads of log seconds below and above the prediction, before anything is measured.
    step_below: Floats
    step_above: Floats
    # Computes the 10th and 90th percentile of errors, in these spreads.
    step_quantiles: Callable[[], tuple[float, float]]

    @property
    def step_seconds(self) -> Floats:
        """The seconds of a step of each layout: n."""
        return np.exp(self.log_step_seconds)

    @property
    def activation_share(self) -> Floats:
        """How much each log peak grows with the log of the bytes that layers keep: n."""
        columns = [MEMORY_CONSTANTS.index(name) for name in _ACTIVATION_FACTORS]
        share: Floats = self.memory_jacobian[:, columns].sum(axis=1)
        return share

    @property
    def memory_basis(self) -> Floats:
        """The effects of the constants of memory on each log peak in a Gaussian belief: n x k.

        They are the derivatives, except that an amount with the relative variance v moves the
        logarithm by a variance of log(1 + v), as in `_bounded_variance`.
        """
        basis = self.memory_jacobian.copy()
        variances = basis**2 * np.diag(self.memory_covariance)
        of_amounts = np.maximum(variances[:, _NUM_FACTORS:], 1e-300)
        basis[:, _NUM_FACTORS:] *= np.sqrt(np.log1p(of_amounts) / of_amounts)
        return basis

    def step_band(self) -> tuple[Floats, Floats]:
        """Return factors on the predicted seconds, n for each end of the band.

        Four of five measurements should lie between them.
        """
        low, high = self.step_quantiles()
        below, above = np.exp(low * self.step_below), np.exp(high * self.step_above)
        return below, above

    def memory_band(self) -> tuple[Floats, Floats]:
        """Return factors on the predicted bytes, n for each end of the band.

        Four of five peaks should lie between them. Below, only the formula errs: holes and buffers
        come on top of what it counts.
        """
        below = np.full(len(self.memory_bytes), np.exp(-Z90 * self.memory_residual_sd))
        return below, np.exp(Z90 * self.memory_relative_sd)

    def probability_of_fitting(self, limit_bytes: float) -> Floats:
        """Return the probability, 0 to 1, that each layout's peak stays under a limit.

        Errors of the logarithm are taken as normal, with the spread of either side.
        """
        left = np.log(limit_bytes) - np.log(self.memory_bytes)
        sd = np.where(left > 0, self.memory_relative_sd, self.memory_residual_sd)
        return normal_cdf(left / sd)


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Constants with their covariance: a prior before anything is measured, a posterior after.

    The posterior of some cells, `widened`, is the prior of the next.
    """

    log_constants: Floats  # in the order of CONSTANTS
    step_covariance: Floats
    step_residual_sd: float
    base_trainer: Trainer  # has what is not calibrated
    # In the order of MEMORY_CONSTANTS; logarithms of factors, then amounts.
    memory_values: Floats
    memory_covariance: Floats
    memory_residual_sd: float
    # Log seconds, of cells and hardware that were measured.
    cell_offsets: Mapping[tuple[Cell, str], float] = field(default_factory=dict)
    # By hardware: what constants did not explain, fit by fit; and the errors of the last fit.
    residuals: Mapping[str, tuple[Residual, ...]] = field(default_factory=dict)
    errors: Mapping[str, FitErrors] = field(default_factory=dict)
    # The trainer is ours or declared: its memory constants differ as those of relatives do.
    knows_trainer: bool = False
    # The rows that were fitted.
    num_times: int = 0
    num_peaks: int = 0
    num_out_of_memory: int = 0

    @classmethod
    def prior(cls, trainer: Trainer | None = None, *, is_known: bool = False) -> Calibration:
        """Return the belief before anything is measured.

        `is_known`: the trainer is ours or declared, so its constants are known more closely; the
        most closely if its ranks were seen to count what the formulas say.
        """
        trainer = trainer or Trainer()
        values = np.array([getattr(trainer, name) for name in MEMORY_CONSTANTS])
        return cls(
            log_constants=np.log([PRIORS[name].median for name in CONSTANTS]),
            step_covariance=np.diag(_STEP_SDS**2),
            step_residual_sd=STEP_RESIDUAL_SD,
            base_trainer=trainer,
            memory_values=np.concatenate(
                [
                    np.log(np.maximum(values[:_NUM_FACTORS], _LEAST_FACTOR)),
                    values[_NUM_FACTORS:] / _UNITS,
                ]
            ),
            memory_covariance=np.diag(_memory_sds(trainer) ** 2)
            if is_known
            else _unknown_covariance(),
            memory_residual_sd=COUNTED_RESIDUAL_SD if trainer.counted else MEMORY_RESIDUAL_SD,
            knows_trainer=is_known,
        )

    @cached_property
    def constants(self) -> StepTimeConstants:
        """The constants of step time, by their expected logarithms."""
        return constants_of(self.log_constants)

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer with the expected values of its calibrated constants."""
        return trainer_of(self.base_trainer, self.memory_values)

    def step_quantiles(self, cell: Cell, hardware: Hardware) -> tuple[float, float]:
        """Return the 10th and 90th percentile of errors of a cell's layouts.

        They are in units of the spreads before anything was measured (prediction_band.py).
        """
        errors = self.errors.get(hardware.name)
        if errors is None:
            return -Z90, Z90
        is_known = (cell, hardware.name) in self.cell_offsets
        return errors.quantiles_within if is_known else errors.quantiles_across

    def informed(self, network: Network) -> Calibration:
        """Return the calibration with links as measured collectives show them, not as assumed."""
        means, covariance = self.log_constants.copy(), self.step_covariance.copy()
        place = [CONSTANTS.index(name) for name in network.names]
        means[place] = network.log_means
        covariance[place, :] = covariance[:, place] = 0.0
        covariance[np.ix_(place, place)] = network.log_covariance
        return replace(self, log_constants=means, step_covariance=covariance)

    def widened(self) -> Calibration:
        """Return the prior of another cell: related cells differ a little in every constant."""
        return replace(
            self,
            step_covariance=self.step_covariance + np.diag((RELATIVES_SD * _STEP_SDS) ** 2),
            memory_covariance=self.memory_covariance
            + np.diag((RELATIVES_SD * _memory_sds(self.base_trainer)) ** 2),
        )

    def log_correction(self, table: LayoutTable, cell: Cell, hardware: Hardware) -> Floats:
        """Return the log seconds to add to the formula for each layout.

        They are its error in this cell, and its errors in such layouts of other cells.
        """
        return self.cell_offsets.get((cell, hardware.name), 0.0) + self.residual(
            table, cell, hardware
        )

    def residual(self, table: LayoutTable, cell: Cell, hardware: Hardware) -> Floats:
        """Return the log seconds that the formula missed in such layouts of other cells."""
        found = np.zeros(len(table))
        residuals = self.residuals.get(hardware.name, ())
        if residuals:
            places = places_of(table, cell)
            for residual in residuals:
                found += residual.at(places)
        return found

    def expect(
        self,
        table: LayoutTable,
        cell: Cell,
        hardware: Hardware,
        *,
        gpus_per_node: int,
        stage: Stage = Stage.FULLEST,
    ) -> tuple[Floats, Floats]:
        """Return the seconds of a step and the bytes at the peak of each layout.

        They are those of `predict`, without uncertainty.
        """
        if len(table) > BLOCK_ROWS:
            blocks = [
                self.expect(block, cell, hardware, gpus_per_node=gpus_per_node, stage=stage)
                for block in table.blocks()
            ]
            times, bytes_ = zip(*blocks, strict=True)
            return np.concatenate(times), np.concatenate(bytes_)
        model = StepTimeModel.of(
            table, cell, hardware, gpus_per_node=gpus_per_node, trainer=self.base_trainer
        )
        seconds = model.seconds(self.constants).total
        peaks = predict_peak(table, cell, self.trainer, stage=stage)
        return seconds * np.exp(self.log_correction(table, cell, hardware)), peaks

    def predict(
        self,
        table: LayoutTable,
        cell: Cell,
        hardware: Hardware,
        *,
        gpus_per_node: int,
        stage: Stage = Stage.FULLEST,
    ) -> Predicted:
        """Predict times and peaks of the n layouts of a table, with their uncertainty.

        Derivatives are numeric: k + 1 evaluations for k constants.
        """
        seconds, slopes = self._log_seconds(table, cell, hardware, gpus_per_node)

        peaks_of = peaks_by_trainer(table, cell, self.base_trainer, stage=stage)

        def log_bytes(values: Floats) -> Floats:
            found: Floats = np.log(peaks_of(trainer_of(self.base_trainer, values)))
            return found

        peaks = log_bytes(self.memory_values)
        memory_slopes = jacobian(log_bytes, self.memory_values, peaks)
        below, above = step_spreads(table, cell, hardware, gpus_per_node=gpus_per_node)
        memory_variance = np.einsum(
            "ij,jk,ik->i", memory_slopes, self.memory_covariance, memory_slopes
        )
        # Its constants are at most as far off as those of a relative.
        if self.knows_trainer:
            sds = RELATIVES_SD * _memory_sds(self.base_trainer)
            of_relatives = ((memory_slopes * sds) ** 2).sum(axis=1)
            memory_variance = np.minimum(memory_variance, of_relatives)
        memory_variance = _bounded_variance(memory_variance, memory_slopes, self.memory_covariance)
        return Predicted(
            log_step_seconds=seconds + self.log_correction(table, cell, hardware),
            log_step_sd=self._log_sd(slopes),
            step_jacobian=slopes,
            step_covariance=self.step_covariance,
            step_residual_sd=self.step_residual_sd,
            memory_bytes=np.exp(peaks),
            memory_relative_sd=np.sqrt(memory_variance + self.memory_residual_sd**2),
            memory_jacobian=memory_slopes,
            memory_covariance=self.memory_covariance,
            memory_residual_sd=self.memory_residual_sd,
            usable_share=self.base_trainer.usable_share,
            step_below=below,
            step_above=above,
            step_quantiles=partial(self.step_quantiles, cell, hardware),
        )

    def step_log_sd(
        self, table: LayoutTable, cell: Cell, hardware: Hardware, *, gpus_per_node: int
    ) -> Floats:
        """Return the standard deviation of each layout's log seconds, n.

        It is that of constants and formula together. Times alone, at half the cost of `predict`.
        """
        _, slopes = self._log_seconds(table, cell, hardware, gpus_per_node)
        found: Floats = np.hypot(self._log_sd(slopes), self.step_residual_sd)
        return found

    def _log_seconds(
        self, table: LayoutTable, cell: Cell, hardware: Hardware, gpus_per_node: int
    ) -> tuple[Floats, Floats]:
        """Log seconds by the formula, and their derivatives by log constants (n x k)."""
        model = StepTimeModel.of(
            table, cell, hardware, gpus_per_node=gpus_per_node, trainer=self.base_trainer
        )

        def log_seconds(log_constants: Floats) -> Floats:
            found: Floats = np.log(model.seconds(constants_of(log_constants)).total)
            return found

        seconds = log_seconds(self.log_constants)
        return seconds, jacobian(log_seconds, self.log_constants, seconds)

    def _log_sd(self, slopes: Floats) -> Floats:
        found: Floats = np.sqrt(np.einsum("ij,jk,ik->i", slopes, self.step_covariance, slopes))
        return found


def _memory_sds(trainer: Trainer) -> Floats:
    """The standard deviations of the constants of memory of a trainer that is known."""
    found: Floats = _COUNTED_SDS if trainer.counted else _MEMORY_SDS
    return found


def _unknown_covariance() -> Floats:
    """The covariance of a trainer about which nothing is known.

    Its kernels keep as much in pipelines as without them.
    """
    covariance = np.diag(_UNKNOWN_MEMORY_SDS**2)
    plain, pipeline = map(MEMORY_CONSTANTS.index, _ACTIVATION_FACTORS)
    covariance[pipeline, pipeline] += covariance[plain, plain]
    covariance[plain, pipeline] = covariance[pipeline, plain] = covariance[plain, plain]
    return covariance


def constants_of(log_constants: Floats) -> StepTimeConstants:
    """Return the constants of step time from their logarithms, in the order of CONSTANTS."""
    return StepTimeConstants(**dict(zip(CONSTANTS, np.exp(log_constants).tolist(), strict=True)))


def _bounded_variance(variance: Floats, slopes: Floats, covariance: Floats) -> Floats:
    """Return the variance of each log peak, n, where amounts may be far larger than the peak.

    `slopes`: n x k, of the log peak by each constant. A GiB of reserve more or less is 40 times the
    peak of a tiny model; taken for an error of the logarithm, it would be a factor of e^40. A
    lognormal value whose relative variance is v has the log variance log(1 + v), which is about v
    if v is small. Only the part of the variance that comes from amounts is replaced.
    """
    each = slopes**2 * np.diag(covariance)
    share = each[:, _NUM_FACTORS:].sum(axis=1) / np.maximum(each.sum(axis=1), 1e-300)
    found: Floats = (1.0 - share) * variance + share * np.log1p(variance)
    return found


def trainer_of(base: Trainer, values: Floats) -> Trainer:
    """Return a trainer with these constants of memory, in the order of MEMORY_CONSTANTS.

    Values are logarithms of factors, then amounts: shares, and a reserve in GiB. An amount below 0
    counts as 0.
    """
    factors, amounts = np.exp(values[:_NUM_FACTORS]), np.maximum(values[_NUM_FACTORS:], 0.0)
    found = np.concatenate([factors, amounts * _UNITS])
    return replace(base, **dict(zip(MEMORY_CONSTANTS, found.tolist(), strict=True)))
