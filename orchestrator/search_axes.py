"""The free dimensions of a cell's layouts, as ordered steps with places in a space where near means alike. Pure arithmetic, for searcher.py.

Independent dimensions, not one list of layouts: a sampler learns nothing from one category per layout, and is slow at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.layout import Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.layout_table import COLUMNS, Ints, LayoutTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Axis:
    """One dimension: its distinct values as steps 0..k-1, and where they lie, in doublings of what they stand for."""

    name: str
    ordered: bool
    steps: Ints  # of each row
    places: Floats  # of each step

    def __len__(self) -> int:
        return len(self.places)


def free_axes(table: LayoutTable, *, num_layers: int) -> tuple[Axis, ...]:
    """The axes with more than one value, without those that the others imply: the batch and the number of GPUs are fixed in a cell."""
    axes = [axis for name in COLUMNS if len(axis := _axis(table, name, num_layers)) > 1]
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
            by_code = np.array([_dropped(table.recomputes[int(code)], num_layers) for code in values], dtype=np.float64)
            order = np.argsort(by_code, kind="stable")
            places, steps = by_code[order], np.argsort(order)[steps]
        case "precision" | "zero_stage":
            places = values.astype(np.float64)
        case _:
            places = np.log2(values)
    return Axis(name=name, ordered=name != "precision", steps=steps.astype(np.int64), places=places)


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
