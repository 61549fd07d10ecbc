"""The work that layouts ask of a machine in a step, by part, without the machine's constants.

Columns have one entry for each group of layouts (layout_groups.py), unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from orchestrator.core.physics.collective_group import CollectiveGroup, LinkRates
from orchestrator.core.physics.layout_groups import LayoutGroups
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.arrays import Floats, Ints, Mask
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Precision, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import LayoutTable

# Seconds per FLOP of a precision that the device lacks: last in every order, and still a number.
NEVER = 1e6
# Ring passes of a layer over its activations with tensor parallelism: 2 all-reduces forward and 2
# backward, or as many gathers and scatters with sequence parallelism. A layer that is computed
# again gathers twice and scatters once more: its last result is not needed.
_TENSOR_PASSES, _REDONE_TENSOR_PASSES = 8.0, 3.0
# The same over keys and values with context parallelism: a ring passes them and their gradients on,
# twice forward and twice backward; or they are gathered, and their gradients scattered, once.
_RING_CONTEXT_PASSES, _CONTEXT_PASSES = 4.0, 2.0
# The host's time for a layer, forward and backward, over that without recomputation: in plain torch
# by measurements on a loaded core (0.6 ms; attention 0.95, full 1.7, ops 1.8), and compiled,
# where little of it is recomputed.
_HOST_EAGER = {RecomputeMode.FULL: 2.8, SelectivePolicy.ATTENTION: 1.6, SelectivePolicy.OPS: 3.0}
_HOST_COMPILED = {RecomputeMode.FULL: 1.5, SelectivePolicy.ATTENTION: 1.3, SelectivePolicy.OPS: 1.5}

# From an entry of each group to one of every layout.
Spread = Callable[[Floats], Floats]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSizes:
    """The sizes of layouts from which the work of every part follows."""

    tp: Ints
    pp: Ints
    cp: Ints
    dp: Ints
    ga: Floats
    # Bytes of an element of the activations.
    element: Floats
    tokens: Floats  # of one micro-batch on one GPU
    layers: Floats  # of the fullest stage
    every_layers: Floats  # the same, of every layout
    # Bytes of the activations between two layers.
    hidden_bytes: Floats
    # Weights of one GPU, before data parallel ranks shard them.
    weights: Floats

    @classmethod
    def of(cls, groups: LayoutGroups, cell: Cell) -> StepSizes:
        table, model = groups.table, cell.model
        tp, pp, cp = (
            table.tensor_parallel_size,
            table.pipeline_parallel_size,
            table.context_parallel_size,
        )
        element = element_bytes(table)
        tokens = table.micro_batch_size * (cell.sequence_length / cp)
        layers = np.ceil(model.num_layers / pp)
        return cls(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=table.data_parallel_size,
            ga=table.grad_accum_steps.astype(np.float64),
            element=element,
            tokens=tokens,
            layers=layers,
            every_layers=groups.spread(layers),
            hidden_bytes=tokens * model.hidden_size * element,
            weights=model.num_parameters / (tp * pp),
        )

    @property
    def ranks(self) -> Ints:
        """The ranks that sum up the same gradients."""
        return self.dp * self.cp


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputeWork:
    """What a GPU of the fullest stage computes for a micro-batch, and its host prepares."""

    layers: Floats
    # Layers, as many as launch all kernels of theirs; of every layout, as many as take the host's
    # time of one.
    launching_layers: Floats
    host_layers: Floats
    # FLOPs on one GPU; the recomputed ones, of every layout.
    flops: Floats
    recomputed_flops: Floats
    peak: Floats
    # The elements of a layer's activation; fewer where fused kernels move less.
    elements: Floats
    # FLOPs of the widest matrix product of a layer, over the trainer's half_efficiency_share.
    kernel_flops: Floats
    # The share of a forward and backward pass that is done again, of every layout.
    recomputed_share: Floats

    @classmethod
    def of(
        cls,
        sizes: StepSizes,
        groups: LayoutGroups,
        cell: Cell,
        hardware: Hardware,
        trainer: Trainer,
    ) -> ComputeWork:
        table, spread = groups.table, groups.spread
        model, length = cell.model, cell.sequence_length
        tokens, tp, pp, layers = sizes.tokens, sizes.tp, sizes.pp, sizes.layers
        # The fullest stage's share of the FLOPs.
        fullest = np.maximum(layers / model.num_layers, 1.0 / pp)
        per_token = model.flops_per_token(length)
        recomputed = [model.recomputed_flops_per_token(length, r) for r in table.recomputes]
        extra = np.array(recomputed)[groups.recompute]
        peaks = np.array([hardware.peak_flops.get(p, 0.0) for p in table.precisions])
        return cls(
            layers=layers,
            launching_layers=layers * trainer.launch_share,
            host_layers=sizes.every_layers * _host_factors(groups, cell, trainer),
            flops=tokens * per_token * fullest / tp,
            recomputed_flops=spread(tokens) * extra / spread(tp * pp),
            peak=peaks[table.precision],
            elements=tokens * model.hidden_size / tp * trainer.traffic_share,
            kernel_flops=2.0
            * tokens
            * model.hidden_size
            * model.ffn_hidden_size
            / (tp * trainer.half_efficiency_share),
            recomputed_share=extra / per_token,
        )

    def seconds(
        self, c: StepTimeConstants, memory_bandwidth: float, spread: Spread
    ) -> tuple[Floats, Floats]:
        """Return the seconds of a micro-batch, and of every layout those of what is recomputed."""
        # Long expressions: numpy reuses the memory of an intermediate array that has no name.
        rate = (self.peak * c.peak_efficiency * self.kernel_flops) / (
            c.half_efficiency_seconds * self.peak + self.kernel_flops
        )
        seconds_per_flop = np.divide(1.0, rate, out=np.full(len(rate), NEVER), where=rate > 0)
        traffic_per_element = c.activation_traffic_bytes / memory_bandwidth
        of_layers = (
            self.layers * self.elements * traffic_per_element
            + self.launching_layers * c.kernel_seconds_per_layer
        )
        recomputed = self.recomputed_flops * spread(
            seconds_per_flop
        ) + self.recomputed_share * spread(of_layers)
        return self.flops * seconds_per_flop + of_layers, recomputed


@dataclass(frozen=True, kw_only=True, eq=False)
class RingTraffic:
    """What the rings of a micro-batch send: over tensor or context parallel ranks."""

    num_bytes: Floats  # of every layout
    collectives: Floats  # of every layout
    group: CollectiveGroup


def activation_traffic(
    sizes: StepSizes, groups: LayoutGroups, cell: Cell, trainer: Trainer, *, gpus_per_node: int
) -> tuple[RingTraffic, RingTraffic]:
    """Return what tensor parallel ranks send of activations, and context parallel ones of keys."""
    spread, tp, cp, every_layers = groups.spread, sizes.tp, sizes.cp, sizes.every_layers
    tensor_passes, context_passes = _passes(groups, cell, trainer)
    tensor = RingTraffic(
        num_bytes=tensor_passes
        * every_layers
        * spread(sizes.hidden_bytes)
        * spread(tp - 1.0)
        / spread(tp.astype(np.float64)),
        collectives=tensor_passes * every_layers,
        group=CollectiveGroup.of(tp, np.ones_like(tp), gpus_per_node),
    )
    keys = sizes.layers * sizes.tokens * 2 * cell.model.kv_size / tp * sizes.element * (cp - 1)
    context = RingTraffic(
        num_bytes=context_passes * spread(keys),
        collectives=context_passes * every_layers,
        group=CollectiveGroup.of(cp, tp, gpus_per_node),
    )
    return tensor, context


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineWork:
    """The stages of a pipeline, and what passes from one to the next."""

    micro_batches: Floats
    stages: Floats
    # Virtual stages of each rank: micro-batches hop this many times as often, in a shorter bubble.
    virtual_stages: Floats
    num_bytes: Floats  # of one boundary and micro-batch
    crosses: Mask

    @classmethod
    def of(cls, sizes: StepSizes, table: LayoutTable, *, gpus_per_node: int) -> PipelineWork:
        tp, pp = sizes.tp, sizes.pp
        return cls(
            micro_batches=sizes.ga,
            stages=pp.astype(np.float64),
            virtual_stages=virtual_stages(table),
            num_bytes=np.where(pp > 1, 2.0 * sizes.hidden_bytes / tp, 0.0),
            crosses=np.asarray(tp * sizes.cp * sizes.dp * pp > gpus_per_node),
        )

    def seconds(self, c: StepTimeConstants, links: LinkRates) -> Floats:
        """Return the seconds of a step in which activations go from stage to stage."""
        link = np.where(self.crosses, links.across, links.inside)
        hop = np.where(self.stages > 1, self.num_bytes / link + c.pipeline_hop_seconds, 0.0)
        found: Floats = (self.micro_batches * self.virtual_stages + self.stages - 1.0) * hop
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class DataTraffic:
    """What data parallel ranks send of gradients and weights in a step."""

    num_bytes: Floats  # of one ring pass
    # Passes whose number depends on no constant (all but ZeRO 1 and 2).
    passes: Floats
    # Collectives of a pass: one for each bucket of gradients; if weights are gathered, one for each
    # layer and one for the head.
    collectives: Floats
    zero_passes: Mask  # ZeRO 1 and 2
    group: CollectiveGroup

    @classmethod
    def of(
        cls, sizes: StepSizes, table: LayoutTable, trainer: Trainer, *, gpus_per_node: int
    ) -> DataTraffic:
        ranks = sizes.ranks
        # The bytes of an all-reduce of gradients.
        sent = sizes.weights * np.maximum(sizes.element, trainer.reduce_bytes)
        return cls(
            num_bytes=(ranks - 1) / ranks * sent,
            # ZeRO 3 gathers the weights for each forward and backward.
            passes=np.where(table.zero_stage == 3, 1.0 + 2.0 * sizes.ga, 2.0),
            collectives=np.where(
                table.zero_stage == 3,
                sizes.layers + 1.0,
                np.maximum(sent / trainer.reduction_bucket_bytes, 1.0),
            ),
            zero_passes=np.asarray((table.zero_stage == 1) | (table.zero_stage == 2)),
            group=CollectiveGroup.of(ranks, sizes.tp, gpus_per_node),
        )

    def exposed_seconds(self, c: StepTimeConstants, links: LinkRates, work: Floats) -> Floats:
        """Return the seconds of a step in which nothing is computed.

        `work`: seconds of computing a micro-batch.
        """
        traffic = self.num_bytes / self.group.bandwidth(links)
        traffic += self.collectives * self.group.latency(c)
        traffic *= np.where(self.zero_passes, c.zero_1_passes, self.passes)
        exposed = np.where(self.zero_passes, c.exposed_zero_1_share, c.exposed_data_parallel_share)
        # What could hide needs the time of a backward pass, two thirds of the work.
        found: Floats = exposed * traffic + (1.0 - np.minimum(exposed, 1.0)) * np.maximum(
            traffic - 2 / 3 * work, 0.0
        )
        return found


def _passes(
    groups: LayoutGroups, cell: Cell, trainer: Trainer
) -> tuple[Floats | float, Floats | float]:
    """Ring passes of a layer: over activations of tensor parallel ranks, over keys and values.

    Of every layout.
    """
    if not trainer.gathers_context:
        return _TENSOR_PASSES, _RING_CONTEXT_PASSES
    num = cell.model.num_layers
    shares = [
        r.layers_of(num) / num if r.mode is RecomputeMode.FULL else 0.0
        for r in groups.table.recomputes
    ]
    redone = np.array(shares)[groups.recompute]
    return _TENSOR_PASSES + _REDONE_TENSOR_PASSES * redone, _CONTEXT_PASSES + redone


def _host_factors(groups: LayoutGroups, cell: Cell, trainer: Trainer) -> Floats | float:
    """The host's time for a layer, over that in plain torch without recomputation.

    Of every layout.
    """
    if not trainer.host_share:
        return 0.0
    factors = _HOST_COMPILED if trainer.compiled else _HOST_EAGER
    num = cell.model.num_layers
    kinds = [
        1.0 + r.layers_of(num) / num * (factors.get(r.policy or r.mode, 1.0) - 1.0)
        for r in groups.table.recomputes
    ]
    found: Floats = trainer.host_share * np.array(kinds)[groups.recompute]
    return found


def virtual_stages(table: LayoutTable) -> Floats:
    """Return the pipeline stages of each rank, by row."""
    of_code = np.array([float(s.virtual_stages) for s in table.pipeline_schedules])
    found: Floats = of_code[table.pipeline_schedule]
    return found


def element_bytes(table: LayoutTable) -> Floats:
    """Return the bytes of an element of the activations, by row."""
    by_code = np.array([4.0 if p is Precision.FP32 else 2.0 for p in table.precisions])
    found: Floats = by_code[table.precision]
    return found
