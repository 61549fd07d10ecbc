"""Layouts on one rank of their first or last pipeline stage: its layers, weights and tokens.

They depend on recomputation in few places (layout_groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchestrator.core.physics.layout_groups import LayoutGroups
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.pipeline_schedule import ScheduleKind

# fp8 products still keep bf16 activations.
ELEMENT_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class StageRows:
    """The layouts of a table, on one rank of their first or last pipeline stage.

    Columns have one entry for each group of layouts, unless they say otherwise.
    """

    groups: LayoutGroups
    cell: Cell
    trainer: Trainer
    last: bool

    def of(self, trainer: Trainer) -> StageRows:
        """Return the same rows for a trainer that differs in `MEMORY_CONSTANTS` alone.

        No column depends on these, so those that were computed are kept.
        """
        found = object.__new__(StageRows)
        found.__dict__.update(self.__dict__, trainer=trainer)
        return found

    @property
    def table(self) -> LayoutTable:
        """One row for each group."""
        return self.groups.table

    @cached_property
    def element(self) -> Floats:
        """Bytes of an activation's element."""
        by_code = np.array([ELEMENT_BYTES[p] for p in self.table.precisions], dtype=np.float64)
        found: Floats = by_code[self.table.precision]
        return found

    @cached_property
    def one_stage(self) -> Mask:
        """True where the pipeline has one stage."""
        mask: Mask = self.table.pipeline_parallel_size == 1
        return mask

    @cached_property
    def has_head(self) -> Mask:
        """True where the stage ends with the head."""
        return np.ones_like(self.one_stage) if self.last else self.one_stage

    @cached_property
    def shards(self) -> Ints:
        """Ranks that ZeRO shards over."""
        ranks: Ints = self.table.data_parallel_size * self.table.context_parallel_size
        return ranks // np.minimum(self.trainer.replicas, ranks)

    @cached_property
    def tokens(self) -> Ints:
        """The tokens of a micro-batch on one rank."""
        length = self.cell.sequence_length // self.table.context_parallel_size
        return self.table.micro_batch_size * length

    @cached_property
    def layers(self) -> Floats:
        """The stage's layers: equally many in each, or balanced with the head's work."""
        model, pp = self.cell.model, self.table.pipeline_parallel_size
        total = float(model.num_layers)
        if self.trainer.stages_by_work:
            head = model.vocab_size * model.hidden_size / model.parameters_per_layer  # in layers
            share = (total + head) / pp
            fair = np.maximum(np.ceil(share - head), 0.0) if self.last else np.ceil(share)
            return np.where(self.one_stage, total, np.minimum(fair, total))
        if self.trainer.fully_shards:
            return self._layers_of_own()
        first: Floats = np.ceil(total / pp)
        return np.maximum(total - first * (pp - 1), 1.0) if self.last else first

    def _layers_of_own(self) -> Floats:
        found: Floats = sum((num for _, num in self.own_stages), start=np.zeros(len(self.table)))
        return found

    @cached_property
    def own_stages(self) -> list[tuple[Floats, Floats]]:
        """The first layer, and the layers, of each virtual stage of this rank in workload llama.

        The first stages have one more if the layers do not divide. A rank has every p-th stage,
        from its own place on.
        """
        pp, virtual = self.table.pipeline_parallel_size, self.schedule.virtual_stages
        each, more = np.divmod(float(self.cell.model.num_layers), pp * virtual)
        found: list[tuple[Floats, Floats]] = []
        for number in range(int(virtual.max(initial=1.0))):
            stage = (pp - 1 if self.last else 0) + number * pp
            first = (stage * each + np.minimum(stage, more)).astype(np.float64)
            layers: Floats = np.where(number < virtual, each + (stage < more), 0.0)
            found.append((first, layers))
        return found

    @cached_property
    def schedule(self) -> Schedule:
        """The micro-batches that wait on this rank."""
        return Schedule.of(self.table, last=self.last)

    @property
    def recomputed_layers(self) -> Floats:
        """The recomputed layers of this stage, by layout."""
        num = self.cell.model.num_layers
        by_code = np.array([r.layers_of(num) for r in self.table.recomputes])
        wanted, spread = by_code[self.groups.recompute], self.groups.spread
        if self.trainer.fully_shards and not self.one_stage.all():
            of_stages: Floats = np.zeros(len(wanted))
            for first, layers in self.own_stages:
                of_stages += np.clip(wanted - spread(first), 0.0, spread(layers))
            return of_stages
        found: Floats = np.minimum(spread(self.layers), wanted)
        return found

    @property
    def in_flight(self) -> Floats:
        """Micro-batches that wait, through all layers of the rank.

        If its virtual stages are unequal: most of those that wait went through the first one.
        """
        schedule, (_, first) = self.schedule, self.own_stages[0]
        virtual, num = schedule.virtual_stages, self.table.grad_accum_steps
        waiting = schedule.in_flight * virtual
        layers = (waiting - virtual + 1.0) * first + self.layers - first
        unequal = (virtual > 1) & (waiting < virtual * num)
        return np.where(unequal, layers / self.layers, schedule.in_flight)

    @cached_property
    def weights(self) -> Floats:
        """The weights of this stage on one rank, before ZeRO shards them."""
        if self.trainer.fully_shards:
            return self.layers * self.layer_weights + self.embedding_weights + self.head_weights
        model = self.cell.model
        embedding = model.vocab_size * model.hidden_size
        tables = 1 if model.tied_embeddings else np.where(self.one_stage, 2, 1)
        split = self.layers * model.parameters_per_layer + tables * embedding
        norm = np.where(self.has_head, model.hidden_size, 0)
        weights: Floats = split / self.table.tensor_parallel_size + norm
        return weights

    @cached_property
    def layer_weights(self) -> Floats:
        """The weights of one layer. Tensor parallelism does not cut its two norms."""
        model = self.cell.model
        norms = 2.0 * model.hidden_size
        cut: Floats = (model.parameters_per_layer - norms) / self.table.tensor_parallel_size
        return cut + norms

    @cached_property
    def table_weights(self) -> Floats:
        """The weights of the embedding, or of the head's product."""
        model = self.cell.model
        whole: Floats = model.vocab_size * model.hidden_size / self.table.tensor_parallel_size
        return whole

    @cached_property
    def embedding_weights(self) -> Floats:
        """The weights of the embedding; 0 on stages without it."""
        has = np.where(self.last, self.one_stage, True)
        found: Floats = np.where(has, self.table_weights, 0.0)
        return found

    @cached_property
    def head_weights(self) -> Floats:
        """The weights of the head, with the last norm; 0 on stages without it.

        Tied embeddings have their table in the embedding.
        """
        product = 0.0 if self.cell.model.tied_embeddings else self.table_weights
        found: Floats = np.where(self.has_head, product + self.cell.model.hidden_size, 0.0)
        return found

    def sharded(self, bytes_of_all: Floats, *, zero_stage: int) -> Floats:
        """Return the bytes that a rank holds if ZeRO shards them from this stage on."""
        share: Floats = bytes_of_all / np.where(self.table.zero_stage >= zero_stage, self.shards, 1)
        return share


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Micro-batches that wait for their backward pass on a rank of a pipeline."""

    virtual_stages: Floats
    # In micro-batches through all the layers of the rank.
    in_flight: Floats
    # The waiting inputs of the first layers that another rank sent.
    received: Floats
    # Results that are kept after they were sent (counted in torch 2.13).
    sent: Floats
    # Micro-batches whose loss waits for its backward pass.
    heads: Floats

    @classmethod
    def of(cls, table: LayoutTable, *, last: bool) -> Schedule:
        """Return the micro-batches that wait on the first rank, or on the last one.

        1F1B: one for each stage behind, and itself. GPipe: all. Interleaved, with v virtual stages
        on each of p ranks: (v - 1) p + 2 (p - i) - 1 of them, of rank i (Narayanan et al. 2021; i
        counts from 0).
        """
        pp, num = table.pipeline_parallel_size, table.grad_accum_steps
        kinds = table.pipeline_schedules
        virtual = np.array([s.virtual_stages for s in kinds])[table.pipeline_schedule]
        behind = np.ones_like(pp) if last else pp
        waiting = np.minimum(behind, num)
        gpipe = np.array([s.kind is ScheduleKind.GPIPE for s in kinds])[table.pipeline_schedule]
        if any(s.kind is not ScheduleKind.ONE_F_ONE_B for s in kinds):
            chunks = np.minimum((virtual - 1) * pp + 2 * behind - 1, virtual * num)
            waiting = np.where(virtual > 1, chunks, np.where(gpipe, num, waiting))
        interleaved = virtual > 1
        return cls(
            virtual_stages=virtual.astype(np.float64),
            in_flight=np.where(pp > 1, waiting / virtual, 1.0),
            received=np.where(interleaved, 0.0, waiting if last else 0.0),
            sent=np.where(interleaved, waiting + 2.0, np.where(gpipe, 0.0, waiting)),
            heads=np.where(gpipe & (pp > 1), num, 1.0),
        )
