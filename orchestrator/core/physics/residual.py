"""Learns what the formula of step time missed in measured cells, for others: a Gaussian process
over sizes (numpy).

A formula that misses a kind of layout (kernels of one shape, groups of one size) misses it in
related cells too, whatever its constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.step_work import element_bytes
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout_table import LayoutTable

# What the formula is believed to miss before anything is measured, in log seconds.
SD = 0.2
# Doublings of a size: farther apart, layouts share less than a third of the errors.
LENGTH = 3.0
NOISE_SD = 0.1  # of one run without repeats
# Runs that are fitted, an even spread over all: the fit is cubic in them, a prediction linear.
MOST = 1_000
PASSES = 4  # of reweighting
_ROWS = 4_096  # predicted at once
# Steps that are no doublings, in doublings: a stage of ZeRO, a recomputed forward pass (a third of
# the FLOPs), another hidden size.
_ZERO_STAGE, _RECOMPUTED, _HIDDEN = 2.0, 6.0, 1.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual:
    """Log measured over predicted, as a function of a layout and its cell."""

    # N x k, of the fitted runs.
    places: Floats
    weights: Floats

    @classmethod
    def fit(cls, places: Floats, errors: Floats) -> Residual:
        """Fit log measured over predicted of some runs.

        One far off its neighbours counts for less: it was disturbed, most likely.
        """
        rows = _spread(len(errors))
        places, errors = places[rows], errors[rows]
        return cls(places=places, weights=_solved(_covariance(places, places), errors)[0])

    def at(self, places: Floats) -> Floats:
        """Return the expected log measured over predicted at n places (n x k), n."""
        blocks = [
            _covariance(places[start : start + _ROWS], self.places) @ self.weights
            for start in range(0, len(places), _ROWS)
        ]
        return np.concatenate(blocks) if blocks else np.zeros(0)


def left_out_errors(
    places: Floats, errors: Floats, cells: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Floats]:
    """Return an even selection of rows, and their errors by the other cells alone.

    Each cell is predicted from the others. The error of a Gaussian process in rows B that it has
    not seen is (K^-1 in B)^-1 (K^-1 errors) in B. A single cell keeps its errors.
    """
    rows = _spread(len(errors))
    places, errors, cells = places[rows], errors[rows], cells[rows]
    if len(np.unique(cells)) < 2:
        return rows, errors
    covariance = _covariance(places, places)
    weights, noise = _solved(covariance, errors)
    inverse = np.linalg.inv(covariance + np.diag(noise))
    left = np.empty(len(errors))
    for cell in np.unique(cells):
        mine = np.flatnonzero(cells == cell)
        left[mine] = np.linalg.solve(inverse[np.ix_(mine, mine)], weights[mine])
    return rows, left


def _spread(num: int) -> NDArray[np.intp]:
    return np.linspace(0, num - 1, min(num, MOST)).astype(np.intp)


def _solved(covariance: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """Weights of the errors, and their noise: an error far off its neighbours has more."""
    left, weights, noise = errors, np.zeros(len(errors)), np.zeros(len(errors))
    for _ in range(PASSES):
        noise = NOISE_SD**2 + (left / 2.0) ** 2
        weights = np.asarray(np.linalg.solve(covariance + np.diag(noise), errors), dtype=np.float64)
        left = errors - covariance @ weights
    return weights, noise


def places_of(table: LayoutTable, cell: Cell) -> Floats:
    """Return the places of a cell's layouts among those of all cells: n x k, in doublings."""
    model, length = cell.model, cell.sequence_length
    shares = [
        model.recomputed_flops_per_token(length, r) / model.flops_per_token(length)
        for r in table.recomputes
    ]
    doubled = (
        table.data_parallel_size,
        table.tensor_parallel_size,
        table.pipeline_parallel_size,
        table.context_parallel_size,
        table.micro_batch_size * length,
        table.grad_accum_steps,
        element_bytes(table),
        np.full(len(table), model.num_layers),
    )
    return np.column_stack(
        [
            *np.log2(np.array(doubled, dtype=np.float64)),
            _ZERO_STAGE * table.zero_stage,
            _RECOMPUTED * np.array(shares)[table.recompute],
            np.full(len(table), _HIDDEN * np.log2(model.hidden_size)),
        ]
    )


def _covariance(some: Floats, others: Floats) -> Floats:
    squared = (some**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2.0 * some @ others.T
    covariance: Floats = SD**2 * np.exp(-np.sqrt(np.maximum(squared, 0.0)) / LENGTH)
    return covariance
