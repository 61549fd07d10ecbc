"""Explains a layout: why it is illegal, its memory and time by part, and small changes that help.

A change is a choice that a person makes: `data_parallel_size` and `grad_accum_steps` follow from
the other choices, the GPUs and the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields

import numpy as np

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.memory import MemoryPrediction, predict_memory
from orchestrator.core.physics.step_time import StepTimePrediction, predict_step_time
from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import COLUMNS, LayoutTable
from orchestrator.core.search.expectation import chance_within
from orchestrator.core.search.planner import CellPlan

FOLLOWING = ("data_parallel_size", "grad_accum_steps")
CHOICES = tuple(name for name in COLUMNS if name not in FOLLOWING)
MEMORY_PARTS = tuple(f.name for f in fields(MemoryPrediction))
STEP_PARTS = tuple(f.name for f in fields(StepTimePrediction))
SMALLEST_GAIN = 0.005  # of the step's time
MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChange:
    """Another layout, its differences, and its predicted time and memory. Unknown is None."""

    layout: Layout
    differs: Mapping[str, tuple[object, object]]  # name -> (here, there)
    step_seconds: float | None
    memory_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The predictions for one layout of a cell, by part."""

    cell: Cell
    layout: Layout
    illegal: str | None  # the rule that it breaks
    nearest: tuple[LayoutChange, ...]  # legal ones, if it is illegal
    memory_by_part: Mapping[str, float]
    memory_limit_bytes: float | None
    memory_relative_sd: float | None
    # Factors on the bytes; four of five peaks should lie between them.
    memory_band: tuple[float, float] | None
    probability_of_fitting: float | None
    to_fit: LayoutChange | None  # smallest change, if it does not
    seconds_by_part: Mapping[str, float] | None  # None: no time is predicted
    # Factors on the seconds; four of five measurements should lie between them.
    step_band: tuple[float, float] | None
    # FLOP/s of one GPU at the layout's precision; None: unknown.
    peak_flops: float | None
    # Faster layouts with one choice changed that are predicted to fit, the fastest first.
    faster: tuple[LayoutChange, ...]

    @property
    def memory_bytes(self) -> float:
        """The predicted peak of one GPU."""
        return sum(self.memory_by_part.values())

    @property
    def fits(self) -> bool:
        """True if the peak is predicted to stay within the limit, or no limit is known."""
        return self.memory_limit_bytes is None or self.memory_bytes <= self.memory_limit_bytes

    @property
    def step_seconds(self) -> float | None:
        """The predicted seconds of a step. None on an unknown device."""
        return sum(self.seconds_by_part.values()) if self.seconds_by_part is not None else None

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """The predicted speed. None on an unknown device."""
        seconds = self.step_seconds
        return None if seconds is None else self.cell.tokens_per_second_per_gpu(seconds)

    @property
    def mfu(self) -> float | None:
        """The predicted model FLOPs utilisation, 0 to 1. None: the peak FLOP/s are unknown."""
        tokens, cell = self.tokens_per_second_per_gpu, self.cell
        if tokens is None or self.peak_flops is None:
            return None
        return tokens * cell.model.flops_per_token(cell.sequence_length) / self.peak_flops


def explain(
    planned: CellPlan,
    layout: Layout,
    *,
    illegal: str | None,
    calibration: Calibration,
    hardware: Hardware | None,
    gpus_per_node: int,
) -> Explanation:
    """Explain a layout among the candidates of its cell, by the calibration of its options.

    `illegal` is the rule that it breaks: `CellSpace.reason` refuses values that the axes lack, and
    `broken_rule` does not.
    """
    # Formulas of a layout that cannot be may divide by zero: its numbers are then undefined.
    with nullcontext() if illegal is None else np.errstate(all="ignore"):
        return _explained(planned, layout, illegal, calibration, hardware, gpus_per_node)


def _explained(
    planned: CellPlan,
    layout: Layout,
    illegal: str | None,
    calibration: Calibration,
    hardware: Hardware | None,
    gpus_per_node: int,
) -> Explanation:
    candidates, cell = planned.candidates, planned.space.cell
    table, limit = LayoutTable.of([layout]), candidates.memory_limit_bytes
    seconds = predicted = fits = None
    memory = predict_memory(table, cell, calibration.trainer)
    by_part = {part: float(getattr(memory, part)[0]) for part in MEMORY_PARTS}
    if hardware is not None:
        steps = predict_step_time(
            table,
            cell,
            hardware,
            gpus_per_node=gpus_per_node,
            constants=calibration.constants,
            trainer=calibration.trainer,
        )
        correction = float(np.exp(calibration.log_correction(table, cell, hardware)[0]))
        seconds = {part: float(getattr(steps, part)[0]) * correction for part in STEP_PARTS}
        predicted = calibration.predict(table, cell, hardware, gpus_per_node=gpus_per_node)
    if limit is not None:
        fits = float(chance_within(limit, memory.total, predicted=predicted)[0])
    too_large = limit is not None and sum(by_part.values()) > limit
    faster: tuple[LayoutChange, ...] = ()
    if illegal is None and seconds is not None:
        faster = _faster(planned, layout, sum(seconds.values()))
    return Explanation(
        cell=cell,
        layout=layout,
        illegal=illegal,
        nearest=_nearest(planned, layout) if illegal is not None else (),
        memory_by_part=by_part,
        memory_limit_bytes=limit,
        memory_relative_sd=None if predicted is None else float(predicted.memory_relative_sd[0]),
        memory_band=None if predicted is None else _first(predicted.memory_band()),
        probability_of_fitting=fits,
        to_fit=_to_fit(planned, layout) if too_large else None,
        seconds_by_part=seconds,
        step_band=None if predicted is None else _first(predicted.step_band()),
        peak_flops=None if hardware is None else hardware.peak_flops.get(layout.precision),
        faster=faster,
    )


def _first(band: tuple[Floats, Floats]) -> tuple[float, float]:
    low, high = band
    return float(low[0]), float(high[0])


def _nearest(planned: CellPlan, layout: Layout) -> tuple[LayoutChange, ...]:
    """Return legal layouts by the fewest choices changed, fewest doublings, best prediction."""
    table = planned.candidates.table
    keys = (_rank(planned), _doublings(table, layout), _num_changes(table, layout))
    rows = np.lexsort(keys)[:MAX_SHOWN]  # by the last key first
    return tuple(_change(planned, layout, int(row)) for row in rows)


def _to_fit(planned: CellPlan, layout: Layout) -> LayoutChange | None:
    """Return the layout with the fewest choices changed that fits; of equals, the fastest."""
    candidates = planned.candidates
    rows = np.flatnonzero(candidates.fits)
    if not len(rows):
        return None
    best = rows[np.lexsort((_rank(planned)[rows], _num_changes(candidates.table, layout)[rows]))[0]]
    return _change(planned, layout, int(best))


def _faster(planned: CellPlan, layout: Layout, seconds: float) -> tuple[LayoutChange, ...]:
    candidates = planned.candidates
    better = candidates.step_seconds < seconds * (1 - SMALLEST_GAIN)
    rows = np.flatnonzero(candidates.fits & better & (_num_changes(candidates.table, layout) == 1))
    rows = rows[np.argsort(candidates.step_seconds[rows], kind="stable")][:MAX_SHOWN]
    return tuple(_change(planned, layout, int(row)) for row in rows)


def _rank(planned: CellPlan) -> Ints:
    order = planned.candidates.order
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _num_changes(table: LayoutTable, layout: Layout) -> Ints:
    """Count the choices in which each row differs; one if only what follows from them differs."""
    choices: Ints = np.stack([_differs(table, layout, name) for name in CHOICES]).sum(axis=0)
    following = np.stack([_differs(table, layout, name) for name in FOLLOWING]).any(axis=0)
    found: Ints = np.where((choices == 0) & following, 1, choices)
    return found


def _differs(table: LayoutTable, layout: Layout, name: str) -> Mask:
    column: Ints = getattr(table, name)
    value = getattr(layout, name)
    coded: Mapping[str, tuple[object, ...]] = {
        "pipeline_schedule": table.pipeline_schedules,
        "recompute": table.recomputes,
        "precision": table.precisions,
        "options": table.option_sets,
    }
    if name not in coded:
        return np.asarray(column != value)
    return np.array([other != value for other in coded[name]], dtype=np.bool_)[column]


def _doublings(table: LayoutTable, layout: Layout) -> Floats:
    """Sum over the chosen sizes of how often each is doubled or halved."""
    sizes = [name for name in CHOICES if name.endswith("_size")]
    ratios = [getattr(table, name) / getattr(layout, name) for name in sizes]
    found: Floats = np.abs(np.log2(ratios)).sum(axis=0)
    return found


def _change(planned: CellPlan, layout: Layout, row: int) -> LayoutChange:
    candidates = planned.candidates
    other = candidates.table.layout(row)
    seconds = float(candidates.step_seconds[row])
    return LayoutChange(
        layout=other,
        differs={
            name: (getattr(layout, name), getattr(other, name))
            for name in COLUMNS
            if getattr(layout, name) != getattr(other, name)
        },
        step_seconds=None if np.isnan(seconds) else seconds,
        memory_bytes=float(candidates.memory_bytes[row]),
        fits=bool(candidates.fits[row]),
    )
