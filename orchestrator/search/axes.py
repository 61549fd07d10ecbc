"""The free dimensions of a cell's layouts, as ordered steps with places in a space where near means alike. Pure arithmetic, for searcher.py.

Independent dimensions, not one list of layouts: a sampler learns nothing from one category per layout, and is slow at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from orchestrator.core.problem.layout import Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import COLUMNS, LayoutTable
from orchestrator.core.search.lattice import UNKNOWN_LEVEL_SD, Axis, Belief, Floats, Ints, Lattice
from orchestrator.core.search.planner import Candidates

# What an uncalibrated prediction may be off by, in the logarithm: its level, and per doubling (or step) of each axis.
LEVEL_SD, MEMORY_LEVEL_SD = 0.5, 0.15
SLOPE_SDS = {
    "tensor_parallel_size": 0.15,
    "pipeline_parallel_size": 0.15,
    "micro_batch_size": 0.1,
    "zero_stage": 0.1,
    "recompute": 0.1,
}
RESIDUAL_SD, MEMORY_RESIDUAL_SD = 0.2, 0.1  # beyond these
OPTION_SD, MEMORY_OPTION_SD = (
    0.2,
    0.15,
)  # of each value of an option of the workload, whose effect no formula knows
WORK_RESIDUAL_SD = 0.3  # where only the work of a layout is known, on a device of which nothing is


def lattice_of(candidates: Candidates, rows: Ints, *, num_layers: int) -> Lattice:
    """Some candidates as points with beliefs: what their calibration says of them, else their predictions with what such are off by."""
    table = candidates.table.take(rows)
    axes = all_axes(table, num_layers=num_layers)
    memory_limit = candidates.memory_limit_bytes
    if candidates.predict is not None:
        predicted = candidates.predict(table)
        timed = Belief(
            mean=predicted.log_step_seconds,
            basis=predicted.step_jacobian,
            covariance=predicted.step_covariance,
            residual_sd=predicted.step_residual_sd,
        )
        filled = Belief(
            mean=np.log(predicted.memory_bytes),
            basis=predicted.memory_jacobian,
            covariance=predicted.memory_covariance,
            residual_sd=predicted.memory_residual_sd,
        )
        silent = [axis for axis in axes if axis.name in table.option_names]
        return Lattice(
            axes=axes,
            seconds=_with_options(timed, silent, OPTION_SD),
            memory=_with_options(filled, silent, MEMORY_OPTION_SD),
            memory_limit_bytes=memory_limit,
        )
    if candidates.relative_work is not None:
        seconds = _belief(
            candidates.relative_work[rows],
            axes,
            level_sd=UNKNOWN_LEVEL_SD,
            residual_sd=WORK_RESIDUAL_SD,
        )
    else:
        seconds = _belief(
            candidates.step_seconds[rows], axes, level_sd=LEVEL_SD, residual_sd=RESIDUAL_SD
        )
    memory = _belief(
        candidates.memory_bytes[rows],
        axes,
        level_sd=MEMORY_LEVEL_SD,
        residual_sd=MEMORY_RESIDUAL_SD,
    )
    return Lattice(
        axes=axes,
        seconds=seconds,
        memory=memory,
        memory_limit_bytes=memory_limit,
        in_seconds=candidates.relative_work is None,
    )


def all_axes(table: LayoutTable, *, num_layers: int) -> tuple[Axis, ...]:
    """The axes with more than one value. Also those that others imply: a step's time may answer more simply to them."""
    sizes = (_axis(table, name, num_layers) for name in COLUMNS if name != "options")
    options = (_option_axis(table, name) for name in table.option_names)
    return tuple(axis for axis in (*sizes, *options) if len(axis) > 1)


def _with_options(belief: Belief, axes: Sequence[Axis], sd: float) -> Belief:
    """The belief, with an effect of its own for each value of the axes that no formula knows."""
    columns = [axis.steps == step for axis in axes for step in range(len(axis))]
    if not columns:
        return belief
    k, extra = len(belief.covariance), len(columns)
    covariance = np.zeros((k + extra, k + extra))
    covariance[:k, :k] = belief.covariance
    covariance[k:, k:] = np.eye(extra) * sd**2
    basis = np.concatenate([belief.basis, np.stack(columns, axis=1).astype(np.float64)], axis=1)
    return replace(belief, basis=basis, covariance=covariance)


def _belief(
    predicted: Floats, axes: Sequence[Axis], *, level_sd: float, residual_sd: float
) -> Belief | None:
    if not len(predicted) or np.isnan(predicted).any():
        return None
    sloping = [axis for axis in axes if axis.name in SLOPE_SDS]
    basis = np.stack(
        [
            np.ones(len(predicted)),
            *(axis.places[axis.steps] - axis.places.min() for axis in sloping),
        ],
        axis=1,
    )
    sds = np.array([level_sd, *(SLOPE_SDS[axis.name] for axis in sloping)])
    return Belief(
        mean=np.log(predicted), basis=basis, covariance=np.diag(sds**2), residual_sd=residual_sd
    )


def free_axes(table: LayoutTable, *, num_layers: int) -> tuple[Axis, ...]:
    """The axes with more than one value, without those that the others imply: the batch and the number of GPUs are fixed in a cell."""
    axes = list(all_axes(table, num_layers=num_layers))
    for implied in ("grad_accum_steps", "data_parallel_size"):
        others = [axis for axis in axes if axis.name != implied]
        if len(others) < len(axes) and _num_distinct(others, len(table)) == len(table):
            axes = others
    return tuple(axes)


def _axis(table: LayoutTable, name: str, num_layers: int) -> Axis:
    values, steps = np.unique(getattr(table, name), return_inverse=True)
    match name:
        case "recompute":
            # The codes come in the order of the sweep file; steps go by what is dropped.
            by_code = np.array(
                [_dropped(table.recomputes[int(code)], num_layers) for code in values],
                dtype=np.float64,
            )
            order = np.argsort(by_code, kind="stable")
            places, steps = by_code[order], np.argsort(order)[steps]
        case "precision" | "zero_stage":
            places = values.astype(np.float64)
        case _:
            places = np.log2(values)
    return Axis(name=name, ordered=name != "precision", steps=steps.astype(np.int64), places=places)


def _option_axis(table: LayoutTable, name: str) -> Axis:
    """One of the workload's options: numbers lie in order, words and truth values do not."""
    values = [dict(options).get(name) for options in table.option_sets]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        words = np.array([repr(value) for value in values])
        return Axis.of_words(name, words[table.options].tolist())
    return Axis.of(name, np.array(numbers)[table.options].tolist(), doublings=min(numbers) > 0)


def _dropped(recompute: Recompute, num_layers: int) -> float:
    """How much of the activations is dropped: 0 for none, up to 3 for all layers in full (their memory shrinks by about three doublings)."""
    share = recompute.layers_of(num_layers) / num_layers
    if recompute.mode is RecomputeMode.FULL:
        return 3.0 * share
    return 0.5 * share if recompute.policy is SelectivePolicy.ATTENTION else share


def _num_distinct(axes: Sequence[Axis], num_rows: int) -> int:
    code = np.zeros(num_rows, dtype=np.int64)
    for axis in axes:
        code = code * len(axis) + axis.steps
    return len(np.unique(code))
