"""Which layouts of a cell to try first: those predicted fastest; those predicted not to fit come last, and are never dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.calibration import Calibration, Predicted
from orchestrator.core.cell import Cell
from orchestrator.core.hardware import GIB, Hardware
from orchestrator.core.layout_table import Ints, LayoutTable, Mask
from orchestrator.core.memory import predict_memory
from orchestrator.core.space import CellSpace, enumerate_cell
from orchestrator.core.spec import SweepSpec
from orchestrator.core.step_time import predict_step_time
from orchestrator.core.trainer import Trainer
from orchestrator.core.workload_options import AttentionKind, GradientDtype, LlamaOptions, SyntheticOptions, WorkloadOptions

Floats = NDArray[np.float64]

TRIAL_OVERHEAD_SECONDS = 20.0  # start, rendezvous and teardown of a real trial on GPUs, for estimates of cost


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
    predict: Callable[[LayoutTable], Predicted] | None = None  # how sure that is, of some of the layouts; None: on unknown hardware
    relative_work: Floats | None = None  # on unknown hardware: what stands for the time of a step, in no unit

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, kw_only=True, eq=False)
class CellPlan:
    """What a spec means for one cell: its space, counted, and its candidates, ranked."""

    space: CellSpace
    candidates: Candidates


def plan_cell(spec: SweepSpec, cell: Cell, *, hardware: Hardware | None, gpus_per_node: int) -> CellPlan:
    """Enumerate a cell's layouts, and predict and order the legal ones. Raises SpecInvalid for a space too large to list."""
    space = enumerate_cell(spec, cell, gpus_per_node=gpus_per_node)
    candidates = rank_candidates(
        space.legal,
        cell,
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes(spec, hardware),
        gpus_per_node=gpus_per_node,
        trainer=_trainer(spec.workload.options),
    )
    return CellPlan(space=space, candidates=candidates)


def _trainer(options: WorkloadOptions) -> Trainer:
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
        case LlamaOptions(memory_limit_bytes=int(told)) | SyntheticOptions(device_memory_bytes=int(told)):
            return float(told)
    return float(hardware.memory_bytes) if hardware is not None else None


def rank_candidates(
    table: LayoutTable,
    cell: Cell,
    *,
    hardware: Hardware | None,
    memory_limit_bytes: float | None,
    gpus_per_node: int,
    trainer: Trainer,
    calibration: Calibration | None = None,
) -> Candidates:
    """Predict and order a cell's legal layouts. On hardware that the table does not know, times are predicted for no device: by work alone.

    `calibration` is what relatives taught; it takes the trainer's place.
    """
    calibration = calibration or Calibration.prior(trainer)
    memory = predict_memory(table, cell, calibration.trainer).total
    fits = memory <= memory_limit_bytes if memory_limit_bytes is not None else np.ones(len(table), dtype=np.bool_)
    if hardware is None:
        seconds = np.full(len(table), np.nan)
        tokens = np.full(len(table), np.nan)
        rank_by = _work(table, cell)
    else:
        seconds = predict_step_time(table, cell, hardware, gpus_per_node=gpus_per_node, constants=calibration.constants).total
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
        predict=None if hardware is None else partial(_predicted, calibration, cell, hardware, gpus_per_node),
        relative_work=rank_by if hardware is None else None,
    )


def _predicted(calibration: Calibration, cell: Cell, hardware: Hardware, gpus_per_node: int, table: LayoutTable) -> Predicted:
    return calibration.predict(table, cell, hardware, gpus_per_node=gpus_per_node)


def _work(table: LayoutTable, cell: Cell) -> Floats:
    """FLOPs per token with recomputation, a little more for each kernel that small micro-batches make."""
    base = cell.model.flops_per_token(cell.sequence_length)
    extra = np.array([cell.model.recomputed_flops_per_token(cell.sequence_length, r) for r in table.recomputes])[table.recompute]
    work: Floats = base + extra + 0.02 * base * table.grad_accum_steps / table.grad_accum_steps.max(initial=1)
    return work


def gpu_hours(candidates: Candidates, cell: Cell, *, num_trials: int, steps_per_trial: int) -> float | None:
    """GPU-hours that the first trials of the order would hold, start-up included; None on unknown hardware."""
    seconds = candidates.step_seconds[candidates.order[:num_trials]]
    if not len(seconds) or np.isnan(seconds).any():
        return None
    return float((seconds * steps_per_trial + TRIAL_OVERHEAD_SECONDS).sum()) * cell.num_gpus / 3600
