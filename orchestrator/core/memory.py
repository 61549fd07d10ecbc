"""Predicted peak memory of one GPU, by part, for many layouts at once (numpy).

Closed forms of `workloads/llama` (docs/measuring.md), within 1 % there for live tensors (`memory_allocated`) without parallel sizes, and
without the 16 bytes of every token's ids; tensor, pipeline and ZeRO sharding divide them as the literature does. What an allocator holds
on top is not predicted. Symbols: h hidden, k kv width, f ffn, a heads, s sequence length, V vocabulary, e bytes of an element, T tokens
of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cell import Cell
from orchestrator.core.layout import Precision, Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.layout_table import Ints, LayoutTable
from orchestrator.core.model_shape import ModelShape

Floats = NDArray[np.float64]

_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 2}  # fp8 products still keep bf16 activations
_OPTIMIZER_CHUNK = 1 << 26  # weights for which the optimizer step widens bf16 gradients, or gathers shares, at once


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
    activations: Floats  # kept for the backward pass by all layers, for every micro-batch in flight
    temporaries: Floats  # on top of them at the fullest moment: loss, or a layer's recomputation and backward

    @property
    def total(self) -> Floats:
        """The peak of live tensors."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporaries


def predict_memory(table: LayoutTable, cell: Cell, trainer: Trainer) -> MemoryPrediction:
    """Predict the parts for every layout of a table, in bytes (arrays of the table's length)."""
    model = cell.model
    tp, pp, cp = table.tensor_parallel_size, table.pipeline_parallel_size, table.context_parallel_size
    shards, zero = table.data_parallel_size * cp, table.zero_stage
    element = np.array([_BYTES[p] for p in table.precisions], dtype=np.float64)[table.precision]
    mixed = element < 4

    local = _parameters_of_first_stage(model, tp, pp)
    accumulated = np.where(mixed & trainer.gradient_bytes_fp32_accumulation, 4.0, 0.0)
    parameters = local * element / np.where(zero >= 3, shards, 1)
    gradients = local * (element + accumulated) / np.where(zero >= 2, shards, 1)
    optimizer = local * np.where(mixed, 12.0, 8.0) / np.where(zero >= 1, shards, 1)  # fp32 master, m, v; in fp32 the weights are the master

    tokens = table.micro_batch_size * (cell.sequence_length // cp)
    kept, working = _layers(table, model, cell.sequence_length, trainer, element)
    in_flight = np.minimum(pp, table.grad_accum_steps)  # 1F1B: the first stage holds one micro-batch per stage behind it
    head = np.where(pp == 1, element * model.vocab_size * model.hidden_size / tp, 0.0)  # its weights' gradient, before it is added
    waits = head if model.tied_embeddings else np.zeros(len(table))  # for the embedding's, through the backward pass of all layers
    temporaries = np.maximum(tokens * working + waits, np.where(pp == 1, _head_moments(model, element, tp, tokens, head), 0.0))
    stepping = np.minimum(local, _OPTIMIZER_CHUNK) * _stepping_per_weight(zero, shards, element, widened=mixed & (accumulated == 0))
    activations = tokens * kept * in_flight
    # No activation is alive in the optimizer step, nor when tied embeddings add up: the head's gradient, the embedding's, and their sum.
    alone = np.maximum(stepping, 3 * waits)
    return MemoryPrediction(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        temporaries=np.maximum(temporaries, alone - activations),
    )


def _stepping_per_weight(zero: Ints, shards: Ints, element: Floats, *, widened: NDArray[np.bool_]) -> Floats:
    """Bytes per weight of a chunk in the optimizer step, when no activation is alive: own gradients in fp32, and everybody's new weights."""
    own = np.where(zero >= 1, shards, 1)
    gathered = np.where(own > 1, element, 0.0)
    stepping: Floats = np.where(widened, 4.0, 0.0) / own + gathered
    return stepping


def _parameters_of_first_stage(model: ModelShape, tp: Ints, pp: Ints) -> Floats:
    embedding = model.vocab_size * model.hidden_size
    heads = np.where((pp == 1) & (not model.tied_embeddings), 2, 1)
    layers = -(-model.num_layers // pp)
    parameters: Floats = (layers * model.parameters_per_layer + heads * embedding) / tp + np.where(pp == 1, model.hidden_size, 0)
    return parameters


def _head_moments(model: ModelShape, element: Floats, tp: Ints, tokens: Ints, head_gradient: Floats) -> Floats:
    """The fuller of the loss's backward (final norm, logits in fp32 and their gradient: 12 bytes a logit, unchunked) and the head's."""
    h, vocab = model.hidden_size, model.vocab_size / tp
    fuller: Floats = np.maximum(
        tokens * (2 * element * h + 4 + 12 * vocab),
        tokens * (3 * element * h + element * vocab) + head_gradient,
    )
    return fuller


def _layers(table: LayoutTable, model: ModelShape, sequence_length: int, trainer: Trainer, element: Floats) -> tuple[Floats, Floats]:
    """Bytes per token that all layers of a stage keep, and the working set of the last layer's backward beyond what it keeps."""
    tp = table.tensor_parallel_size
    layers = -(-model.num_layers // table.pipeline_parallel_size)
    kept, working = np.zeros(len(table)), np.zeros(len(table))
    none = _kept_by_layer(model, Recompute(), sequence_length, trainer, element, tp)
    for code, recompute in enumerate(table.recomputes):
        rows = table.recompute == code
        mine = _kept_by_layer(model, recompute, sequence_length, trainer, element, tp)
        recomputed = np.minimum(layers, recompute.layers_of(model.num_layers))
        kept[rows] = (recomputed * mine + (layers - recomputed) * none)[rows]
        last = _backward_of_last_layer(model, recompute, sequence_length, trainer, element, tp, recomputed=none - mine)
        last_as_it_is = _backward_of_last_layer(model, Recompute(), sequence_length, trainer, element, tp, recomputed=np.zeros(len(table)))
        working[rows] = np.where(recomputed == layers, last, last_as_it_is)[rows]
    return kept, working


def _backward_of_last_layer(
    model: ModelShape, recompute: Recompute, sequence_length: int, trainer: Trainer, element: Floats, tp: Ints, *, recomputed: Floats
) -> Floats:
    """Bytes per token beyond what the layers keep, in the fuller part of the last layer's backward: feed-forward, or eager attention."""
    h, k, f = model.hidden_size, model.kv_size, model.ffn_hidden_size
    gradients = element * (h + 2 * f) / tp  # of the layer's widest products
    if recompute.mode is RecomputeMode.FULL:
        feed_forward, core, scores = recomputed + gradients, 6 * h + 2 * k, np.full(len(element), 12.0)
    elif recompute.policy is SelectivePolicy.OPS:
        feed_forward, core, scores = recomputed + gradients + element * h / tp, 5 * h + k, np.where(element < 4, 10.0, 8.0)
    elif recompute.policy is SelectivePolicy.ATTENTION:  # its attention is recomputed later
        feed_forward, core, scores = gradients, 2 * h - 4 * f, np.full(len(element), 12.0)
    else:
        feed_forward, core, scores = gradients, 2 * k - 2 * h - 4 * f, np.where(element < 4, 6.0, 8.0)
    if not trainer.eager_attention:
        return feed_forward
    fuller: Floats = np.maximum(feed_forward, (scores * model.num_attention_heads * sequence_length + element * core) / tp)
    return fuller


def _kept_by_layer(model: ModelShape, recompute: Recompute, sequence_length: int, trainer: Trainer, element: Floats, tp: Ints) -> Floats:
    """Bytes per token that one layer keeps for its backward pass.

    With fused norms: e(6h+2k+4f)+4a+8, eager e(8h+4f)+(4 or 6)as+8; selective_ops e(4h+k+f)+4a; full e h. Tensor parallelism divides
    all but the inputs of column-parallel products, which every rank gathers (2h of the 6h), and what is kept instead of a layer.
    """
    h, k, f, a = model.hidden_size, model.kv_size, model.ffn_hidden_size, model.num_attention_heads
    eager = trainer.eager_attention
    if recompute.mode is RecomputeMode.FULL:
        return element * h
    if recompute.policy is SelectivePolicy.OPS:
        core = element * a * sequence_length if eager else np.full(len(element), 4.0 * a)
        ops: Floats = element * 2 * h + (element * (2 * h + k + f) + core) / tp
        return ops
    if recompute.policy is SelectivePolicy.ATTENTION:
        core = np.zeros(len(element))
    else:
        core = (
            np.where(element < 4, 6.0, 4.0) * a * sequence_length + element * (2 * h - 2 * k) if eager else np.full(len(element), 4.0 * a)
        )
    layer: Floats = element * 2 * h + 8 + (element * (4 * h + 2 * k + 4 * f) + core) / tp
    return layer
