"""Predicted time of one optimizer step, by part, for many layouts at once (numpy).

A roofline with an efficiency that grows with the work per kernel, a pipeline bubble, and ring
collectives over the links of the hardware. `StepTimeConstants` are in no data sheet: absolute
errors of 20-50 % are normal before calibration fits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.collective_group import LinkRates
from orchestrator.core.physics.columns import joined
from orchestrator.core.physics.layout_groups import LayoutGroups, Scalar
from orchestrator.core.physics.sharded_weights import ShardedWeights
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.physics.step_work import (
    ComputeWork,
    DataTraffic,
    PipelineWork,
    RingTraffic,
    StepSizes,
    activation_traffic,
)
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout_table import LayoutTable


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimePrediction:
    """Seconds of one optimizer step, one entry per layout."""

    compute: Floats
    recompute: Floats
    bubble: Floats
    data_parallel: Floats
    tensor_parallel: Floats
    pipeline: Floats
    optimizer: Floats
    host: Floats  # beyond the device's work
    fixed: Floats

    @property
    def total(self) -> Floats:
        """The seconds of the whole step."""
        parts = self.compute + self.recompute + self.bubble + self.data_parallel
        parts = parts + self.tensor_parallel + self.pipeline
        return parts + self.optimizer + self.host + self.fixed


def predict_step_time(
    table: LayoutTable,
    cell: Cell,
    hardware: Hardware,
    *,
    gpus_per_node: int,
    constants: StepTimeConstants | None = None,
    trainer: Trainer | None = None,
) -> StepTimePrediction:
    """Predict the parts for every layout of a table, in seconds.

    A precision that the hardware lacks takes longer than any other. Ranks are laid out as Megatron,
    nanotron and torchtitan do: tensor parallel innermost, then context, data, pipeline outermost.
    """
    model = StepTimeModel.of(table, cell, hardware, gpus_per_node=gpus_per_node, trainer=trainer)
    return model.seconds(constants or StepTimeConstants())


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimeModel:
    """The work that the layouts of one cell ask of a machine, without the machine's constants.

    A fit of the constants evaluates it many times. Columns have one entry for each group of layouts
    (layout_groups.py), unless they say otherwise.
    """

    hardware: Hardware
    # The group of every layout. None: each is a group.
    group: Ints | None
    compute: ComputeWork
    tensor: RingTraffic
    context: RingTraffic
    pipeline: PipelineWork
    data: DataTraffic
    # Passes of fully sharded weights, which overlap with computing. None: no layout has them.
    sharded: ShardedWeights | None
    weights_in_optimizer: Floats

    @classmethod
    def of(
        cls,
        table: LayoutTable,
        cell: Cell,
        hardware: Hardware,
        *,
        gpus_per_node: int,
        trainer: Trainer | None = None,
    ) -> StepTimeModel:
        """Compute the work of a table's layouts in a cell.

        Without a trainer, it is that of the defaults of `Trainer`.
        """
        trainer = trainer or Trainer()
        groups = LayoutGroups.of(table)
        table = groups.table
        sizes = StepSizes.of(groups, cell)
        tensor, context = activation_traffic(
            sizes, groups, cell, trainer, gpus_per_node=gpus_per_node
        )
        sharded = ShardedWeights.of(
            table,
            trainer,
            weights=sizes.weights,
            element=sizes.element,
            layers=sizes.layers,
            per_node=gpus_per_node,
        )
        shard = np.where(table.zero_stage >= 1, sizes.ranks, 1)
        if sharded is not None:
            shard = np.where(sharded.rows, sharded.shards, shard)
        return cls(
            hardware=hardware,
            group=groups.group,
            compute=ComputeWork.of(sizes, groups, cell, hardware, trainer),
            tensor=tensor,
            context=context,
            pipeline=PipelineWork.of(sizes, table, gpus_per_node=gpus_per_node),
            data=DataTraffic.of(sizes, table, trainer, gpus_per_node=gpus_per_node),
            sharded=sharded,
            weights_in_optimizer=sizes.weights / shard,
        )

    @classmethod
    def joined(cls, models: Sequence[StepTimeModel]) -> StepTimeModel:
        """Return one model with the rows of several cells on one kind of hardware."""
        return cls(
            hardware=models[0].hardware,
            group=_joined_groups(models),
            compute=joined([model.compute for model in models]),
            tensor=joined([model.tensor for model in models]),
            context=joined([model.context for model in models]),
            pipeline=joined([model.pipeline for model in models]),
            data=joined([model.data for model in models]),
            sharded=ShardedWeights.joined(
                [model.sharded for model in models], [model.num_groups for model in models]
            ),
            weights_in_optimizer=np.concatenate([model.weights_in_optimizer for model in models]),
        )

    @property
    def num_groups(self) -> int:
        """The number of groups of layouts."""
        return len(self.weights_in_optimizer)

    def seconds(self, c: StepTimeConstants) -> StepTimePrediction:
        """Return the parts of every layout's step with these constants."""
        spread, memory_bandwidth = self._spread, self.hardware.memory_bandwidth
        links = LinkRates.of(self.hardware, c)
        work, recomputed = self.compute.seconds(c, memory_bandwidth, spread)
        every_work = spread(work)
        host = np.maximum(
            self.compute.host_layers * c.host_seconds_per_layer - every_work - recomputed, 0.0
        )
        tensor = self._ring_seconds(c, links)
        stages, micro_batches = self.pipeline.stages, spread(self.pipeline.micro_batches)
        optimizer = self.weights_in_optimizer * c.optimizer_traffic_bytes / memory_bandwidth
        return StepTimePrediction(
            compute=spread(self.pipeline.micro_batches * work),
            recompute=micro_batches * recomputed,
            bubble=spread((stages - 1.0) / self.pipeline.virtual_stages)
            * (every_work + recomputed + host + tensor)
            * c.bubble_factor,
            data_parallel=self._data_parallel_seconds(c, links, work, recomputed),
            tensor_parallel=micro_batches * tensor,
            pipeline=spread(self.pipeline.seconds(c, links)),
            optimizer=spread(optimizer),
            host=micro_batches * host,
            fixed=np.full(len(recomputed), c.fixed_seconds),
        )

    def _ring_seconds(self, c: StepTimeConstants, links: LinkRates) -> Floats:
        """Return the seconds of a micro-batch in tensor and context parallel rings."""
        spread, tensor, context = self._spread, self.tensor, self.context
        seconds = tensor.num_bytes / spread(tensor.group.bandwidth(links))
        seconds += tensor.collectives * spread(tensor.group.latency(c))
        seconds += context.num_bytes / spread(context.group.link(links))
        seconds += context.collectives * spread(context.group.latency(c))
        return seconds

    def _data_parallel_seconds(
        self, c: StepTimeConstants, links: LinkRates, work: Floats, recomputed: Floats
    ) -> Floats:
        """Return the seconds of a step that wait for data parallel ranks, of every layout."""
        spread = self._spread
        seconds = spread(self.data.exposed_seconds(c, links, work))
        if self.sharded is None:
            return seconds
        sharded = self.sharded.exposed_seconds(
            c,
            links,
            forward=work / 3.0,
            backward=spread(work * (2.0 / 3.0)) + recomputed,
            spread=spread,
        )
        return np.where(spread(self.sharded.rows), sharded, seconds)

    def _spread(self, of_groups: NDArray[Scalar]) -> NDArray[Scalar]:
        return of_groups if self.group is None else of_groups.take(self.group)


def _joined_groups(models: Sequence[StepTimeModel]) -> Ints | None:
    if all(model.group is None for model in models):
        return None
    counts = [model.num_groups for model in models]
    starts = np.cumsum([0, *counts[:-1]])
    of_each = (
        np.arange(n) if m.group is None else m.group for m, n in zip(models, counts, strict=True)
    )
    return np.concatenate([start + group for start, group in zip(starts, of_each, strict=True)])
