"""Which layouts of a cell to try first: those predicted fastest; those predicted not to fit come last, and are never dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.calibration import Calibration, Predicted
from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import GIB, UNLIMITED_BYTES, Hardware
from orchestrator.core.problem.layout import Layout, Options
from orchestrator.core.problem.layout_table import Ints, LayoutTable, Mask
from orchestrator.core.search.space import CellSpace, enumerate_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.synthetic_options import SyntheticOptions
from orchestrator.core.sweepfile.workload_options import (
    AttentionKind,
    GradientDtype,
    LlamaOptions,
    WorkloadOptions,
)
from orchestrator.core.sweepfile.workload_section import varied

Floats = NDArray[np.float64]

STEPS_LOOKED_AT = 64  # first layouts of a cell, whose uncertainty stands for all of its steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """The legal layouts of a cell with what is predicted of them: n rows each; nan where nothing is known."""

    table: LayoutTable
    tokens_per_second_per_gpu: Floats
    step_seconds: Floats
    memory_bytes: Floats
    memory_limit_bytes: float | None
    fits: Mask  # predicted to fit; True where unknown
    order: Ints  # rows, best prediction first, those predicted not to fit last
    predict: Callable[[LayoutTable], Predicted] | None = (
        None  # how sure that is, of some of the layouts; None: on unknown hardware
    )
    step_sd: Callable[[LayoutTable], Floats] | None = (
        None  # standard deviations of the logarithm of their steps
    )
    relative_work: Floats | None = (
        None  # on unknown hardware: what stands for the time of a step, in no unit
    )

    def __len__(self) -> int:
        return len(self.table)

    def step_log_sd(self) -> float | None:
        """The standard deviation of the logarithm of predicted steps: that of the most uncertain of the first layouts.

        None where no time is predicted.
        """
        if self.predict is None or self.step_sd is None or not len(self):
            return None
        return float(self.step_sd(self.table.take(self.order[:STEPS_LOOKED_AT])).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class CellPlan:
    """What a spec means for one cell: its space, counted, and its candidates, ranked."""

    space: CellSpace
    candidates: Candidates


def plan_cell(
    spec: SweepSpec,
    cell: Cell,
    *,
    hardware: Hardware | None,
    gpus_per_node: int,
    calibration: Calibration | None = None,
    among: Collection[Layout] | None = None,
) -> CellPlan:
    """Enumerate a cell's layouts, and predict and order the legal ones, by what is known of the workload or what relatives taught.

    Raises SpecInvalid for a space too large to list. `among`: all that can be run, where a table of runs is replayed.
    """
    space = enumerate_cell(spec, cell, gpus_per_node=gpus_per_node, among=among)
    candidates = rank_candidates(
        space.legal,
        cell,
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes(spec, hardware),
        gpus_per_node=gpus_per_node,
        trainer=trainer_of(spec),
        trainers=[trainer_of(spec, options) for options in space.legal.option_sets],
        calibration=calibration,
    )
    return CellPlan(space=space, candidates=candidates)


def trainer_of(spec: SweepSpec, varying: Options = ()) -> Trainer:
    """What is known of a sweep's trainer before anything is measured, with the options of a layout that vary."""
    known = _trainer_of_workload(varied(spec.workload.options, varying))
    return known if spec.trainer is None else spec.trainer.trainer(known)


def _trainer_of_workload(options: WorkloadOptions) -> Trainer:
    if not isinstance(options, LlamaOptions):
        return Trainer()
    return Trainer(
        gradient_bytes=6.0 if options.gradient_dtype is GradientDtype.FP32 else 2.0,
        eager_attention=options.attention is AttentionKind.EAGER,
    )


def memory_limit_bytes(spec: SweepSpec, hardware: Hardware | None) -> float | None:
    """The memory of one slot: what the file says, what the workload was told to obey, or the device's own; None: unknown."""
    if spec.device_memory_gib is not None:
        return spec.device_memory_gib * GIB
    match spec.workload.options:
        case (
            LlamaOptions(memory_limit_bytes=int(told))
            | SyntheticOptions(device_memory_bytes=int(told))
        ):
            return float(told)
    return (
        float(hardware.memory_bytes)
        if hardware is not None and hardware.memory_bytes < UNLIMITED_BYTES
        else None
    )


def rank_candidates(
    table: LayoutTable,
    cell: Cell,
    *,
    hardware: Hardware | None,
    memory_limit_bytes: float | None,
    gpus_per_node: int,
    trainer: Trainer,
    trainers: Sequence[Trainer] = (),
    calibration: Calibration | None = None,
) -> Candidates:
    """Predict and order a cell's legal layouts. On hardware that the table does not know, times are predicted for no device: by work alone.

    `calibration` is what relatives taught; it takes the trainer's place. `trainers`: what `trainer` becomes by each of the table's sets of
    options that vary, where that matters.
    """
    calibration = calibration or Calibration.prior(trainer)
    trainers = trainers or [trainer] * max(len(table.option_sets), 1)
    by_trainer = {other: adapted(calibration, trainer, other) for other in trainers}
    calibrations = [by_trainer[other] for other in trainers]
    memory = np.empty(len(table))
    for found, alike, rows in _alike(calibrations, table):
        memory[rows] = predict_memory(alike, cell, found.trainer).total
    fits = (
        memory <= memory_limit_bytes
        if memory_limit_bytes is not None
        else np.ones(len(table), dtype=np.bool_)
    )
    if hardware is None:
        seconds = np.full(len(table), np.nan)
        tokens = np.full(len(table), np.nan)
        rank_by = _work(table, cell)
    else:
        seconds = predict_step_time(
            table, cell, hardware, gpus_per_node=gpus_per_node, constants=calibration.constants
        ).total
        seconds = seconds * np.exp(calibration.log_correction(table, cell, hardware))
        tokens = cell.tokens_per_step / seconds / cell.num_gpus
        rank_by = seconds
    # Of two that cannot fit, the one that lacks less comes first: predictions err at the edge.
    excess = np.where(fits, 0.0, memory)
    return Candidates(
        table=table,
        tokens_per_second_per_gpu=tokens,
        step_seconds=seconds,
        memory_bytes=memory,
        memory_limit_bytes=memory_limit_bytes,
        fits=fits,
        order=np.lexsort((rank_by, excess)),
        predict=None
        if hardware is None
        else partial(_predicted, calibrations, cell, hardware, gpus_per_node),
        step_sd=None
        if hardware is None
        else partial(
            calibration.step_log_sd, cell=cell, hardware=hardware, gpus_per_node=gpus_per_node
        ),
        relative_work=rank_by if hardware is None else None,
    )


def adapted(calibration: Calibration, trainer: Trainer, other: Trainer) -> Calibration:
    """The calibration of a trainer for what options make of it: what was learned of its constants stands, by as much as they were off."""
    if other == trainer:
        return calibration
    differing = {
        f.name: getattr(other, f.name)
        for f in fields(Trainer)
        if getattr(other, f.name) != getattr(trainer, f.name)
    }
    shift = Calibration.prior(other).memory_values - Calibration.prior(trainer).memory_values
    return replace(
        calibration,
        base_trainer=replace(calibration.base_trainer, **differing),
        memory_values=calibration.memory_values + shift,
    )


def _alike(
    calibrations: Sequence[Calibration], table: LayoutTable
) -> list[tuple[Calibration, LayoutTable, Ints]]:
    """The layouts of each calibration, and their rows: one for all of them where no option that varies changes the trainer."""
    distinct = list(dict.fromkeys(calibrations))
    if len(distinct) == 1:
        return [(distinct[0], table, np.arange(len(table)))]
    code = np.array([distinct.index(each) for each in calibrations], dtype=np.int64)[table.options]
    by_calibration = [
        (found, np.flatnonzero(code == number)) for number, found in enumerate(distinct)
    ]
    return [(found, table.take(rows), rows) for found, rows in by_calibration if len(rows)]


def _predicted(
    calibrations: Sequence[Calibration],
    cell: Cell,
    hardware: Hardware,
    gpus_per_node: int,
    table: LayoutTable,
) -> Predicted:
    parts = [
        (found.predict(alike, cell, hardware, gpus_per_node=gpus_per_node), rows)
        for found, alike, rows in _alike(calibrations, table)
    ]
    if len(parts) == 1:
        return parts[0][0]
    back = np.argsort(
        np.concatenate([rows for _, rows in parts])
    )  # of the parts behind each other, the rows in the table's order
    by_row: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part, _ in parts])[back] for name in _BY_ROW
    }
    return replace(parts[0][0], **by_row)


_BY_ROW = (
    "log_step_seconds",
    "log_step_sd",
    "step_jacobian",
    "memory_bytes",
    "memory_relative_sd",
    "memory_jacobian",
    "step_below",
    "step_above",
)


def _work(table: LayoutTable, cell: Cell) -> Floats:
    """FLOPs per token with recomputation, a little more for each kernel that small micro-batches make."""
    base = cell.model.flops_per_token(cell.sequence_length)
    extra = np.array(
        [cell.model.recomputed_flops_per_token(cell.sequence_length, r) for r in table.recomputes]
    )[table.recompute]
    work: Floats = (
        base + extra + 0.02 * base * table.grad_accum_steps / table.grad_accum_steps.max(initial=1)
    )
    return work
