"""The fit of a calibration: constants of step time and memory, from successes and failures.

It starts from a prior: data sheets and papers, or what related cells showed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from orchestrator.core.physics.calibration import (
    CELL_OFFSET_SD,
    Calibration,
    constants_of,
    trainer_of,
)
from orchestrator.core.physics.memory import Stage, peaks_by_trainer
from orchestrator.core.physics.observation import CellObservations, Observation, by_cell
from orchestrator.core.physics.prediction_band import FitErrors, step_spreads
from orchestrator.core.physics.residual import Residual, places_of
from orchestrator.core.physics.robust_fit import fit, jacobian, robust_sd
from orchestrator.core.physics.step_time import StepTimeModel
from orchestrator.core.physics.step_time_constants import CONSTANTS
from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape

# Measured residuals that outweigh the spread believed before.
ONE_TRIAL = 5.0
# The weight of the belief in a cell's offset, in measured residuals.
CELL_OFFSET_WEIGHT = 2.0
_NO_LIMIT_SD = 3.0  # of a cell's offset, besides
# Between the residuals of one cell: a hundred of its rows show no more than ten of ten cells.
CELL_CORRELATION = 0.1
# Between the peaks of two models: all of one show no more than half a row of another, since what
# the formula misses differs from model to model.
MODEL_CORRELATION = 2.0


def calibrate(
    observations: Iterable[Observation],
    prior: Calibration,
    *,
    begin: Calibration | None = None,
    model: ModelShape | None = None,
) -> Calibration:
    """Return the constants, fitted to observations; without any, the prior.

    `begin`: a fit of much the same rows. If it is more probable than the prior's middle, the fit
    begins there, and a few steps do. `model`: whose memory will be predicted; its own peaks count
    most. None: of any model.
    """
    groups = by_cell(observations)
    return _with_memory(_with_times(prior, groups, begin), groups, begin, model)


def calibrate_times(
    observations: Iterable[Observation], prior: Calibration, *, begin: Calibration | None = None
) -> Calibration:
    """Return the prior with its constants of step time fitted to observations.

    `begin`: as in `calibrate`.
    """
    return _with_times(prior, by_cell(observations), begin)


def with_memory_of(
    model: ModelShape | None,
    times: Calibration,
    observations: Iterable[Observation],
    prior: Calibration,
    *,
    begin: Calibration | None = None,
) -> Calibration:
    """Return `times` with the memory constants fitted to observations, for a model.

    `prior` is that of the memory constants, `begin` and `model` are as in `calibrate`.
    """
    fitted = _with_memory(prior, by_cell(observations), begin, model)
    return replace(
        times,
        memory_values=fitted.memory_values,
        memory_covariance=fitted.memory_covariance,
        memory_residual_sd=fitted.memory_residual_sd,
        num_peaks=fitted.num_peaks,
        num_out_of_memory=fitted.num_out_of_memory,
    )


def _with_times(
    prior: Calibration, groups: Sequence[CellObservations], begin: Calibration | None
) -> Calibration:
    timed = [group for group in groups if group.timed]
    if not timed:
        return prior
    timed.sort(key=_hardware_name)
    models = [
        StepTimeModel.joined([group.step_time_model(prior.base_trainer) for group in same])
        for _, same in groupby(timed, key=_hardware_name)
    ]
    measured = np.log(np.array([row.step_seconds for group in timed for row in group.timed]))
    measured -= np.concatenate(
        [prior.residual(group.timed_table, group.cell, group.hardware) for group in timed]
    )
    sizes = [len(group.timed) for group in timed]
    weights = _weights(sizes)
    sd, known = prior.step_residual_sd, len(CONSTANTS)
    cells = [(group.cell, group.hardware.name) for group in timed]
    problem = _PredictedSteps(
        models=models, measured=measured, place=np.repeat(np.arange(len(timed)), sizes), sd=sd
    )

    def start(of: Calibration) -> Floats:
        offsets = [of.cell_offsets.get(cell, 0.0) for cell in cells]
        return np.concatenate([of.log_constants, offsets])

    covariance = np.eye(known + len(timed)) * _NO_LIMIT_SD**2
    covariance[:known, :known] = prior.step_covariance
    found = fit(
        problem.residuals,
        mean=start(prior),
        covariance=covariance,
        weights=np.concatenate([weights, np.full(len(timed), CELL_OFFSET_WEIGHT)]),
        slopes_of=problem.slopes,
        begin=start(begin) if begin is not None else None,
    )
    left = found.residuals[: len(measured)] * sd
    offsets = found.parameters[known:].tolist()
    errors = _errors_by_hardware(timed, np.split(-left, np.cumsum(sizes)[:-1]), offsets)
    return replace(
        prior,
        residuals=_with_residuals(prior.residuals, errors),
        errors=errors,
        log_constants=found.parameters[:known],
        step_covariance=found.covariance[:known, :known],
        step_residual_sd=robust_sd(
            left, expected=sd, prior_count=ONE_TRIAL, count=float(weights.sum())
        ),
        cell_offsets={**prior.cell_offsets, **dict(zip(cells, offsets, strict=True))},
        num_times=prior.num_times + len(measured),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _PredictedSteps:
    """What a fit of step times makes small: each error, and the offset of each cell.

    Both are in standard deviations. A fit changes the constants, and after them the offsets: a
    cell's own offset keeps what slows all of it (a slow network) out of the constants.
    """

    models: Sequence[StepTimeModel]
    measured: Floats  # logarithms
    place: Ints  # the cell of each row
    sd: float

    def residuals(self, x: Floats) -> Floats:
        constants, offsets = constants_of(x[: len(CONSTANTS)]), x[len(CONSTANTS) :]
        predicted = np.concatenate([model.seconds(constants).total for model in self.models])
        return np.concatenate(
            [
                (np.log(predicted) + offsets[self.place] - self.measured) / self.sd,
                offsets / CELL_OFFSET_SD,
            ]
        )

    def slopes(self, x: Floats, at: Floats) -> Floats:
        """Return the derivatives at `x`, where the residuals are `at`."""
        known = len(CONSTANTS)

        def of_constants(constants: Floats) -> Floats:
            return self.residuals(np.concatenate([constants, x[known:]]))

        return np.hstack([jacobian(of_constants, x[:known], at), self._of_offsets])

    @cached_property
    def _of_offsets(self) -> Floats:
        """The derivatives by the offsets, which no `x` changes."""
        offsets = np.eye(int(self.place[-1]) + 1)
        return np.vstack([offsets[self.place] / self.sd, offsets / CELL_OFFSET_SD])


def _errors_by_hardware(
    timed: Sequence[CellObservations], errors: Sequence[Floats], offsets: Sequence[float]
) -> dict[str, FitErrors]:
    """Return the errors that a fit left, by the name of the hardware; `timed` is in that order."""
    found = {}
    with_errors = zip(timed, errors, offsets, strict=True)
    for name, same in groupby(with_errors, key=lambda one: _hardware_name(one[0])):
        found[name] = _fit_errors(*zip(*same, strict=True))
    return found


def _with_residuals(
    known: Mapping[str, tuple[Residual, ...]], errors: Mapping[str, FitErrors]
) -> dict[str, tuple[Residual, ...]]:
    """Return the known residuals of each hardware, with that of another fit."""
    found = dict(known)
    for name, one in errors.items():
        # The residual of one cell alone may not hold for others; within it, a search models it row
        # by row (core/search/surrogate.py).
        if len(set(one.cells.tolist())) > 1:
            found[name] = (*found.get(name, ()), Residual.fit(one.places, one.errors))
    return found


def _fit_errors(
    groups: Sequence[CellObservations], errors: Sequence[Floats], offsets: Sequence[float]
) -> FitErrors:
    """The errors that a fit left on one kind of hardware: cell by cell, with the cells' offsets."""
    sizes = [len(group.timed) for group in groups]
    numbers = {cell: n for n, cell in enumerate(dict.fromkeys(group.cell for group in groups))}
    # If two groups are of one cell, the later offset counts for both.
    offset_of = {group.cell: offset for group, offset in zip(groups, offsets, strict=True)}
    spreads = [
        step_spreads(
            group.timed_table, group.cell, group.hardware, gpus_per_node=group.gpus_per_node
        )
        for group in groups
    ]
    return FitErrors(
        places=np.concatenate([places_of(group.timed_table, group.cell) for group in groups]),
        errors=np.concatenate(errors),
        offsets=np.repeat([offset_of[group.cell] for group in groups], sizes),
        cells=np.repeat(np.array([numbers[group.cell] for group in groups], dtype=np.intp), sizes),
        below=np.concatenate([below for below, _ in spreads]),
        above=np.concatenate([above for _, above in spreads]),
    )


def _with_memory(
    prior: Calibration,
    groups: Sequence[CellObservations],
    begin: Calibration | None,
    model: ModelShape | None,
) -> Calibration:
    peaked = [group for group in groups if group.peaked]
    if not peaked:
        return prior
    residuals, censored = _memory_residuals(prior, peaked)
    weights = _memory_weights(peaked, model)
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
            prior_count=ONE_TRIAL,
            count=float(weights[exact].sum()),
        ),
        num_peaks=prior.num_peaks + int(exact.sum()),
        num_out_of_memory=prior.num_out_of_memory + int(censored.sum()),
    )


def _memory_residuals(
    prior: Calibration, groups: Sequence[CellObservations]
) -> tuple[Callable[[Floats], Floats], Mask]:
    """Log predicted over measured, in standard deviations, and which rows are out-of-memories.

    The residual of an out-of-memory is how far the prediction falls short of the limit. Any stage
    may have run out, whichever stage's peak a log shows.
    """
    rows = [row for group in groups for row in group.peaked]
    censored = np.array([row.out_of_memory for row in rows])
    peaks = [row.limit_bytes if row.out_of_memory else row.peak_memory_bytes for row in rows]
    measured = np.log(np.array(peaks, dtype=np.float64))
    # All cells of a model at once: a layout implies its number of GPUs and its batch.
    alike: dict[tuple[ModelShape, int, Stage], list[int]] = {}
    for place, row in enumerate(rows):
        stage = Stage.FULLEST if row.out_of_memory else row.stage
        alike.setdefault((row.cell.model, row.cell.sequence_length, stage), []).append(place)
    parts = [
        (
            peaks_by_trainer(
                LayoutTable.of(rows[place].layout for place in places),
                rows[places[0]].cell,
                prior.base_trainer,
                stage=stage,
            ),
            places,
        )
        for (_, _, stage), places in alike.items()
    ]

    def residuals(values: Floats) -> Floats:
        trainer = trainer_of(prior.base_trainer, values)
        predicted = np.empty(len(rows))
        for peaks_of, places in parts:
            predicted[places] = peaks_of(trainer)
        difference = (np.log(predicted) - measured) / prior.memory_residual_sd
        found: Floats = np.where(censored, np.minimum(difference, 0.0), difference)
        return found

    return residuals, censored


def _weights(sizes: Sequence[int]) -> Floats:
    """Return the weight of each residual: the first few of a cell show most."""
    return np.concatenate([_weights_of(n, CELL_CORRELATION) for n in sizes])


def _weights_of(num: int, correlation: float) -> Floats:
    return np.full(num, 1.0 / (1.0 + (num - 1) * correlation))


def _memory_weights(groups: Sequence[CellObservations], model: ModelShape | None) -> Floats:
    """The same for peaks. All cells of a model count as one: the formula errs alike in them."""
    models = Counter(group.cell.model for group in groups)
    weights = [
        _weights_of(
            len(group.peaked),
            CELL_CORRELATION if group.cell.model == model else MODEL_CORRELATION,
        )
        / models[group.cell.model]
        for group in groups
    ]
    return np.concatenate(weights)


def _hardware_name(group: CellObservations) -> str:
    return group.hardware.name
