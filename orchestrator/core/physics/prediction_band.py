"""The 80 % band of predicted step times: how far they may be off, before anything is measured
and after.

Before, widths come from published spreads and grow with what a layout sends between nodes. After,
the errors of measured cells are compared with these widths, each cell predicted from the others:
their quantiles show how much of the widths is needed. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log2

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.residual import left_out_errors
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.quantile import Z90

# This share of what is measured should lie within the band.
SHARE = 0.8

# Standard deviations of log measured over predicted seconds, before anything is measured.
# Inside a node: rooflines of dense models are 10-25 % off (vTrain, Calculon, torch's estimator
# against torchtitan).
FORMULA_SD = 0.15
# Added on devices that the constants are not known from: their kernels are older, or unknown.
OTHER_DEVICE_SD = 0.3
# Added per doubling of the nodes: `node_congestion` is 0.1, and known to a factor of 2.
NODE_SD = 0.08
# Added: the step is mostly traffic between nodes, whose share of the bandwidth is as uncertain.
TENSOR_ACROSS_NODES_SD = 0.5
# Besides, per doubling of the nodes that a pipeline spans: of published runs 11 % on two nodes, and
# 27 % on up to 8, took more than twice as long as a fit to all of them (the Ultra-Scale Playbook's;
# most of these are pipelines).
PIPELINE_ACROSS_NODES_SD = 0.4
KNOWN_DEVICES = ("a100", "h100", "h200")
# Measured cells whose errors weigh as much as these widths.
ENOUGH_CELLS = 2.0


def step_spreads(
    table: LayoutTable, cell: Cell, hardware: Hardware, *, gpus_per_node: int
) -> tuple[Floats, Floats]:
    """Return spreads of predicted seconds below and above, by layout.

    They are standard deviations of log measured over predicted. Hardware limits how fast a step can
    be; what goes wrong between nodes only slows it. The constants above name the sources.
    """
    doublings = log2(max(cell.num_gpus / gpus_per_node, 1.0))
    is_known = hardware.name.startswith(KNOWN_DEVICES)
    base = FORMULA_SD if is_known else float(np.hypot(FORMULA_SD, OTHER_DEVICE_SD))
    crosses = table.tensor_parallel_size * table.context_parallel_size > gpus_per_node
    tensor = crosses * TENSOR_ACROSS_NODES_SD
    pipeline = (table.pipeline_parallel_size > 1) * PIPELINE_ACROSS_NODES_SD * doublings
    below = np.full(len(table), base)
    above: Floats = np.sqrt(base**2 + (NODE_SD * doublings) ** 2 + tensor**2 + pipeline**2)
    return below, above


@dataclass(frozen=True, kw_only=True, eq=False)
class FitErrors:
    """The errors of a fit on one kind of hardware, row by row: bands follow them."""

    # N x k, where the rows lie (residual.places_of).
    places: Floats
    # N: log measured over predicted seconds, less the cell's own offset.
    errors: Floats
    offsets: Floats  # n: that of the row's cell
    cells: NDArray[np.intp]  # n: which cell it is
    below: Floats  # n: spreads of before
    above: Floats

    @cached_property
    def quantiles_within(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of errors in a measured cell.

        They are in units of the spreads before anything was measured.
        """
        return self._quantiles(np.arange(len(self.errors)), self.errors)

    @cached_property
    def quantiles_across(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of errors in a cell that is not measured.

        Each measured cell is predicted from the others.
        """
        rows, errors = left_out_errors(self.places, self.errors, self.cells)
        return self._quantiles(rows, errors + self.offsets[rows])

    def _quantiles(self, rows: NDArray[np.intp], errors: Floats) -> tuple[float, float]:
        in_spreads = np.where(errors < 0, errors / self.below[rows], errors / self.above[rows])
        _, members = np.unique(self.cells[rows], return_inverse=True)
        weights = 1.0 / np.sqrt(np.bincount(members))[members]  # rows of one cell err alike
        num_cells = len(np.unique(self.cells))
        weight = num_cells / (num_cells + ENOUGH_CELLS)
        low = _quantile(in_spreads, weights, (1 - SHARE) / 2)
        high = _quantile(in_spreads, weights, (1 + SHARE) / 2)
        before = Z90 * (1 - weight)
        return min(weight * low - before, 0.0), max(weight * high + before, 0.0)


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) - 0.5 * weights[order]
    return float(np.interp(share * weights.sum(), below, values[order]))
