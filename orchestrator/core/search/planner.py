"""Ranks the layouts of a cell: fastest prediction first, those predicted not to fit last.

No layout is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from orchestrator.core.physics.calibration import Calibration, Predicted
from orchestrator.core.physics.memory import predict_peak
from orchestrator.core.physics.trainer import Trainer, llama_trainer, with_options
from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import GIB, UNLIMITED_BYTES, Hardware
from orchestrator.core.problem.layout import Layout, Options
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.search.space import CellSpace, enumerate_cell
from orchestrator.core.sweepfile.spec import OUR_OWN, SweepSpec
from orchestrator.core.sweepfile.synthetic_options import SyntheticOptions
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.sweepfile.workload_section import varied
from orchestrator.core.trial.protocol import Device

# The first layouts of a cell, whose largest uncertainty represents all of them.
NUM_UNCERTAIN = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """The legal layouts of a cell with predictions, n rows each; nan if nothing is known."""

    table: LayoutTable
    tokens_per_second_per_gpu: Floats
    step_seconds: Floats
    memory_bytes: Floats
    memory_limit_bytes: float | None
    fits: Mask  # predicted to fit; True if unknown
    order: Ints  # best first, too large ones last
    # Predictions with their uncertainty for some of the layouts; None on unknown hardware.
    predict: Callable[[LayoutTable], Predicted] | None = None
    # Standard deviations of the logarithm of step times; None on unknown hardware.
    step_sd: Callable[[LayoutTable], Floats] | None = None
    # On unknown hardware: a substitute for the step time, without a unit.
    relative_work: Floats | None = None

    def __len__(self) -> int:
        return len(self.table)

    def step_log_sd(self) -> float | None:
        """Return the largest standard deviation of log step times among the first layouts.

        None if no time is predicted.
        """
        if self.step_sd is None or not len(self):
            return None
        return float(self.step_sd(self.table.take(self.order[:NUM_UNCERTAIN])).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class CellPlan:
    """The space of one cell, counted, and its candidates, ranked."""

    space: CellSpace
    candidates: Candidates


def plan_cell(
    spec: SweepSpec,
    cell: Cell,
    *,
    hardware: Hardware | None,
    gpus_per_node: int,
    device: Device,
    calibration: Calibration | None = None,
    among: Collection[Layout] | None = None,
) -> CellPlan:
    """Enumerate the layouts of a cell, and predict and order the legal ones.

    `device` is what ranks run on if the file says `auto`. `calibration` comes from trials of other
    sweeps; `among` has the layouts of a replayed table.
    Raises SpecInvalid for a space that is too large to list.
    """
    space = enumerate_cell(spec, cell, gpus_per_node=gpus_per_node, among=among)
    candidates = rank_space(
        spec,
        space,
        hardware=hardware,
        gpus_per_node=gpus_per_node,
        device=device,
        calibration=calibration,
    )
    return CellPlan(space=space, candidates=candidates)


def rank_space(
    spec: SweepSpec,
    space: CellSpace,
    *,
    hardware: Hardware | None,
    gpus_per_node: int,
    device: Device,
    calibration: Calibration | None = None,
) -> Candidates:
    """Predict and order the legal layouts of a space. A new calibration needs no new space.

    `device` is what ranks run on if the file says `auto`.
    """
    return rank_candidates(
        space.legal,
        space.cell,
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes(spec, hardware),
        gpus_per_node=gpus_per_node,
        trainer=trainer_of(spec, device=device),
        trainers=[trainer_of(spec, options, device=device) for options in space.legal.option_sets],
        calibration=calibration,
    )


def trainer_of(spec: SweepSpec, varying: Options = (), *, device: Device) -> Trainer:
    """Return what is known of a sweep's trainer before any trial, with a layout's options.

    `device` is what ranks run on if the file says `auto`.
    """
    options = varied(spec.workload.options, varying)
    on_gpu = device is Device.CUDA if spec.device == "auto" else spec.device != "cpu"
    known = (
        llama_trainer(dict(options), on_gpu=on_gpu)
        if isinstance(options, LlamaOptions)
        else Trainer()
    )
    # What a file declares was not counted.
    declared = (
        known if spec.trainer is None else replace(spec.trainer.trainer(known), counted=False)
    )
    return declared if spec.workload.name in OUR_OWN else with_options(declared, dict(varying))


def memory_limit_bytes(spec: SweepSpec, hardware: Hardware | None) -> float | None:
    """Return the memory of one slot: by the file, the workload's options, or the device.

    None if it is unknown.
    """
    if spec.device_memory_gib is not None:
        return spec.device_memory_gib * GIB
    match spec.workload.options:
        case (
            LlamaOptions(memory_limit_bytes=int(told))
            | SyntheticOptions(device_memory_bytes=int(told))
        ):
            return float(told)
    if hardware is None or hardware.memory_bytes >= UNLIMITED_BYTES:
        return None
    return float(hardware.memory_bytes)


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
    """Predict and order a cell's legal layouts. On unknown hardware, order them by work alone.

    A `calibration` replaces the prior of the trainer. `trainers` has the trainer for each of the
    table's option sets, if options that vary change it.
    """
    calibration = calibration or Calibration.prior(trainer)
    trainers = trainers or [trainer] * max(len(table.option_sets), 1)
    by_trainer = {other: adapted(calibration, trainer, other) for other in trainers}
    calibrations = [by_trainer[other] for other in trainers]
    memory, seconds = np.empty(len(table)), np.full(len(table), np.nan)
    for found, part, rows in _by_calibration(calibrations, table):
        if hardware is None:
            memory[rows] = predict_peak(part, cell, found.trainer)
        else:
            seconds[rows], memory[rows] = found.expect(
                part, cell, hardware, gpus_per_node=gpus_per_node
            )
    fits = memory <= (np.inf if memory_limit_bytes is None else memory_limit_bytes)
    predict = step_sd = work = None
    if hardware is None:
        rank_by = work = _work(table, cell)
    else:
        rank_by = seconds
        predict = partial(_predicted, calibrations, cell, hardware, gpus_per_node)
        step_sd = partial(
            calibration.step_log_sd, cell=cell, hardware=hardware, gpus_per_node=gpus_per_node
        )
    # If two do not fit, the smaller comes first: predictions err near the limit.
    excess = np.where(fits, 0.0, memory)
    return Candidates(
        table=table,
        tokens_per_second_per_gpu=cell.tokens_per_step / seconds / cell.num_gpus,
        step_seconds=seconds,
        memory_bytes=memory,
        memory_limit_bytes=memory_limit_bytes,
        fits=fits,
        order=np.lexsort((rank_by, excess)),
        predict=predict,
        step_sd=step_sd,
        relative_work=work,
    )


def adapted(calibration: Calibration, trainer: Trainer, other: Trainer) -> Calibration:
    """Return a trainer's calibration for another trainer: learned corrections are kept."""
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


def _by_calibration(
    calibrations: Sequence[Calibration], table: LayoutTable
) -> list[tuple[Calibration, LayoutTable, Ints]]:
    """Return each distinct calibration with its layouts and their rows."""
    distinct = list(dict.fromkeys(calibrations))
    if len(distinct) == 1:
        return [(distinct[0], table, np.arange(len(table)))]
    code = np.array([distinct.index(each) for each in calibrations], dtype=np.int64)[table.options]
    rows_of = [(found, np.flatnonzero(code == number)) for number, found in enumerate(distinct)]
    return [(found, table.take(rows), rows) for found, rows in rows_of if len(rows)]


def _predicted(
    calibrations: Sequence[Calibration],
    cell: Cell,
    hardware: Hardware,
    gpus_per_node: int,
    table: LayoutTable,
) -> Predicted:
    parts = [
        (found.predict(part, cell, hardware, gpus_per_node=gpus_per_node), rows)
        for found, part, rows in _by_calibration(calibrations, table)
    ]
    if len(parts) == 1:
        return parts[0][0]
    # Sorts the concatenated parts into the order of the table.
    back = np.argsort(np.concatenate([rows for _, rows in parts]))
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
    """Return FLOPs per token with recomputation, and a little more if micro-batches are small."""
    base = cell.model.flops_per_token(cell.sequence_length)
    extra = [
        cell.model.recomputed_flops_per_token(cell.sequence_length, r) for r in table.recomputes
    ]
    kernels = 0.02 * base * table.grad_accum_steps / table.grad_accum_steps.max(initial=1)
    work: Floats = base + np.array(extra)[table.recompute] + kernels
    return work
