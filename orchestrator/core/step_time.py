"""Predicted time of one optimizer step, by part, for many layouts at once (numpy).

A roofline with an efficiency that grows with the work per kernel, a pipeline bubble, and ring collectives over the links of the
hardware. Absolute errors of 20-50 % are normal before calibration; the order is what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cell import Cell
from orchestrator.core.hardware import Hardware
from orchestrator.core.layout import Precision
from orchestrator.core.layout_table import LayoutTable

Floats = NDArray[np.float64]

PEAK_EFFICIENCY = 0.65  # of the data sheet's FLOP/s in large kernels: typical of well-run H100 training without fused extras
HALF_EFFICIENCY_WORK = 2.0e6  # tokens x hidden / tp at which half of it is reached
KERNEL_SECONDS_PER_LAYER = 150e-6  # launches of one layer's forward and backward that nothing hides
FIXED_SECONDS = 5e-3  # optimizer launch, host work, synchronisation
NEVER = 1e6  # seconds per FLOP of a precision that the device lacks: last in every order, and still a number
OVERLAP = 0.7  # share of the data-parallel traffic hidden behind the last micro-batch's backward


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


def predict_step_time(table: LayoutTable, cell: Cell, hardware: Hardware, *, gpus_per_node: int) -> StepTimePrediction:
    """Predict the parts for every layout of a table, in seconds; a precision that the hardware lacks takes beyond any time."""
    model, length = cell.model, cell.sequence_length
    tp, pp, cp, dp = table.tensor_parallel_size, table.pipeline_parallel_size, table.context_parallel_size, table.data_parallel_size
    mbs, ga = table.micro_batch_size, table.grad_accum_steps.astype(np.float64)
    peak = np.array([hardware.peak_flops.get(p, 0.0) for p in table.precisions])[table.precision]
    element = np.where(np.array([p is Precision.FP32 for p in table.precisions])[table.precision], 4.0, 2.0)

    work = mbs * (length // cp) * model.hidden_size / tp
    rate = peak * PEAK_EFFICIENCY * work / (work + HALF_EFFICIENCY_WORK)
    seconds_per_flop = np.divide(1.0, rate, out=np.full(len(table), NEVER), where=rate > 0)
    tokens = mbs * length  # of one micro-batch of one replica
    layers = -(-model.num_layers // pp)
    per_micro_batch = tokens * model.flops_per_token(length) / (tp * pp * cp) * seconds_per_flop + layers * KERNEL_SECONDS_PER_LAYER
    extra = np.array([model.recomputed_flops_per_token(length, r) for r in table.recomputes])[table.recompute]
    recompute_per_micro_batch = tokens * extra / (tp * pp * cp) * seconds_per_flop

    tp_bytes = (
        8.0 * layers * tokens / cp * model.hidden_size * element * (tp - 1) / tp
    )  # 4 ring passes of 2 all-reduces, forward and backward
    tp_bandwidth = np.where(tp * cp <= gpus_per_node, hardware.intra_node_bandwidth, hardware.inter_node_bandwidth)
    tensor_per_micro_batch = tp_bytes / tp_bandwidth
    pp_bandwidth = np.where(tp * cp * pp <= gpus_per_node, hardware.intra_node_bandwidth, hardware.inter_node_bandwidth)
    pipeline_per_micro_batch = np.where(pp > 1, 2.0 * tokens / cp * model.hidden_size * element / pp_bandwidth, 0.0)

    parameters = model.num_parameters / (tp * pp)
    ranks = dp * cp
    dp_bandwidth = np.where(table.world_size <= gpus_per_node, hardware.intra_node_bandwidth, hardware.inter_node_bandwidth)
    ring = (ranks - 1) / ranks * parameters * element / dp_bandwidth
    passes = np.where(table.zero_stage == 3, 1.0 + 2.0 * ga, 2.0)  # ZeRO-3 gathers the weights for each forward and backward
    hidden = np.minimum(OVERLAP * passes * ring, per_micro_batch * 2 / 3)
    shard = np.where(table.zero_stage >= 1, ranks, 1)
    optimizer = 28.0 * parameters / shard / hardware.memory_bandwidth  # read gradient, master, m, v; write master, m, v
    return StepTimePrediction(
        compute=ga * per_micro_batch,
        recompute=ga * recompute_per_micro_batch,
        bubble=(pp - 1) * (per_micro_batch + recompute_per_micro_batch),
        data_parallel=passes * ring - hidden,
        tensor_parallel=ga * tensor_per_micro_batch,
        pipeline=(ga + pp - 1.0) * pipeline_per_micro_batch,
        optimizer=optimizer,
        fixed=np.full(len(table), FIXED_SECONDS),
    )
