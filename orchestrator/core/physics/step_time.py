"""Predicted time of one optimizer step, by part, for many layouts at once (numpy).

A roofline with an efficiency that grows with the work per kernel, a pipeline bubble, and ring collectives over the links of the
hardware. `StepTimeConstants` are what no data sheet says: absolute errors of 20-50 % are normal before calibration fits them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.layout_table import Ints, LayoutTable

Floats = NDArray[np.float64]

NEVER = 1e6  # seconds per FLOP of a precision that the device lacks: last in every order, and still a number


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeConstants:
    """What a stack of software makes of a device: positive numbers. The defaults are those of well-run training in plain torch."""

    peak_efficiency: float = 0.6
    """Share of the data sheet's FLOP/s that large kernels reach. 0.55-0.7 is what large dense models reach on A100 and H100."""
    half_efficiency_seconds: float = 60e-6
    """Time that a layer's widest product would take at the data sheet's peak, when half of that is reached: small kernels idle a GPU."""
    kernel_seconds_per_layer: float = 150e-6
    """Seconds of one layer's forward and backward that no GPU work hides: some 30 kernel launches of 5 us."""
    activation_traffic_bytes: float = 60.0
    """Bytes that unfused elementwise kernels move per element of a layer's activation: norms, rotations, SwiGLU, residuals and casts."""
    intra_node_share: float = 0.6
    """Share of the data sheet's bandwidth that ring collectives reach inside a node (155 of 300 GB/s on A100: Galvatron's table)."""
    inter_node_share: float = 0.4
    """The same, between nodes: 44.7 of 200 GB/s for 16 A100 in two nodes (Galvatron's table), more where rails are not shared."""
    collective_seconds: float = 30e-6
    """Seconds of a collective beyond its bytes, inside a node: start and one hop per member that is a power of two."""
    inter_node_collective_seconds: float = 150e-6
    """The same for a group that spans nodes."""
    exposed_data_parallel_share: float = 0.5
    """Share of the data-parallel traffic that does not hide behind the backward pass."""
    exposed_zero_1_share: float = 0.9
    """The same at ZeRO stages 1 and 2, whose gradients are often scattered, and new weights gathered, when the backward pass is over."""
    zero_1_passes: float = 3.0
    """Ring passes over the weights at ZeRO stages 1 and 2: gradients are all-reduced (2), new weights gathered (1)."""
    pipeline_hop_seconds: float = 300e-6
    """Seconds that one micro-batch spends between two stages beyond its bytes: host work of the schedule, and waiting."""
    bubble_factor: float = 1.1
    """Factor on the ideal bubble, (p - 1) micro-batches of the fullest stage: uneven stages and schedules that overlap badly make it larger."""
    optimizer_traffic_bytes: float = 28.0
    """Bytes moved per weight by the optimizer: gradient, master, and both moments read; master and moments written."""
    fixed_seconds: float = 5e-3
    """Seconds of a step that nothing divides: host work, synchronisation."""
    node_congestion: float = 0.1
    """Share by which each doubling of the nodes that a group spans slows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPrior:
    """What is believed of a positive constant before anything is measured: its logarithm is normal."""

    median: float
    log_sd: float  # 0.7: two thirds of all stacks within a factor of 2


# How far stacks differ. Efficiency is known best; latencies of hosts and networks, worst.
_LOG_SDS: Mapping[str, float] = MappingProxyType(
    {
        "peak_efficiency": 0.15,
        "half_efficiency_seconds": 0.8,
        "kernel_seconds_per_layer": 0.8,
        "activation_traffic_bytes": 0.5,
        "intra_node_share": 0.35,
        "inter_node_share": 0.5,
        "collective_seconds": 0.7,
        "inter_node_collective_seconds": 0.8,
        "exposed_data_parallel_share": 0.4,
        "exposed_zero_1_share": 0.3,
        "zero_1_passes": 0.3,
        "pipeline_hop_seconds": 1.0,
        "bubble_factor": 0.25,
        "optimizer_traffic_bytes": 0.4,
        "fixed_seconds": 1.0,
        "node_congestion": 0.8,
    }
)
CONSTANTS: tuple[str, ...] = tuple(f.name for f in fields(StepTimeConstants))
PRIORS: Mapping[str, LogPrior] = MappingProxyType(
    {
        name: LogPrior(median=getattr(StepTimeConstants(), name), log_sd=_LOG_SDS[name])
        for name in CONSTANTS
    }
)


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
    fixed: Floats

    @property
    def total(self) -> Floats:
        return (
            self.compute
            + self.recompute
            + self.bubble
            + self.data_parallel
            + self.tensor_parallel
            + self.pipeline
            + self.optimizer
            + self.fixed
        )


def predict_step_time(
    table: LayoutTable,
    cell: Cell,
    hardware: Hardware,
    *,
    gpus_per_node: int,
    constants: StepTimeConstants | None = None,
) -> StepTimePrediction:
    """Predict the parts for every layout of a table, in seconds; a precision that the hardware lacks takes beyond any time.

    Ranks are laid out as Megatron, nanotron and torchtitan do: tensor parallel innermost, then context, data, and pipeline outermost.
    """
    return StepTimeModel.of(table, cell, hardware, gpus_per_node=gpus_per_node).seconds(
        constants or StepTimeConstants()
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimeModel:
    """What the layouts of one cell ask of a machine, whatever the constants: fitting them evaluates it again and again."""

    hardware: Hardware
    layers: Floats  # of the fullest stage
    micro_batches: Floats
    stages: Floats
    flops: Floats  # of one micro-batch on one GPU, in the fullest stage
    recomputed_flops: Floats
    peak: Floats
    elements: Floats  # of a layer's activation
    kernel_flops: Floats  # of the widest matrix product of a layer
    recomputed_share: Floats  # of a forward and backward pass that is done again
    tensor_bytes: Floats  # per micro-batch
    tensor_group: _Group
    context_bytes: Floats
    context_group: _Group
    pipeline_bytes: Floats  # of one boundary and micro-batch
    pipeline_crosses: NDArray[np.bool_]
    data_bytes: Floats  # of one ring pass
    data_passes: Floats  # that do not depend on constants (all but ZeRO 1 and 2)
    zero_passes: NDArray[np.bool_]  # ZeRO 1 and 2
    data_group: _Group
    weights_in_optimizer: Floats

    @classmethod
    def of(
        cls, table: LayoutTable, cell: Cell, hardware: Hardware, *, gpus_per_node: int
    ) -> StepTimeModel:
        model, length = cell.model, cell.sequence_length
        tp, pp, cp, dp = (
            table.tensor_parallel_size,
            table.pipeline_parallel_size,
            table.context_parallel_size,
            table.data_parallel_size,
        )
        ga = table.grad_accum_steps.astype(np.float64)
        element = np.array([4.0 if p is Precision.FP32 else 2.0 for p in table.precisions])[
            table.precision
        ]
        tokens = table.micro_batch_size * (length / cp)  # of one micro-batch on one GPU
        layers, fullest = _fullest_stage(cell, pp)
        per_token = model.flops_per_token(length)
        extra = np.array([model.recomputed_flops_per_token(length, r) for r in table.recomputes])[
            table.recompute
        ]
        hidden_bytes = tokens * model.hidden_size * element
        weights = model.num_parameters / (tp * pp)
        ranks = dp * cp
        shard = np.where(table.zero_stage >= 1, ranks, 1)
        return cls(
            hardware=hardware,
            layers=layers,
            micro_batches=ga,
            stages=pp.astype(np.float64),
            flops=tokens * per_token * fullest / tp,
            recomputed_flops=tokens * extra / (tp * pp),
            peak=np.array([hardware.peak_flops.get(p, 0.0) for p in table.precisions])[
                table.precision
            ],
            elements=tokens * model.hidden_size / tp,
            kernel_flops=2.0 * tokens * model.hidden_size * model.ffn_hidden_size / tp,
            recomputed_share=extra / per_token,
            # 2 all-reduces forward and 2 backward of a layer, or as many gathers and scatters with sequence parallelism: 8 passes.
            tensor_bytes=8.0 * layers * hidden_bytes * (tp - 1) / tp,
            tensor_group=_Group.of(tp, np.ones_like(tp), gpus_per_node),
            context_bytes=4.0 * layers * tokens * 2 * model.kv_size / tp * element * (cp - 1),
            context_group=_Group.of(cp, tp, gpus_per_node),
            pipeline_bytes=np.where(pp > 1, 2.0 * hidden_bytes / tp, 0.0),
            pipeline_crosses=np.asarray(tp * cp * dp * pp > gpus_per_node),
            data_bytes=(ranks - 1) / ranks * weights * element,
            data_passes=np.where(
                table.zero_stage == 3, 1.0 + 2.0 * ga, 2.0
            ),  # ZeRO-3 gathers the weights for each forward and backward
            zero_passes=np.asarray((table.zero_stage == 1) | (table.zero_stage == 2)),
            data_group=_Group.of(ranks, tp, gpus_per_node),
            weights_in_optimizer=weights / shard,
        )

    @classmethod
    def joined(cls, models: Sequence[StepTimeModel]) -> StepTimeModel:
        """The rows of several cells on one kind of hardware."""
        columns = {
            f.name: np.concatenate([getattr(model, f.name) for model in models])
            for f in fields(cls)
            if f.name not in ("hardware", "tensor_group", "context_group", "data_group")
        }
        return cls(
            hardware=models[0].hardware,
            tensor_group=_Group.joined([model.tensor_group for model in models]),
            context_group=_Group.joined([model.context_group for model in models]),
            data_group=_Group.joined([model.data_group for model in models]),
            **columns,
        )

    def seconds(self, c: StepTimeConstants) -> StepTimePrediction:
        """The parts with these constants."""
        rate = (
            self.peak
            * c.peak_efficiency
            * self.kernel_flops
            / (self.kernel_flops + c.half_efficiency_seconds * self.peak)
        )
        seconds_per_flop = np.divide(1.0, rate, out=np.full(len(rate), NEVER), where=rate > 0)
        per_layer = (
            c.kernel_seconds_per_layer
            + self.elements * c.activation_traffic_bytes / self.hardware.memory_bandwidth
        )
        work = self.flops * seconds_per_flop + self.layers * per_layer
        again = (
            self.recomputed_flops * seconds_per_flop
            + self.recomputed_share * self.layers * per_layer
        )
        inside = self.hardware.intra_node_bandwidth * c.intra_node_share
        across = self.hardware.inter_node_bandwidth * c.inter_node_share
        tensor = self.tensor_bytes / self.tensor_group.bandwidth(inside, across, c.node_congestion)
        tensor += 8.0 * self.layers * self.tensor_group.latency(c)
        tensor += self.context_bytes / self.context_group.link(inside, across, c.node_congestion)
        tensor += 4.0 * self.layers * self.context_group.latency(c)
        ring = self.data_bytes / self.data_group.bandwidth(
            inside, across, c.node_congestion
        ) + self.data_group.latency(c)
        traffic = ring * np.where(self.zero_passes, c.zero_1_passes, self.data_passes)
        exposed = np.where(self.zero_passes, c.exposed_zero_1_share, c.exposed_data_parallel_share)
        hop = np.where(
            self.stages > 1,
            self.pipeline_bytes / np.where(self.pipeline_crosses, across, inside)
            + c.pipeline_hop_seconds,
            0.0,
        )
        slots = self.micro_batches + self.stages - 1.0
        return StepTimePrediction(
            compute=self.micro_batches * work,
            recompute=self.micro_batches * again,
            bubble=(self.stages - 1.0) * (work + again + tensor) * c.bubble_factor,
            data_parallel=exposed * traffic
            + (1.0 - np.minimum(exposed, 1.0)) * np.maximum(traffic - 2 / 3 * work, 0.0),
            tensor_parallel=self.micro_batches * tensor,
            pipeline=slots * hop,
            optimizer=self.weights_in_optimizer
            * c.optimizer_traffic_bytes
            / self.hardware.memory_bandwidth,
            fixed=np.full(len(work), c.fixed_seconds),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The groups of a collective: their size, and how many of their members share a node (and so its network cards)."""

    size: Floats
    members_per_node: Floats
    crosses: NDArray[np.bool_]

    @classmethod
    def of(cls, size: Ints, stride: Ints, gpus_per_node: int) -> _Group:
        return cls(
            size=size.astype(np.float64),
            members_per_node=np.clip(gpus_per_node // np.maximum(stride, 1), 1, size).astype(
                np.float64
            ),
            crosses=np.asarray(size * stride > gpus_per_node),
        )

    @classmethod
    def joined(cls, groups: Sequence[_Group]) -> _Group:
        return cls(
            **{
                f.name: np.concatenate([getattr(group, f.name) for group in groups])
                for f in fields(cls)
            }
        )

    def bandwidth(self, inside: float, across: float, congestion: float) -> Floats:
        """Bytes per second of a ring: members of one node each bring a network card; no faster than the links inside."""
        slowed = across / (
            1.0 + congestion * np.log2(np.maximum(self.size / self.members_per_node, 1.0))
        )
        found: Floats = np.where(
            self.crosses, np.minimum(self.members_per_node * slowed, inside), inside
        )
        return found

    def link(self, inside: float, across: float, congestion: float) -> Floats:
        """Bytes per second from neighbour to neighbour of a ring: the slowest link it spans holds all of them up, with one card."""
        alone = replace(
            self, members_per_node=np.ones_like(self.size), size=self.size / self.members_per_node
        )
        return alone.bandwidth(inside, across, congestion)

    def latency(self, c: StepTimeConstants) -> Floats:
        """Seconds of one pass beyond its bytes."""
        one = np.where(self.crosses, c.inter_node_collective_seconds, c.collective_seconds)
        found: Floats = np.where(
            self.size > 1, one * np.log2(np.maximum(self.size, 2.0)) / 3.0, 0.0
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
    """One pass of a ring over a message, by the same links and latencies as the parts of a step; ranks are spread evenly over nodes."""
    group = _Group(size=num_ranks, members_per_node=num_ranks / num_nodes, crosses=num_nodes > 1)
    inside = hardware.intra_node_bandwidth * constants.intra_node_share
    across = hardware.inter_node_bandwidth * constants.inter_node_share
    through = num_bytes * (num_ranks - 1) / num_ranks
    found: Floats = through / group.bandwidth(
        inside, across, constants.node_congestion
    ) + group.latency(constants)
    return found


def _fullest_stage(cell: Cell, pp: Ints) -> tuple[Floats, Floats]:
    """Layers of the fullest stage, and its share of the model's FLOPs: whole layers, and the last stage has the head besides."""
    model = cell.model
    layers = np.ceil(model.num_layers / pp)
    return layers, np.maximum(layers / model.num_layers, 1.0 / pp)
