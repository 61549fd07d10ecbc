"""Predicted time of one optimizer step, by part, for many layouts at once (numpy).

A roofline with an efficiency that grows with the work per kernel, a pipeline bubble, and ring
collectives over the links of the hardware. `StepTimeConstants` are in no data sheet: absolute
errors of 20-50 % are normal before calibration fits them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.layout_groups import LayoutGroups, Scalar
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Precision, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import Ints, LayoutTable, Mask

Floats = NDArray[np.float64]

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
    layers: Floats  # of the fullest stage
    # Layers, as many as launch all kernels of theirs; of every layout, as many as take the host's
    # time of one.
    launching_layers: Floats
    host_layers: Floats
    micro_batches: Floats
    stages: Floats
    # Virtual stages of each rank: micro-batches hop this many times as often, in a shorter bubble.
    virtual_stages: Floats
    # FLOPs of a micro-batch on one GPU, in the fullest stage; the recomputed ones, of every layout.
    flops: Floats
    recomputed_flops: Floats
    peak: Floats
    # The elements of a layer's activation; fewer where fused kernels move less.
    elements: Floats
    # FLOPs of the widest matrix product of a layer.
    kernel_flops: Floats
    # The share of a forward and backward pass that is done again, of every layout.
    recomputed_share: Floats
    # Per micro-batch; bytes and collectives of every layout.
    tensor_bytes: Floats
    tensor_collectives: Floats
    tensor_group: _Group
    context_bytes: Floats
    context_collectives: Floats
    context_group: _Group
    pipeline_bytes: Floats  # of one boundary and micro-batch
    pipeline_crosses: NDArray[np.bool_]
    data_bytes: Floats  # of one ring pass
    # Passes whose number depends on no constant (all but ZeRO 1 and 2).
    data_passes: Floats
    # Collectives of a pass: one for each bucket of gradients; if weights are gathered, one for each
    # layer and one for the head.
    data_collectives: Floats
    zero_passes: NDArray[np.bool_]  # ZeRO 1 and 2
    data_group: _Group
    # Passes of fully sharded weights, which overlap with computing. None: no layout has them.
    sharded: _Sharded | None
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
        model, length = cell.model, cell.sequence_length
        groups = LayoutGroups.of(table)
        table, spread = groups.table, groups.spread
        tp, pp = table.tensor_parallel_size, table.pipeline_parallel_size
        cp, dp = table.context_parallel_size, table.data_parallel_size
        ga = table.grad_accum_steps.astype(np.float64)
        element = element_bytes(table)
        tokens = table.micro_batch_size * (length / cp)  # of one micro-batch on one GPU
        layers = np.ceil(model.num_layers / pp)
        # The fullest stage's share of the FLOPs.
        fullest = np.maximum(layers / model.num_layers, 1.0 / pp)
        per_token = model.flops_per_token(length)
        recomputed = [model.recomputed_flops_per_token(length, r) for r in table.recomputes]
        extra = np.array(recomputed)[groups.recompute]
        peaks = np.array([hardware.peak_flops.get(p, 0.0) for p in table.precisions])
        hidden_bytes = tokens * model.hidden_size * element
        weights = model.num_parameters / (tp * pp)
        ranks = dp * cp
        sharded = _Sharded.of(
            table, trainer, weights=weights, element=element, layers=layers, per_node=gpus_per_node
        )
        shard = np.where(table.zero_stage >= 1, ranks, 1)
        if sharded is not None:
            shard = np.where(sharded.rows, sharded.shards, shard)
        # The bytes of an all-reduce of gradients.
        sent = weights * np.maximum(element, trainer.reduce_bytes)
        tensor_passes, context_passes = _passes(groups, cell, trainer)
        every_layers = spread(layers)
        return cls(
            hardware=hardware,
            group=groups.group,
            layers=layers,
            launching_layers=layers * trainer.launch_share,
            host_layers=every_layers * _host_factors(groups, cell, trainer),
            micro_batches=ga,
            stages=pp.astype(np.float64),
            virtual_stages=virtual_stages(table),
            flops=tokens * per_token * fullest / tp,
            recomputed_flops=spread(tokens) * extra / spread(tp * pp),
            peak=peaks[table.precision],
            elements=tokens * model.hidden_size / tp * trainer.traffic_share,
            kernel_flops=2.0 * tokens * model.hidden_size * model.ffn_hidden_size / tp,
            recomputed_share=extra / per_token,
            tensor_bytes=tensor_passes
            * every_layers
            * spread(hidden_bytes)
            * spread(tp - 1.0)
            / spread(tp.astype(np.float64)),
            tensor_collectives=tensor_passes * every_layers,
            tensor_group=_Group.of(tp, np.ones_like(tp), gpus_per_node),
            context_bytes=context_passes
            * spread(layers * tokens * 2 * model.kv_size / tp * element * (cp - 1)),
            context_collectives=context_passes * every_layers,
            context_group=_Group.of(cp, tp, gpus_per_node),
            pipeline_bytes=np.where(pp > 1, 2.0 * hidden_bytes / tp, 0.0),
            pipeline_crosses=np.asarray(tp * cp * dp * pp > gpus_per_node),
            data_bytes=(ranks - 1) / ranks * sent,
            # ZeRO 3 gathers the weights for each forward and backward.
            data_passes=np.where(table.zero_stage == 3, 1.0 + 2.0 * ga, 2.0),
            data_collectives=np.where(
                table.zero_stage == 3,
                layers + 1.0,
                np.maximum(sent / trainer.reduction_bucket_bytes, 1.0),
            ),
            zero_passes=np.asarray((table.zero_stage == 1) | (table.zero_stage == 2)),
            data_group=_Group.of(ranks, tp, gpus_per_node),
            sharded=sharded,
            weights_in_optimizer=weights / shard,
        )

    @classmethod
    def joined(cls, models: Sequence[StepTimeModel]) -> StepTimeModel:
        """Return one model with the rows of several cells on one kind of hardware."""
        columns: dict[str, Any] = {}
        for name in (f.name for f in fields(cls) if f.name != "hardware"):
            parts = [getattr(model, name) for model in models]
            if name == "sharded":
                columns[name] = _Sharded.joined(parts, [len(model.layers) for model in models])
                continue
            if name == "group":
                columns[name] = _joined_groups(models)
                continue
            is_group = isinstance(parts[0], _Group)
            columns[name] = _Group.joined(parts) if is_group else np.concatenate(parts)
        return cls(hardware=models[0].hardware, **columns)

    def seconds(self, c: StepTimeConstants) -> StepTimePrediction:
        """Return the parts of every layout's step with these constants."""
        spread = self._spread
        # Long expressions: numpy reuses the memory of an intermediate array that has no name.
        rate = (self.peak * c.peak_efficiency * self.kernel_flops) / (
            c.half_efficiency_seconds * self.peak + self.kernel_flops
        )
        seconds_per_flop = np.divide(1.0, rate, out=np.full(len(rate), NEVER), where=rate > 0)
        memory_bandwidth = self.hardware.memory_bandwidth
        traffic_per_element = c.activation_traffic_bytes / memory_bandwidth
        of_layers = (
            self.layers * self.elements * traffic_per_element
            + self.launching_layers * c.kernel_seconds_per_layer
        )
        work = self.flops * seconds_per_flop + of_layers
        every_work = spread(work)
        recomputed = self.recomputed_flops * spread(
            seconds_per_flop
        ) + self.recomputed_share * spread(of_layers)
        host = np.maximum(
            self.host_layers * c.host_seconds_per_layer - every_work - recomputed, 0.0
        )
        inside = self.hardware.intra_node_bandwidth * c.intra_node_share
        across = self.hardware.inter_node_bandwidth * c.inter_node_share
        tensor = self.tensor_bytes / spread(
            self.tensor_group.bandwidth(inside, across, c.node_congestion)
        )
        tensor += self.tensor_collectives * spread(self.tensor_group.latency(c))
        tensor += self.context_bytes / spread(
            self.context_group.link(inside, across, c.node_congestion)
        )
        tensor += self.context_collectives * spread(self.context_group.latency(c))
        traffic = self.data_bytes / self.data_group.bandwidth(inside, across, c.node_congestion)
        traffic += self.data_collectives * self.data_group.latency(c)
        traffic *= np.where(self.zero_passes, c.zero_1_passes, self.data_passes)
        exposed = np.where(self.zero_passes, c.exposed_zero_1_share, c.exposed_data_parallel_share)
        # What could hide needs the time of a backward pass, two thirds of the work.
        data_parallel = exposed * traffic + (1.0 - np.minimum(exposed, 1.0)) * np.maximum(
            traffic - 2 / 3 * work, 0.0
        )
        data_parallel = spread(data_parallel)
        if self.sharded is not None:
            data_parallel = np.where(
                spread(self.sharded.rows),
                self.sharded.exposed_seconds(
                    c,
                    inside=inside,
                    across=across,
                    forward=work / 3.0,
                    backward=spread(work * (2.0 / 3.0)) + recomputed,
                    spread=spread,
                ),
                data_parallel,
            )
        link = np.where(self.pipeline_crosses, across, inside)
        hop = np.where(self.stages > 1, self.pipeline_bytes / link + c.pipeline_hop_seconds, 0.0)
        pipeline = (self.micro_batches * self.virtual_stages + self.stages - 1.0) * hop
        optimizer = self.weights_in_optimizer * c.optimizer_traffic_bytes / memory_bandwidth
        micro_batches = spread(self.micro_batches)
        return StepTimePrediction(
            compute=spread(self.micro_batches * work),
            recompute=micro_batches * recomputed,
            bubble=spread((self.stages - 1.0) / self.virtual_stages)
            * (every_work + recomputed + host + tensor)
            * c.bubble_factor,
            data_parallel=data_parallel,
            tensor_parallel=micro_batches * tensor,
            pipeline=spread(pipeline),
            optimizer=spread(optimizer),
            host=micro_batches * host,
            fixed=np.full(len(recomputed), c.fixed_seconds),
        )

    def _spread(self, of_groups: NDArray[Scalar]) -> NDArray[Scalar]:
        return of_groups if self.group is None else of_groups.take(self.group)


def _joined_groups(models: Sequence[StepTimeModel]) -> Ints | None:
    if all(model.group is None for model in models):
        return None
    counts = [len(model.layers) for model in models]
    starts = np.cumsum([0, *counts[:-1]])
    of_each = (
        np.arange(n) if m.group is None else m.group for m, n in zip(models, counts, strict=True)
    )
    return np.concatenate([start + group for start, group in zip(starts, of_each, strict=True)])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sharded:
    """Weights that are fully sharded: gathers and scatters that computing may hide.

    At ZeRO 1 and 2 weights are gathered in the first forward pass of a step, at 3 in each forward
    and each backward pass.
    """

    rows: Mask  # that shard
    shards: Floats
    # Collectives of a pass: of each layer, and of the head.
    units: Floats
    # The bytes of one ring pass.
    gather_bytes: Floats
    scatter_bytes: Floats
    # Ranks with the same shards sum up theirs: the bytes of a ring pass.
    replica_bytes: Floats
    # Passes of a step.
    forward_gathers: Floats
    backward_gathers: Floats
    scatters: Floats
    shard_group: _Group
    replica_group: _Group

    @classmethod
    def of(
        cls,
        table: LayoutTable,
        trainer: Trainer,
        *,
        weights: Floats,
        element: Floats,
        layers: Floats,
        per_node: int,
    ) -> _Sharded | None:
        ranks = table.data_parallel_size * table.context_parallel_size
        rows = (table.zero_stage >= 1) & (ranks > 1)
        if not trainer.fully_shards or not rows.any():
            return None
        tp, ga = table.tensor_parallel_size, table.grad_accum_steps.astype(np.float64)
        replicas = np.minimum(trainer.replicas, ranks)
        shards = ranks // replicas
        gathers_again = table.zero_stage == 3
        reduced = np.maximum(element, trainer.reduce_bytes)
        return cls(
            rows=rows,
            shards=shards.astype(np.float64),
            units=layers + 1.0,
            gather_bytes=(shards - 1) / shards * weights * element,
            scatter_bytes=(shards - 1) / shards * weights * reduced,
            replica_bytes=(replicas - 1) / replicas * weights / shards * reduced,
            forward_gathers=np.where(gathers_again, ga, 1.0),
            backward_gathers=np.where(gathers_again, ga, 0.0),
            scatters=ga if trainer.scatters_each else np.ones_like(ga),
            shard_group=_Group.of(shards, tp, per_node),
            replica_group=_Group.of(replicas, tp * shards, per_node),
        )

    @classmethod
    def joined(cls, parts: Sequence[_Sharded | None], lengths: Sequence[int]) -> _Sharded | None:
        if all(part is None for part in parts):
            return None
        whole = [part or cls._none(n) for part, n in zip(parts, lengths, strict=True)]
        columns: dict[str, Any] = {}
        for name in (f.name for f in fields(cls)):
            some = [getattr(part, name) for part in whole]
            is_group = isinstance(some[0], _Group)
            columns[name] = _Group.joined(some) if is_group else np.concatenate(some)
        return cls(**columns)

    @classmethod
    def _none(cls, length: int) -> _Sharded:
        ones = np.ones(length)
        group = _Group(size=ones, members_per_node=ones, crosses=np.zeros(length, dtype=np.bool_))
        columns: dict[str, Any] = {f.name: ones for f in fields(cls)}
        columns |= {"rows": group.crosses, "shard_group": group, "replica_group": group}
        return cls(**columns)

    def exposed_seconds(
        self,
        c: StepTimeConstants,
        *,
        inside: float,
        across: float,
        forward: Floats,
        backward: Floats,
        spread: Callable[[Floats], Floats],
    ) -> Floats:
        """Seconds of a step in which nothing is computed.

        A pass hides behind the forward or backward pass of one micro-batch; `backward` and the
        result are of every layout.
        """
        bandwidth = self.shard_group.bandwidth(inside, across, c.node_congestion)
        latency = self.units * self.shard_group.latency(c)
        gather = self.gather_bytes / bandwidth + latency
        replicas = self.replica_bytes / self.replica_group.bandwidth(
            inside, across, c.node_congestion
        )
        scatter = self.scatter_bytes / bandwidth + latency
        scatter += 2.0 * (replicas + self.units * self.replica_group.latency(c))
        again = np.where(self.backward_gathers > 0, gather, 0.0)
        without_scatter = np.maximum(self.backward_gathers - self.scatters, 0.0)
        exposed = spread(self.forward_gathers * np.maximum(gather - forward, 0.0)) + spread(
            self.scatters
        ) * np.maximum(spread(scatter + again) - backward, 0.0)
        if without_scatter.any():
            exposed += spread(without_scatter) * np.maximum(spread(gather) - backward, 0.0)
        return exposed


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The groups of a collective: their size, and how many members share a node and its cards."""

    size: Floats
    members_per_node: Floats
    crosses: NDArray[np.bool_]

    @classmethod
    def of(cls, size: Ints, stride: Ints, gpus_per_node: int) -> _Group:
        members = np.clip(gpus_per_node // np.maximum(stride, 1), 1, size)
        return cls(
            size=size.astype(np.float64),
            members_per_node=members.astype(np.float64),
            crosses=np.asarray(size * stride > gpus_per_node),
        )

    @classmethod
    def joined(cls, groups: Sequence[_Group]) -> _Group:
        names = (f.name for f in fields(cls))
        return cls(**{n: np.concatenate([getattr(group, n) for group in groups]) for n in names})

    def bandwidth(self, inside: float, across: float, congestion: float) -> Floats:
        """Bytes per second of a ring: each member of a node brings a network card.

        No faster than the links inside.
        """
        slowed = across / (
            congestion * np.log2(np.maximum(self.size / self.members_per_node, 1.0)) + 1.0
        )
        slowed *= self.members_per_node
        found: Floats = np.where(self.crosses, np.minimum(slowed, inside), inside)
        return found

    def link(self, inside: float, across: float, congestion: float) -> Floats:
        """Bytes per second between neighbours of a ring, over one card: the slowest link counts."""
        alone = replace(
            self, members_per_node=np.ones_like(self.size), size=self.size / self.members_per_node
        )
        return alone.bandwidth(inside, across, congestion)

    def latency(self, c: StepTimeConstants) -> Floats:
        """Seconds of one pass beyond its bytes."""
        one = np.where(self.crosses, c.inter_node_collective_seconds, c.collective_seconds)
        found: Floats = np.where(
            self.size > 1, np.log2(np.maximum(self.size, 2.0)) * one / 3.0, 0.0
        )
        return found


def ring_seconds(
    *,
    num_ranks: Floats,
    num_nodes: Floats,
    num_bytes: Floats,
    hardware: Hardware,
    constants: StepTimeConstants,
) -> Floats:
    """Return the seconds of one pass of a ring over a message, by links and latencies.

    All arrays have one entry per message. Each link takes (n - 1) / n of its bytes. Ranks are
    spread evenly over nodes.
    """
    group = _Group(size=num_ranks, members_per_node=num_ranks / num_nodes, crosses=num_nodes > 1)
    inside = hardware.intra_node_bandwidth * constants.intra_node_share
    across = hardware.inter_node_bandwidth * constants.inter_node_share
    through = num_bytes * (num_ranks - 1) / num_ranks
    found: Floats = through / group.bandwidth(inside, across, constants.node_congestion)
    return found + group.latency(constants)


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
