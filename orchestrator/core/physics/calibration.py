"""The constants of memory and step time, fitted to what was measured: successes and failures, with what is still uncertain.

Starts from priors (data sheets, papers), or from what a cell's relatives taught. Knows nothing of stores: observations in, values out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.links import Network
from orchestrator.core.physics.memory import Stage, predict_memory
from orchestrator.core.physics.prediction_band import FitErrors, step_spreads
from orchestrator.core.physics.residual import Residual, places_of
from orchestrator.core.physics.robust_fit import fit, jacobian, robust_sd
from orchestrator.core.physics.step_time import CONSTANTS, PRIORS, StepTimeConstants, StepTimeModel
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.problem.normal import Z90, normal_cdf

Floats = NDArray[np.float64]

STEP_RESIDUAL_SD = (
    0.2  # of log seconds: what the formula misses within a cell, before anything is measured
)
MEMORY_RESIDUAL_SD = 0.08  # of log bytes
ONE_TRIAL = 5.0  # measured residuals that outweigh the two above
CELL_OFFSET_SD = 0.15  # of log seconds: how far most cells as a whole are from what constants explain; a sick one, far more (Cauchy)
CELL_OFFSET_WEIGHT = 2.0  # of that belief, in measured residuals
_NO_LIMIT_SD = 3.0  # of a cell's offset, besides
CELL_CORRELATION = 0.1  # of the residuals of one cell: a hundred of its rows teach no more than ten rows of ten cells
RELATIVES_SD = (
    0.3  # of a constant's prior spread: how far cells of one machine and stack differ in it
)
THRASHING_SHARE = 0.94  # of the memory limit: beyond it the allocator frees and asks again, and a step takes 3-12 times as long

# Of the trainer, what calibration may change, and how far it may be: standard deviation of a factor's logarithm, or of an amount.
_FACTORS: Mapping[str, float] = {
    "activation_factor": 0.12,
    "pipeline_activation_factor": 0.2,
    "logit_bytes": 0.25,
    "gradient_bytes": 0.2,
}
_AMOUNTS: Mapping[str, float] = {
    "gathered_inputs": 0.5,
    "gathered_inputs_in_pipeline": 0.5,
    "reserve_bytes": 1.0,
}
_UNITS = np.array([1.0, 1.0, 2.0**30])  # of the amounts: shares, and a reserve in GiB
MEMORY_CONSTANTS: tuple[str, ...] = (*_FACTORS, *_AMOUNTS)
MEMORY_FACTORS: tuple[str, ...] = tuple(_FACTORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What one launch of a layout gave: a time, a peak, or an out-of-memory. Unknown is None."""

    cell: Cell
    layout: Layout
    hardware: Hardware
    gpus_per_node: int
    step_seconds: float | None = None
    peak_memory_bytes: float | None = None
    out_of_memory: bool = False
    memory_limit_bytes: float | None = None  # None: the device's own
    stage: Stage = Stage.FULLEST  # whose peak it is

    def __post_init__(self) -> None:
        for name in ("step_seconds", "peak_memory_bytes", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(
                    f"{name} {value} of {self.layout.key}: fits take logarithms of positive numbers; what was not read is None"
                )

    @property
    def limit_bytes(self) -> float:
        return (
            self.memory_limit_bytes
            if self.memory_limit_bytes is not None
            else float(self.hardware.memory_bytes)
        )

    @property
    def thrashes(self) -> bool:
        """Whether it ran at the edge of its memory: then its time says nothing of other layouts."""
        return (
            self.peak_memory_bytes is not None
            and self.peak_memory_bytes > THRASHING_SHARE * self.limit_bytes
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Predicted:
    """What is predicted of n layouts, and how sure that is; arrays of n, or n x k for k constants."""

    log_step_seconds: Floats
    log_step_sd: Floats  # from the constants alone
    step_jacobian: Floats  # d log seconds / d log constants
    step_covariance: (
        Floats  # k x k, of the log constants: J C J^T is the kernel of what all layouts share
    )
    step_residual_sd: float  # what the formula misses besides
    memory_bytes: Floats
    memory_relative_sd: Floats  # above the prediction, of constants and formula together
    memory_jacobian: Floats  # d log bytes / d memory constants
    memory_covariance: Floats
    memory_residual_sd: float
    # n: spreads of log seconds below and above the prediction, before anything is measured.
    step_below: Floats
    step_above: Floats
    # Computes the 10th and 90th percentile of errors, in these spreads.
    step_quantiles: Callable[[], tuple[float, float]]

    @property
    def step_seconds(self) -> Floats:
        return np.exp(self.log_step_seconds)

    def step_band(self) -> tuple[Floats, Floats]:
        """Factors on the predicted seconds between which four of five measurements should lie."""
        low, high = self.step_quantiles()
        below, above = np.exp(low * self.step_below), np.exp(high * self.step_above)
        return below, above

    def memory_band(self) -> tuple[Floats, Floats]:
        """Factors on the predicted bytes at the peak. Below the prediction only the formula errs: holes and buffers come on top of what it counts."""
        return np.full(len(self.memory_bytes), np.exp(-Z90 * self.memory_residual_sd)), np.exp(
            Z90 * self.memory_relative_sd
        )

    def probability_of_fitting(self, limit_bytes: float) -> Floats:
        """The probability that a layout's peak stays under a limit. Errors of the logarithm are taken as normal, with the spread of either side."""
        room = np.log(limit_bytes) - np.log(self.memory_bytes)
        return normal_cdf(
            np.where(room > 0, room / self.memory_relative_sd, room / self.memory_residual_sd)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Constants with their covariance: a prior before anything is measured, a posterior after it, and the prior of what comes next."""

    log_constants: Floats  # in the order of CONSTANTS
    step_covariance: Floats
    step_residual_sd: float
    base_trainer: Trainer  # what is not calibrated is as here
    memory_values: Floats  # in the order of MEMORY_CONSTANTS; logarithms of factors, then amounts
    memory_covariance: Floats
    memory_residual_sd: float
    cell_offsets: Mapping[tuple[Cell, str], float] = field(
        default_factory=dict
    )  # log seconds, of cells and hardware that were measured
    residuals: Mapping[str, tuple[Residual, ...]] = field(
        default_factory=dict
    )  # by hardware: what constants did not explain, fit by fit
    errors: Mapping[str, FitErrors] = field(default_factory=dict)  # by hardware: of the last fit
    # The trainer is ours or declared: its memory constants differ as those of relatives do.
    knows_trainer: bool = False
    num_times: int = 0  # rows that it rests on
    num_peaks: int = 0
    num_out_of_memory: int = 0

    @classmethod
    def prior(cls, trainer: Trainer | None = None, *, is_known: bool = False) -> Calibration:
        """The belief before anything is measured. `is_known`: the trainer is ours or declared, so its constants are closer than those of any stack."""
        trainer = trainer or Trainer()
        factors = np.log([getattr(trainer, name) for name in _FACTORS])
        amounts = np.array([getattr(trainer, name) for name in _AMOUNTS]) / _UNITS
        return cls(
            log_constants=np.log([PRIORS[name].median for name in CONSTANTS]),
            step_covariance=np.diag([PRIORS[name].log_sd ** 2 for name in CONSTANTS]),
            step_residual_sd=STEP_RESIDUAL_SD,
            base_trainer=trainer,
            memory_values=np.concatenate([factors, amounts]),
            memory_covariance=np.diag([sd**2 for sd in (*_FACTORS.values(), *_AMOUNTS.values())]),
            memory_residual_sd=MEMORY_RESIDUAL_SD,
            knows_trainer=is_known,
        )

    @cached_property
    def constants(self) -> StepTimeConstants:
        return _constants(self.log_constants)

    @cached_property
    def trainer(self) -> Trainer:
        return _trainer(self.base_trainer, self.memory_values)

    def step_quantiles(self, cell: Cell, hardware: Hardware) -> tuple[float, float]:
        """The 10th and 90th percentile of errors of a cell's layouts, in spreads of before (prediction_band.py)."""
        knows_cell = (cell, hardware.name) in self.cell_offsets
        if (hardware.name, knows_cell) not in self._quantiles:
            errors = self.errors.get(hardware.name)
            self._quantiles[hardware.name, knows_cell] = (
                (-Z90, Z90) if errors is None else errors.quantiles(knows_cell=knows_cell)
            )
        return self._quantiles[hardware.name, knows_cell]

    @cached_property
    def _quantiles(self) -> dict[tuple[str, bool], tuple[float, float]]:
        return {}

    def informed(self, network: Network) -> Calibration:
        """With what measured collectives say of the links in place of what is believed of all machines."""
        means, covariance = self.log_constants.copy(), self.step_covariance.copy()
        place = [CONSTANTS.index(name) for name in network.names]
        means[place] = network.log_means
        covariance[place, :] = covariance[:, place] = 0.0
        covariance[np.ix_(place, place)] = network.log_covariance
        return replace(self, log_constants=means, step_covariance=covariance)

    def widened(self) -> Calibration:
        """As the prior of another cell: cells of one machine and stack differ a little in every constant."""
        spread = np.diag([(RELATIVES_SD * PRIORS[name].log_sd) ** 2 for name in CONSTANTS])
        memory_spread = np.diag(
            [(RELATIVES_SD * sd) ** 2 for sd in (*_FACTORS.values(), *_AMOUNTS.values())]
        )
        return replace(
            self,
            step_covariance=self.step_covariance + spread,
            memory_covariance=self.memory_covariance + memory_spread,
        )

    def log_correction(self, table: LayoutTable, cell: Cell, hardware: Hardware) -> Floats:
        """Log seconds on top of the formula: what it missed of the cell as a whole, and of layouts like these elsewhere."""
        return self.cell_offsets.get((cell, hardware.name), 0.0) + self._residual(
            table, cell, hardware
        )

    def _residual(self, table: LayoutTable, cell: Cell, hardware: Hardware) -> Floats:
        found = np.zeros(len(table))
        learned = self.residuals.get(hardware.name, ())
        if learned:
            places = places_of(table, cell)
            for residual in learned:
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
        """Seconds of a step and bytes at the peak of the layouts of a table, as `predict` has them, without how sure that is: one evaluation."""
        seconds = (
            StepTimeModel.of(table, cell, hardware, gpus_per_node=gpus_per_node)
            .seconds(self.constants)
            .total
        )
        peaks = predict_memory(table, cell, self.trainer, stage=stage).total
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
        """Predict times and peaks of the layouts of a table, with their uncertainty. Derivatives are numeric: k + 1 evaluations."""
        seconds, slopes = self._log_seconds(table, cell, hardware, gpus_per_node)

        def log_bytes(values: Floats) -> Floats:
            found: Floats = np.log(
                predict_memory(table, cell, _trainer(self.base_trainer, values), stage=stage).total
            )
            return found

        peaks = log_bytes(self.memory_values)
        memory_slopes = jacobian(log_bytes, self.memory_values, peaks)
        below, above = step_spreads(table, cell, hardware, gpus_per_node=gpus_per_node)
        memory_variance = np.einsum(
            "ij,jk,ik->i", memory_slopes, self.memory_covariance, memory_slopes
        )
        if self.knows_trainer:  # its constants are at most as far off as those of a relative
            of_relatives = RELATIVES_SD * np.array([*_FACTORS.values(), *_AMOUNTS.values()])
            memory_variance = np.minimum(
                memory_variance, ((memory_slopes * of_relatives) ** 2).sum(axis=1)
            )
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
            step_below=below,
            step_above=above,
            step_quantiles=partial(self.step_quantiles, cell, hardware),
        )

    def step_log_sd(
        self, table: LayoutTable, cell: Cell, hardware: Hardware, *, gpus_per_node: int
    ) -> Floats:
        """n: standard deviation of log seconds, of constants and formula together; times alone, at half the cost of `predict`."""
        _, slopes = self._log_seconds(table, cell, hardware, gpus_per_node)
        found: Floats = np.hypot(self._log_sd(slopes), self.step_residual_sd)
        return found

    def _log_seconds(
        self, table: LayoutTable, cell: Cell, hardware: Hardware, gpus_per_node: int
    ) -> tuple[Floats, Floats]:
        """Log seconds by the formula, and their derivatives by log constants (n x k)."""
        model = StepTimeModel.of(table, cell, hardware, gpus_per_node=gpus_per_node)

        def log_seconds(log_constants: Floats) -> Floats:
            found: Floats = np.log(model.seconds(_constants(log_constants)).total)
            return found

        seconds = log_seconds(self.log_constants)
        return seconds, jacobian(log_seconds, self.log_constants, seconds)

    def _log_sd(self, slopes: Floats) -> Floats:
        found: Floats = np.sqrt(np.einsum("ij,jk,ik->i", slopes, self.step_covariance, slopes))
        return found


def calibrate(
    observations: Iterable[Observation], prior: Calibration, *, begin: Calibration | None = None
) -> Calibration:
    """Fit the constants to what was measured. Of nothing, the prior comes back.

    `begin`: a fit of much the same rows, to begin from where it is more probable than the prior's middle: then a few steps do.
    """
    groups = _groups(observations)
    return _with_memory(_with_times(prior, groups, begin), groups, begin)


def choose_trainer(observations: Iterable[Observation], candidates: Mapping[str, Trainer]) -> str:
    """The name of the trainer whose constants, once calibrated, explain the peaks best; the first one where nothing was measured."""
    groups = _groups(observations)
    costs = {
        name: _memory_cost(Calibration.prior(trainer), groups)
        for name, trainer in candidates.items()
    }
    return min(costs, key=lambda name: costs[name])


@dataclass(frozen=True, kw_only=True, eq=False)
class _CellGroup:
    """Observations of one cell on one machine, as arrays."""

    rows: Sequence[Observation]

    @cached_property
    def timed(self) -> list[Observation]:
        return [row for row in self.rows if row.step_seconds is not None and not row.thrashes]

    @cached_property
    def peaked(self) -> list[Observation]:
        return [row for row in self.rows if row.peak_memory_bytes is not None or row.out_of_memory]

    @cached_property
    def timed_table(self) -> LayoutTable:
        return LayoutTable.of(row.layout for row in self.timed)

    def step_time_model(self) -> StepTimeModel:
        first = self.rows[0]
        return StepTimeModel.of(
            self.timed_table, first.cell, first.hardware, gpus_per_node=first.gpus_per_node
        )


def _groups(observations: Iterable[Observation]) -> list[_CellGroup]:
    found: dict[tuple[object, ...], list[Observation]] = {}
    for row in observations:
        found.setdefault((row.cell, row.hardware.name, row.gpus_per_node, row.stage), []).append(
            row
        )
    return [_CellGroup(rows=rows) for rows in found.values()]


def _weights(sizes: Sequence[int]) -> Floats:
    """How many independent residuals each one stands for: of one cell, little is new after the first few."""
    return (
        np.concatenate([np.full(n, 1.0 / (1.0 + (n - 1) * CELL_CORRELATION)) for n in sizes])
        if sizes
        else np.zeros(0)
    )


def _memory_weights(groups: Sequence[_CellGroup]) -> Floats:
    """The same of peaks, and all cells of one model teach as much as one: what the formula misses of a model, it misses in all of them."""
    models = Counter(group.rows[0].cell.model for group in groups)
    weights = _weights([len(group.peaked) for group in groups])
    cells = np.concatenate(
        [np.full(len(group.peaked), float(models[group.rows[0].cell.model])) for group in groups]
    )
    shared: Floats = weights / cells
    return shared


def _with_times(
    prior: Calibration, groups: Sequence[_CellGroup], begin: Calibration | None
) -> Calibration:
    timed = [group for group in groups if group.timed]
    if not timed:
        return prior
    timed.sort(key=lambda group: group.rows[0].hardware.name)
    models = [
        StepTimeModel.joined([group.step_time_model() for group in same])
        for _, same in groupby(timed, key=lambda group: group.rows[0].hardware.name)
    ]
    measured = np.log(np.array([row.step_seconds for group in timed for row in group.timed]))
    measured -= np.concatenate(
        [
            prior._residual(group.timed_table, group.rows[0].cell, group.rows[0].hardware)
            for group in timed
        ]
    )
    weights = _weights([len(group.timed) for group in timed])
    sd = prior.step_residual_sd

    # A cell's own offset keeps what slows all of it (a sick network) from being blamed on the constants.
    place = np.repeat(np.arange(len(timed)), [len(group.timed) for group in timed])
    own = np.vstack([np.eye(len(timed))[place] / sd, np.eye(len(timed)) / CELL_OFFSET_SD])
    known = len(CONSTANTS)
    cells = [(group.rows[0].cell, group.rows[0].hardware.name) for group in timed]

    def residuals(x: Floats) -> Floats:
        constants = _constants(x[:known])
        predicted = np.concatenate([model.seconds(constants).total for model in models])
        return np.concatenate(
            [(np.log(predicted) + x[known:][place] - measured) / sd, x[known:] / CELL_OFFSET_SD]
        )

    def slopes(x: Floats, at: Floats) -> Floats:
        offsets = x[known:]
        return np.hstack(
            [
                jacobian(
                    lambda constants: residuals(np.concatenate([constants, offsets])), x[:known], at
                ),
                own,
            ]
        )

    def start(of: Calibration) -> Floats:
        return np.concatenate(
            [of.log_constants, [of.cell_offsets.get(cell, 0.0) for cell in cells]]
        )

    mean = start(prior)
    covariance = np.zeros((len(mean), len(mean)))
    covariance[:known, :known] = prior.step_covariance
    covariance[known:, known:] = np.eye(len(timed)) * _NO_LIMIT_SD**2
    beliefs = np.full(len(timed), CELL_OFFSET_WEIGHT)
    found = fit(
        residuals,
        mean=mean,
        covariance=covariance,
        weights=np.concatenate([weights, beliefs]),
        slopes_of=slopes,
        begin=start(begin) if begin is not None else None,
    )
    unexplained = np.split(
        -found.residuals[: len(measured)] * sd,
        np.cumsum([len(group.timed) for group in timed])[:-1],
    )
    return replace(
        prior,
        residuals=_with_residuals(prior.residuals, timed, unexplained),
        errors=_errors(
            timed, unexplained, dict(zip(cells, found.parameters[known:].tolist(), strict=True))
        ),
        log_constants=found.parameters[:known],
        step_covariance=found.covariance[:known, :known],
        step_residual_sd=robust_sd(
            found.residuals[: len(measured)] * sd,
            expected=sd,
            worth=ONE_TRIAL,
            count=float(weights.sum()),
        ),
        cell_offsets={
            **prior.cell_offsets,
            **dict(zip(cells, found.parameters[known:].tolist(), strict=True)),
        },
        num_times=prior.num_times + len(measured),
    )


def _with_residuals(
    prior: Mapping[str, tuple[Residual, ...]],
    timed: Sequence[_CellGroup],
    unexplained: Sequence[Floats],
) -> dict[str, tuple[Residual, ...]]:
    """What constants, cells' offsets and earlier residuals left, one more residual per kind of hardware with several cells.

    Of one cell alone it could not be told what goes for others; within it, a search learns it row by row (core/search/surrogate.py).
    """
    found = dict(prior)
    for name, same in groupby(
        zip(timed, unexplained, strict=True), key=lambda pair: pair[0].rows[0].hardware.name
    ):
        groups, errors = zip(*same, strict=True)
        if len({group.rows[0].cell for group in groups}) < 2:
            continue
        places = np.concatenate(
            [places_of(group.timed_table, group.rows[0].cell) for group in groups]
        )
        found[name] = (*found.get(name, ()), Residual.learn(places, np.concatenate(errors)))
    return found


def _errors(
    timed: Sequence[_CellGroup],
    unexplained: Sequence[Floats],
    offsets: Mapping[tuple[Cell, str], float],
) -> dict[str, FitErrors]:
    """The errors that a fit left, by hardware."""
    found = {}
    for name, same in groupby(
        zip(timed, unexplained, strict=True), key=lambda pair: pair[0].rows[0].hardware.name
    ):
        groups, errors = zip(*same, strict=True)
        firsts = [group.rows[0] for group in groups]
        spreads = [
            step_spreads(
                group.timed_table, first.cell, first.hardware, gpus_per_node=first.gpus_per_node
            )
            for group, first in zip(groups, firsts, strict=True)
        ]
        sizes = [len(group.timed) for group in groups]
        numbers = {
            cell: number
            for number, cell in enumerate(dict.fromkeys(first.cell for first in firsts))
        }
        found[name] = FitErrors(
            places=np.concatenate(
                [
                    places_of(group.timed_table, first.cell)
                    for group, first in zip(groups, firsts, strict=True)
                ]
            ),
            errors=np.concatenate(errors),
            offsets=np.repeat([offsets[first.cell, name] for first in firsts], sizes),
            cells=np.repeat(
                np.array([numbers[first.cell] for first in firsts], dtype=np.intp), sizes
            ),
            below=np.concatenate([below for below, _ in spreads]),
            above=np.concatenate([above for _, above in spreads]),
        )
    return found


def _with_memory(
    prior: Calibration, groups: Sequence[_CellGroup], begin: Calibration | None
) -> Calibration:
    peaked = [group for group in groups if group.peaked]
    if not peaked:
        return prior
    residuals, censored = _memory_residuals(prior, peaked)
    weights = _memory_weights(peaked)
    sd = prior.memory_residual_sd
    found = fit(
        residuals,
        mean=prior.memory_values,
        covariance=prior.memory_covariance,
        weights=weights,
        begin=begin.memory_values if begin is not None else None,
    )
    exact = ~censored
    return replace(
        prior,
        memory_values=found.parameters,
        memory_covariance=found.covariance,
        memory_residual_sd=robust_sd(
            found.residuals[exact] * sd,
            expected=sd,
            worth=ONE_TRIAL,
            count=float(weights[exact].sum()),
        ),
        num_peaks=prior.num_peaks + int(exact.sum()),
        num_out_of_memory=prior.num_out_of_memory + int(censored.sum()),
    )


def _memory_cost(prior: Calibration, groups: Sequence[_CellGroup]) -> float:
    peaked = [group for group in groups if group.peaked]
    if not peaked:
        return 0.0
    residuals, _ = _memory_residuals(prior, peaked)
    weights = _memory_weights(peaked)
    found = fit(
        residuals, mean=prior.memory_values, covariance=prior.memory_covariance, weights=weights
    )
    moved = found.parameters - prior.memory_values
    return float(
        (weights * np.log1p(found.residuals**2)).sum()
        + moved @ np.linalg.inv(prior.memory_covariance) @ moved
    )


def _memory_residuals(
    prior: Calibration, groups: Sequence[_CellGroup]
) -> tuple[Callable[[Floats], Floats], NDArray[np.bool_]]:
    """Log predicted over measured, in standard deviations; of an out-of-memory only what the prediction falls short of the limit.

    Any stage may be the one that ran out, whichever one's peak a log shows.
    """
    rows = [row for group in groups for row in group.peaked]
    censored = np.array([row.out_of_memory for row in rows])
    measured = np.log(
        [
            row.limit_bytes
            if row.out_of_memory or row.peak_memory_bytes is None
            else row.peak_memory_bytes
            for row in rows
        ]
    )
    # All cells of a model at once: how many GPUs a layout is for, it says itself, and the batch is its own.
    alike: dict[tuple[ModelShape, int, Stage], list[int]] = {}
    for place, row in enumerate(rows):
        stage = Stage.FULLEST if row.out_of_memory else row.stage
        alike.setdefault((row.cell.model, row.cell.sequence_length, stage), []).append(place)
    parts = [
        (
            LayoutTable.of(rows[place].layout for place in places),
            rows[places[0]].cell,
            stage,
            np.array(places),
        )
        for (_, _, stage), places in alike.items()
    ]

    def residuals(values: Floats) -> Floats:
        trainer = _trainer(prior.base_trainer, values)
        predicted = np.empty(len(rows))
        for table, cell, stage, place in parts:
            predicted[place] = predict_memory(table, cell, trainer, stage=stage).total
        difference = (np.log(predicted) - measured) / prior.memory_residual_sd
        found: Floats = np.where(censored, np.minimum(difference, 0.0), difference)
        return found

    return residuals, censored


def _constants(log_constants: Floats) -> StepTimeConstants:
    return StepTimeConstants(**dict(zip(CONSTANTS, np.exp(log_constants).tolist(), strict=True)))


def _trainer(base: Trainer, values: Floats) -> Trainer:
    factors = dict(zip(_FACTORS, np.exp(values[: len(_FACTORS)]).tolist(), strict=True))
    amounts = dict(
        zip(_AMOUNTS, (np.maximum(values[len(_FACTORS) :], 0.0) * _UNITS).tolist(), strict=True)
    )
    return replace(base, **factors, **amounts)
