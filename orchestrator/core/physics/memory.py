"""Predicted peak memory of one GPU, by part, for many layouts at once (numpy).

Closed forms (docs/measuring.md). For `workloads/llama` they follow a step moment by moment
(llama_memory.py), within 2 % of its live tensors (`memory_allocated`), less the 16 bytes of every
token's ids. For other trainers, tensor, pipeline and ZeRO sharding divide them as the literature
does, and the constants of `Trainer` say what these hold in addition. Symbols: h hidden, k kv width,
f ffn, a heads, s sequence length, V vocabulary, e bytes of an element, T tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np

from orchestrator.core.physics.layout_groups import LayoutGroups
from orchestrator.core.physics.llama_memory import llama_peak
from orchestrator.core.physics.micro_batch_memory import (
    MicroBatchMemory,
    micro_batch,
    traced_micro_batch,
)
from orchestrator.core.physics.stage_peak import StagePeak
from orchestrator.core.physics.stage_rows import StageRows
from orchestrator.core.physics.trainer import MICRO_BATCH_CONSTANTS, Trainer
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout_table import BLOCK_ROWS, LayoutTable

# Weights for which the optimizer step widens bf16 gradients, or gathers shares, at once.
_OPTIMIZER_CHUNK = 1 << 26


class Stage(StrEnum):
    """A pipeline stage: a log may show the first one's memory, and the last may be the fullest."""

    FULLEST = "fullest"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPrediction:
    """Bytes per GPU of one pipeline stage, one entry per layout."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    # Kept for the backward pass by all layers, for every micro-batch in flight.
    activations: Floats
    # On top of them if the loss, or the head's backward, is the fullest moment: logits in fp32 and
    # their gradient.
    loss: Floats
    # On top of them if a layer's recomputation and backward, or the optimizer's step, is; gathered
    # weights.
    workspace: Floats
    reserve: Floats  # of the allocator and other streams

    @property
    def temporaries(self) -> Floats:
        """The bytes that the fullest moment adds to those that wait for the backward pass."""
        return self.loss + self.workspace

    @property
    def total(self) -> Floats:
        """The bytes at the peak: live tensors, and what the trainer's constants add to them."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.loss + self.workspace + self.reserve


def predict_memory(
    table: LayoutTable, cell: Cell, trainer: Trainer, *, stage: Stage = Stage.FULLEST
) -> MemoryPrediction:
    """Predict the parts for every layout of a table, in bytes (arrays of the table's length)."""
    if len(table) > BLOCK_ROWS:
        blocks = [predict_memory(block, cell, trainer, stage=stage) for block in table.blocks()]
        names = [part.name for part in fields(MemoryPrediction)]
        return MemoryPrediction(
            **{name: np.concatenate([getattr(block, name) for block in blocks]) for name in names}
        )
    rows = _rows(table, cell, trainer, last=stage is Stage.LAST)
    found = _predict_stage(rows, _micro_batch(rows))
    parts = _parts(found)
    if stage is Stage.FULLEST and not rows.one_stage.all():
        rows = replace(rows, last=True)
        last = _predict_stage(rows, _micro_batch(rows))
        fuller, of_last = last.total > found.total, _parts(last)
        for part in fields(MemoryPrediction):
            getattr(parts, part.name)[fuller] = getattr(of_last, part.name)[fuller]
    return parts


def predict_peak(
    table: LayoutTable, cell: Cell, trainer: Trainer, *, stage: Stage = Stage.FULLEST
) -> Floats:
    """Return the peak of every layout of a table, in bytes: the total of `predict_memory`."""
    if len(table) > BLOCK_ROWS:
        return np.concatenate(
            [predict_peak(block, cell, trainer, stage=stage) for block in table.blocks()]
        )
    return Peaks(table, cell, trainer, stage=stage).of(trainer)


def peaks_by_trainer(
    table: LayoutTable, cell: Cell, trainer: Trainer, *, stage: Stage = Stage.FULLEST
) -> Callable[[Trainer], Floats]:
    """Return `predict_peak` of a table as a function of a trainer.

    The trainer may differ from this one in `MEMORY_CONSTANTS` alone.
    """
    # What `Peaks` keeps would be too much.
    if len(table) > BLOCK_ROWS:
        return lambda tried: predict_peak(table, cell, tried, stage=stage)
    return Peaks(table, cell, trainer, stage=stage).of


class Peaks:
    """The peaks of one table for one trainer after another, as a fit asks for them.

    The trainers differ in `MEMORY_CONSTANTS` alone. What does not depend on these is computed once.
    """

    def __init__(
        self, table: LayoutTable, cell: Cell, trainer: Trainer, *, stage: Stage = Stage.FULLEST
    ) -> None:
        """The table has at most `BLOCK_ROWS` layouts."""
        rows = _rows(table, cell, trainer, last=stage is Stage.LAST)
        self._stages = [rows]
        if stage is Stage.FULLEST and not rows.one_stage.all():
            self._stages.append(replace(rows, last=True))
        self._micro_batches: dict[tuple[float, ...], list[MicroBatchMemory]] = {}

    def of(self, trainer: Trainer) -> Floats:
        """Return the peak of every layout, in bytes."""
        key = tuple(getattr(trainer, name) for name in MICRO_BATCH_CONSTANTS)
        if key not in self._micro_batches:
            self._micro_batches[key] = self._made(trainer)
        self._stages = [rows.of(trainer) for rows in self._stages]
        total, *others = (
            _predict_stage(rows, one).total
            for rows, one in zip(self._stages, self._micro_batches[key], strict=True)
        )
        for last in others:
            np.copyto(total, last, where=last > total)
        return total

    def _made(self, trainer: Trainer) -> list[MicroBatchMemory]:
        # Constants that it must not depend on would show.
        trainer = replace(
            trainer,
            activation_factor=math.nan,
            pipeline_activation_factor=math.nan,
            gradient_bytes=math.nan,
            optimizer_bytes=math.nan,
            reserve_bytes=math.nan,
        )
        self._stages = [rows.of(trainer) for rows in self._stages]
        return [_micro_batch(rows) for rows in self._stages]


def _rows(table: LayoutTable, cell: Cell, trainer: Trainer, *, last: bool) -> StageRows:
    # What was traced depends on recomputation everywhere.
    groups = LayoutGroups.of(table) if trainer.traced is None else LayoutGroups.alone(table)
    return StageRows(groups=groups, cell=cell, trainer=trainer, last=last)


def _parts(found: StagePeak) -> MemoryPrediction:
    spread, none = found.rows.groups.spread, np.zeros(len(found.rows.groups))
    return MemoryPrediction(
        parameters=spread(found.parameters),
        gradients=spread(found.gradients),
        optimizer=spread(found.optimizer),
        activations=found.activations,
        loss=np.where(found.at_head, found.temporaries, none),
        workspace=np.where(found.at_head, none, found.temporaries),
        reserve=none + found.rows.trainer.reserve_bytes,
    )


def _micro_batch(rows: StageRows) -> MicroBatchMemory:
    traced = rows.trainer.traced
    return micro_batch(rows) if traced is None else traced_micro_batch(rows, traced)


def _predict_stage(rows: StageRows, one: MicroBatchMemory) -> StagePeak:
    trainer = rows.trainer
    if trainer.fully_shards:
        return llama_peak(rows, one)
    mixed, weights, spread = rows.element < 4, rows.weights, rows.groups.spread
    unsharded = (rows.table.zero_stage == 0) & (rows.shards > 1)
    bucketed = np.where(mixed & unsharded, trainer.bucket_bytes, 0.0)
    gradient_bytes = np.where(mixed, trainer.gradient_bytes, 4.0) + bucketed
    factor = np.where(rows.one_stage, trainer.activation_factor, trainer.pipeline_activation_factor)
    activations = one.kept * spread(rows.schedule.in_flight) * spread(factor)
    # No activation is alive in the optimizer's step and at the end of the backward pass.
    end_moment = spread(np.maximum(_stepping(rows), one.end)) - activations
    workspace = np.maximum(one.layer + spread(_gathered_weights(rows)), end_moment)
    head = spread(one.head)
    return StagePeak(
        rows=rows,
        parameters=rows.sharded(
            weights * np.where(mixed, trainer.parameter_bytes, 4.0), zero_stage=3
        ),
        gradients=rows.sharded(weights * gradient_bytes, zero_stage=2),
        # In fp32 the weights are the master.
        optimizer=rows.sharded(
            weights * np.where(mixed, trainer.optimizer_bytes, 8.0), zero_stage=1
        ),
        activations=activations,
        temporaries=np.maximum(workspace, head),
        at_head=head > workspace,
    )


def _stepping(rows: StageRows) -> Floats:
    """The optimizer's step: own gradients of a chunk in fp32, and all its new weights."""
    trainer = rows.trainer
    own = np.where(rows.table.zero_stage >= 1, rows.shards, 1)
    widened = (rows.element < 4) & (trainer.gradient_bytes < 4)
    per_weight = np.where(widened, 4.0, 0.0) / own + np.where(own > 1, rows.element, 0.0)
    stepping: Floats = np.minimum(rows.weights, _OPTIMIZER_CHUNK) * per_weight
    if not trainer.stepping_bytes:
        return stepping
    return np.maximum(stepping, rows.weights * trainer.stepping_bytes / own)


def _gathered_weights(rows: StageRows) -> Floats:
    """The weights that ZeRO 3 gathers to compute with: the units in use, at most what it sharded.

    The embedding may be the largest unit.
    """
    model, table = rows.cell.model, rows.table
    is_gathered = table.zero_stage >= 3
    if not is_gathered.any():
        return np.zeros(len(table))
    largest = max(model.parameters_per_layer, model.vocab_size * model.hidden_size)
    unit = largest / table.tensor_parallel_size
    wanted = rows.trainer.gathered_units * unit * rows.element
    gathered = np.minimum(wanted, rows.weights * rows.element * (1.0 - 1.0 / rows.shards))
    return np.where(is_gathered, gathered, 0.0)
