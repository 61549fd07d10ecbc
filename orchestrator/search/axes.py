"""The free dimensions of a cell's layouts, as ordered steps with places: near means alike.

Independent dimensions, not one list of layouts: a sampler learns nothing from one category per
layout, and is slow at it. Pure arithmetic, for searcher.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.layout import Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import COLUMNS, LayoutTable
from orchestrator.core.search.lattice import UNKNOWN_LEVEL_SD, Belief, Lattice, LatticeAxis
from orchestrator.core.search.planner import Candidates

# How far an uncalibrated prediction may be off, in the logarithm: its level, per doubling (or step)
# of each axis, and beyond these.
LEVEL_SD, MEMORY_LEVEL_SD = 0.5, 0.15
SLOPE_SDS = {
    "tensor_parallel_size": 0.15,
    "pipeline_parallel_size": 0.15,
    "micro_batch_size": 0.1,
    "zero_stage": 0.1,
    "recompute": 0.1,
}
RESIDUAL_SD, MEMORY_RESIDUAL_SD = 0.2, 0.1
_WORDS = ("precision", "pipeline_schedule")  # axes without order
# The effect of each value of a workload's option, which no formula knows: on the logarithm of a
# step's time, and on that of what layers keep. Eager attention keeps 3 times what flash attention
# keeps, norms in several kernels 1.3 times what fused ones keep.
OPTION_SD, ACTIVATION_OPTION_SD = 0.2, 0.5
# On an unknown device, where only the work of a layout is known.
WORK_RESIDUAL_SD = 0.3


def lattice_of(candidates: Candidates, rows: Ints, *, num_layers: int) -> Lattice:
    """Some candidates as points with beliefs: by their calibration, or else by their predictions.

    Predictions without a calibration are as wide as the constants above.
    """
    table = candidates.table.take(rows)
    axes = all_axes(table, num_layers=num_layers)
    memory_limit = candidates.memory_limit_bytes
    if candidates.predict is not None:
        predicted = candidates.predict(table)
        seconds = Belief(
            mean=predicted.log_step_seconds,
            basis=predicted.step_jacobian,
            covariance=predicted.step_covariance,
            residual_sd=predicted.step_residual_sd,
        )
        memory = Belief(
            mean=np.log(predicted.memory_bytes),
            basis=predicted.memory_basis,
            covariance=predicted.memory_covariance,
            residual_sd=predicted.memory_residual_sd,
        )
        options = [axis for axis in axes if axis.name in table.option_names]
        everywhere = np.ones(len(table))
        return Lattice(
            axes=axes,
            seconds=_with_options(seconds, options, everywhere, OPTION_SD),
            memory=_with_options(memory, options, predicted.activation_share, ACTIVATION_OPTION_SD),
            memory_limit_bytes=memory_limit,
            usable_share=predicted.usable_share,
            options=tuple(axis.name for axis in options),
        )
    work = candidates.relative_work
    return Lattice(
        axes=axes,
        seconds=_belief(candidates.step_seconds[rows], axes, LEVEL_SD, RESIDUAL_SD)
        if work is None
        else _belief(work[rows], axes, UNKNOWN_LEVEL_SD, WORK_RESIDUAL_SD),
        memory=_belief(candidates.memory_bytes[rows], axes, MEMORY_LEVEL_SD, MEMORY_RESIDUAL_SD),
        memory_limit_bytes=memory_limit,
        in_seconds=work is None,
    )


def all_axes(table: LayoutTable, *, num_layers: int) -> tuple[LatticeAxis, ...]:
    """The axes with more than one value, also those that others imply.

    A step's time may depend on an implied one more simply.
    """
    sizes = (_axis(table, name, num_layers) for name in COLUMNS if name != "options")
    options = (_option_axis(table, name) for name in table.option_names)
    return tuple(axis for axis in (*sizes, *options) if len(axis) > 1)


def _with_options(belief: Belief, axes: Sequence[LatticeAxis], shares: Floats, sd: float) -> Belief:
    """The belief, with one more effect for each value of these axes: no formula knows it.

    `shares`: how much of an effect each row shows.
    """
    columns = [shares * (axis.steps == step) for axis in axes for step in range(len(axis))]
    if not columns:
        return belief
    k, extra = len(belief.covariance), len(columns)
    covariance = np.zeros((k + extra, k + extra))
    covariance[:k, :k] = belief.covariance
    covariance[k:, k:] = np.eye(extra) * sd**2
    basis = np.concatenate([belief.basis, np.stack(columns, axis=1)], axis=1)
    return replace(belief, basis=basis, covariance=covariance)


def _belief(
    predicted: Floats, axes: Sequence[LatticeAxis], level_sd: float, residual_sd: float
) -> Belief | None:
    if not len(predicted) or np.isnan(predicted).any():
        return None
    sloping = [axis for axis in axes if axis.name in SLOPE_SDS]
    slopes = (axis.places[axis.steps] - axis.places.min() for axis in sloping)
    basis = np.stack([np.ones(len(predicted)), *slopes], axis=1)
    sds = np.array([level_sd, *(SLOPE_SDS[axis.name] for axis in sloping)])
    return Belief(
        mean=np.log(predicted), basis=basis, covariance=np.diag(sds**2), residual_sd=residual_sd
    )


def free_axes(table: LayoutTable, *, num_layers: int) -> tuple[LatticeAxis, ...]:
    """The axes with more than one value, without those that the others imply.

    The batch and the number of GPUs are fixed in a cell.
    """
    axes = list(all_axes(table, num_layers=num_layers))
    for implied in ("grad_accum_steps", "data_parallel_size"):
        others = [axis for axis in axes if axis.name != implied]
        if len(others) < len(axes) and _num_distinct(others, len(table)) == len(table):
            axes = others
    return tuple(axes)


def _axis(table: LayoutTable, name: str, num_layers: int) -> LatticeAxis:
    values, steps = np.unique(getattr(table, name), return_inverse=True)
    match name:
        case "recompute":
            # Codes are in the order of the sweep file; steps are in the order of what is dropped.
            by_code = np.array([_dropped(table.recomputes[code], num_layers) for code in values])
            order = np.argsort(by_code, kind="stable")
            places, steps = by_code[order], np.argsort(order)[steps]
        case "precision" | "pipeline_schedule" | "zero_stage":
            places = values.astype(np.float64)
        case _:
            places = np.log2(values)
    return LatticeAxis(
        name=name, ordered=name not in _WORDS, steps=steps.astype(np.int64), places=places
    )


def _option_axis(table: LayoutTable, name: str) -> LatticeAxis:
    """One of the workload's options: numbers have an order, words and truth values have none."""
    values = [dict(options).get(name) for options in table.option_sets]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        words = np.array([repr(value) for value in values])
        return LatticeAxis.of_words(name, words[table.options].tolist())
    return LatticeAxis.of(
        name, np.array(numbers)[table.options].tolist(), doublings=min(numbers) > 0
    )


def _dropped(recompute: Recompute, num_layers: int) -> float:
    """Return how much of the activations is dropped: 0 for none, up to 3 for all layers in full.

    In full, their memory shrinks by about three doublings.
    """
    share = recompute.layers_of(num_layers) / num_layers
    if recompute.mode is RecomputeMode.FULL:
        return 3.0 * share
    return 0.5 * share if recompute.policy is SelectivePolicy.ATTENTION else share


def _num_distinct(axes: Sequence[LatticeAxis], num_rows: int) -> int:
    code = np.zeros(num_rows, dtype=np.int64)
    for axis in axes:
        code = code * len(axis) + axis.steps
    return len(np.unique(code))
