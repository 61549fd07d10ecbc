"""Predicted peak memory of one GPU, by part, for many layouts at once (numpy).

Closed form, uncalibrated: parameters, gradients, optimizer, activations in flight, logits and loss. It predicts live tensors
(`memory_allocated`), not what the allocator holds on top. FlashAttention is assumed unless `eager_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cell import Cell
from orchestrator.core.layout import Precision, Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.layout_table import LayoutTable
from orchestrator.core.model_shape import ModelShape

Floats = NDArray[np.float64]

_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 2}  # fp8 products still keep bf16 activations


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What a training program adds to the arithmetic: properties of the trainer, not of the model or the GPU."""

    gradient_bytes_fp32_accumulation: bool = False  # +4 bytes per parameter in mixed precision: 20 instead of 16
    eager_attention: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPrediction:
    """Bytes per GPU of the fullest rank (first pipeline stage), one entry per layout."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    loss: Floats

    @property
    def total(self) -> Floats:
        """The peak: states, and the larger of activations with the loss's temporaries."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.loss


def predict_memory(table: LayoutTable, cell: Cell, trainer: Trainer) -> MemoryPrediction:
    """Predict the parts for every layout of a table, in bytes (arrays of the table's length)."""
    model = cell.model
    tp, pp, cp = table.tensor_parallel_size, table.pipeline_parallel_size, table.context_parallel_size
    dp, zero = table.data_parallel_size * cp, table.zero_stage
    element = np.array([_BYTES[p] for p in table.precisions], dtype=np.float64)[table.precision]
    mixed = element < 4

    local = _parameters_of_first_stage(model, tp, pp)
    parameters = local * element / np.where(zero >= 3, dp, 1)
    gradient_bytes = element + np.where(mixed & trainer.gradient_bytes_fp32_accumulation, 4, 0)
    gradients = local * gradient_bytes / np.where(zero >= 2, dp, 1)
    optimizer = local * np.where(mixed, 12.0, 8.0) / np.where(zero >= 1, dp, 1)  # fp32 master, m, v; in fp32 the weights are the master

    tokens = table.micro_batch_size * (cell.sequence_length // cp)
    layers = -(-model.num_layers // pp)
    in_flight = np.minimum(pp, table.grad_accum_steps)  # 1F1B: the first stage holds one micro-batch per stage behind it
    kept = np.zeros(len(table))
    working = np.zeros(len(table))
    for code, recompute in enumerate(table.recomputes):
        rows = table.recompute == code
        kept_layers, recomputed = _layer_bytes(model, recompute, cell.sequence_length, trainer, element[rows], tp[rows], layers[rows])
        kept[rows] = kept_layers
        working[rows] = recomputed
    activations = tokens * (kept * in_flight + working)
    # Logits: kept once in fp32 for the loss (4 bytes) with 8 bytes of temporaries in its backward, on the last stage only.
    last_is_first = pp == 1
    loss = np.where(last_is_first, 12.0 * tokens * model.vocab_size / tp, 0.0)
    return MemoryPrediction(parameters=parameters, gradients=gradients, optimizer=optimizer, activations=activations, loss=loss)


def _parameters_of_first_stage(model: ModelShape, tp: NDArray[np.int64], pp: NDArray[np.int64]) -> Floats:
    embedding = model.vocab_size * model.hidden_size
    heads = np.where((pp == 1) & (not model.tied_embeddings), 2, 1)
    layers = -(-model.num_layers // pp)
    parameters: Floats = (layers * model.parameters_per_layer + heads * embedding) / tp + np.where(pp == 1, model.hidden_size, 0)
    return parameters


def _layer_bytes(
    model: ModelShape,
    recompute: Recompute,
    sequence_length: int,
    trainer: Trainer,
    element: Floats,
    tp: NDArray[np.int64],
    layers: NDArray[np.int64],
) -> tuple[Floats, Floats]:
    """Bytes per token kept by all layers of a stage, and the working set of the one layer being recomputed."""
    full_layer = _kept_by_layer(model, Recompute(), sequence_length, trainer, element, tp)
    this_layer = _kept_by_layer(model, recompute, sequence_length, trainer, element, tp)
    recomputed = np.minimum(layers, recompute.num_layers or model.num_layers) if recompute.mode is not RecomputeMode.NONE else 0 * layers
    kept = recomputed * this_layer + (layers - recomputed) * full_layer
    return kept, np.where(recomputed > 0, full_layer - this_layer, 0.0)


def _kept_by_layer(
    model: ModelShape, recompute: Recompute, sequence_length: int, trainer: Trainer, element: Floats, tp: NDArray[np.int64]
) -> Floats:
    """Bytes per token that one layer keeps for its backward pass.

    In units of h at 2-byte elements: 8 + 2 + 4g + 2 + 8r + 4 heads/h, g = kv/q width, r = ffn/h (traced with fused RMSNorm and flash
    attention); inputs of column-parallel matmuls (4 of it) are not divided by tp.
    """
    h = model.hidden_size
    g, r = model.kv_size / h, model.ffn_hidden_size / h
    scale = element / 2.0
    attention = 6.0 * model.num_attention_heads * sequence_length if trainer.eager_attention else 0.0
    if recompute.mode is RecomputeMode.FULL:
        return 2.0 * h * scale
    if recompute.policy is SelectivePolicy.OPS:
        # Saved: wq, wv, w1, w2 outputs, attention output, inputs of the norms.
        return scale * h * (4.0 + (2 + 2 * g + 2 * r + 2 + 2) / tp) + scale * attention / tp
    undivided = 4.0 * h
    divided = h * (8 + 4 * g + 8 * r) + 4.0 * model.num_attention_heads
    if recompute.policy is SelectivePolicy.ATTENTION:
        attention = 0.0
    return scale * (undivided + (divided + attention) / tp)
