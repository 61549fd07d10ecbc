"""Predicted peak memory of one GPU, by part, for many layouts at once (numpy).

Closed forms of `workloads/llama` (docs/measuring.md). Without parallel sizes they are within 1 % of
its live tensors (`memory_allocated`), less the 16 bytes of every token's ids; tensor, pipeline and
ZeRO sharding divide them as the literature does. What other trainers, and an allocator, hold
besides are the constants of `Trainer`. Symbols: h hidden, k kv width, f ffn, a heads, s sequence
length, V vocabulary, e bytes of an element, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.traced_memory import Floats, TracedMemory
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Precision, Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import Ints, LayoutTable
from orchestrator.core.problem.model_shape import ModelShape

# fp8 products still keep bf16 activations.
_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 2}
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
        """What the fullest moment adds to what waits for the backward pass."""
        return self.loss + self.workspace

    @property
    def total(self) -> Floats:
        """The peak: live tensors, and what the trainer's constants add to them."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.loss + self.workspace + self.reserve


def predict_memory(
    table: LayoutTable, cell: Cell, trainer: Trainer, *, stage: Stage = Stage.FULLEST
) -> MemoryPrediction:
    """Predict the parts for every layout of a table, in bytes (arrays of the table's length)."""
    if stage is not Stage.FULLEST:
        return _predict_stage(table, cell, trainer, last=stage is Stage.LAST)
    first = _predict_stage(table, cell, trainer, last=False)
    pipelined = np.flatnonzero(table.pipeline_parallel_size > 1)
    if not len(pipelined):
        return first
    last = _predict_stage(table.take(pipelined), cell, trainer, last=True)
    fuller = last.total > first.total[pipelined]
    rows = pipelined[fuller]
    for part in fields(MemoryPrediction):
        getattr(first, part.name)[rows] = getattr(last, part.name)[fuller]
    return first


def _predict_stage(
    table: LayoutTable, cell: Cell, trainer: Trainer, *, last: bool
) -> MemoryPrediction:
    model = cell.model
    tp, pp, cp = (
        table.tensor_parallel_size,
        table.pipeline_parallel_size,
        table.context_parallel_size,
    )
    shards, zero = table.data_parallel_size * cp, table.zero_stage
    element = np.array([_BYTES[p] for p in table.precisions], dtype=np.float64)[table.precision]
    mixed = element < 4
    one_stage = pp == 1
    has_head = np.ones(len(table), dtype=np.bool_) if last else one_stage

    def sharded(bytes_of_all: Floats, *, stage: int) -> Floats:
        """What a rank holds, if ZeRO shards it from this stage on."""
        share: Floats = bytes_of_all / np.where(zero >= stage, shards, 1)
        return share

    layers = _layers_of_stage(model, pp, trainer, last=last)
    local = _weights_of_stage(model, layers, tp, one_stage, last=last)
    bucketed = np.where(mixed & (zero == 0) & (shards > 1), trainer.bucket_bytes, 0.0)
    gradient_bytes = np.where(mixed, trainer.gradient_bytes, 4.0) + bucketed

    tokens = table.micro_batch_size * (cell.sequence_length // cp)
    one = _micro_batch(table, cell, trainer, element, layers, tokens, has_head)
    # 1F1B: the first stage holds one micro-batch per stage behind it.
    in_flight = 1 if last else np.minimum(pp, table.grad_accum_steps)
    factor = np.where(one_stage, trainer.activation_factor, trainer.pipeline_activation_factor)
    activations = one.kept * in_flight * factor
    layer_moment = one.layer + _gathered_weights(model, table, element, local, trainer)
    widened = mixed & (trainer.gradient_bytes < 4)
    stepping = np.minimum(local, _OPTIMIZER_CHUNK) * _stepping_per_weight(
        zero, shards, element, widened=widened
    )
    if trainer.stepping_bytes:
        stepping = np.maximum(stepping, sharded(local * trainer.stepping_bytes, stage=1))
    # No activation is alive in the optimizer's step and at the end of the backward pass.
    end_moment = np.maximum(stepping, one.end) - activations
    workspace = np.maximum(layer_moment, end_moment)
    workspace_wins = workspace >= one.head
    return MemoryPrediction(
        parameters=sharded(local * np.where(mixed, trainer.parameter_bytes, 4.0), stage=3),
        gradients=sharded(local * gradient_bytes, stage=2),
        # In fp32 the weights are the master.
        optimizer=sharded(local * np.where(mixed, trainer.optimizer_bytes, 8.0), stage=1),
        activations=activations,
        loss=np.where(workspace_wins, 0.0, one.head),
        workspace=np.where(workspace_wins, workspace, 0.0),
        reserve=np.full(len(table), trainer.reserve_bytes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _MicroBatch:
    """Bytes of one micro-batch."""

    kept: Floats  # by the stage's layers
    # On top of these, at the fullest moment of the last layer and of the head.
    layer: Floats
    head: Floats
    end: Floats  # when the backward pass of all layers is over, on top of nothing


def _micro_batch(
    table: LayoutTable,
    cell: Cell,
    trainer: Trainer,
    element: Floats,
    layers: Floats,
    tokens: Ints,
    has_head: NDArray[np.bool_],
) -> _MicroBatch:
    model, tp, one_stage = cell.model, table.tensor_parallel_size, table.pipeline_parallel_size == 1
    if trainer.traced is not None:
        return _traced_micro_batch(
            trainer.traced, table, cell, trainer, element, layers, tokens, has_head
        )
    kept, working = _layers(table, model, cell.sequence_length, trainer, element, layers)
    # The gradient of the head's weights, before it is added.
    head = np.where(has_head, element * model.vocab_size * model.hidden_size / tp, 0.0)
    # With tied embeddings it waits for the embedding's, through the backward of all layers. At its
    # end there are three: the head's, the embedding's, and their sum.
    waits = np.where(one_stage, head, 0.0) if model.tied_embeddings else np.zeros(len(table))
    return _MicroBatch(
        kept=tokens * kept,
        layer=tokens * working + waits,
        head=np.where(has_head, _head_moments(model, table, element, tokens, head, trainer), 0.0),
        end=3 * waits,
    )


def _traced_micro_batch(
    traced: TracedMemory,
    table: LayoutTable,
    cell: Cell,
    trainer: Trainer,
    element: Floats,
    layers: Floats,
    tokens: Ints,
    has_head: NDArray[np.bool_],
) -> _MicroBatch:
    # A mode that was not traced counts as none in every respect: its own closed form would divide
    # the bytes of none wrongly.
    recomputes = tuple(r if traced.has(r) else Recompute() for r in table.recomputes)
    table = replace(table, recomputes=recomputes)
    modes = [traced.of(recompute) for recompute in recomputes]
    plain = traced.of(Recompute())
    recomputed = _recomputed_layers(table, layers, cell.model)
    # The first layers are recomputed; the last one only if all are.
    of_last = np.where(recomputed == layers, table.recompute, len(modes))

    def look_up(part: str, code: Ints) -> Floats:
        each = [getattr(mode, part).at(tokens, cell.sequence_length) for mode in (*modes, plain)]
        found: Floats = np.array(each)[code, np.arange(len(code))]
        return found

    tp = table.tensor_parallel_size

    def share(kinds: Sequence[Recompute]) -> Floats:
        """The share of a layer's bytes that tensor parallelism leaves on a rank."""
        of_all = tuple(replace(kind, num_layers=None) for kind in kinds)
        split, whole = (
            _layers(
                replace(table, recomputes=of_all, tensor_parallel_size=sizes),
                cell.model,
                cell.sequence_length,
                trainer,
                element,
                layers,
            )[0]
            for sizes in (tp, np.ones_like(tp))  # traces are without tensor parallelism
        )
        return split / whole

    plain_share = share([Recompute()] * len(recomputes))
    plain_kept = plain.kept.at(tokens, cell.sequence_length) * plain_share
    return _MicroBatch(
        kept=recomputed * look_up("kept", table.recompute) * share(recomputes)
        + (layers - recomputed) * plain_kept,
        layer=look_up("backward", of_last) / tp,
        head=np.where(has_head, look_up("head", of_last), 0.0) / tp,
        end=np.where(has_head, look_up("end", of_last), 0.0) / tp,
    )


def _stepping_per_weight(
    zero: Ints, shards: Ints, element: Floats, *, widened: NDArray[np.bool_]
) -> Floats:
    """Bytes per weight of a chunk in the optimizer step: own gradients in fp32, all new weights."""
    own = np.where(zero >= 1, shards, 1)
    gathered = np.where(own > 1, element, 0.0)
    stepping: Floats = np.where(widened, 4.0, 0.0) / own + gathered
    return stepping


def _layers_of_stage(model: ModelShape, pp: Ints, trainer: Trainer, *, last: bool) -> Floats:
    """The layers of the first or the last stage: equally many, or balanced with the head's work."""
    total = float(model.num_layers)
    if trainer.stages_by_work:
        head = model.vocab_size * model.hidden_size / model.parameters_per_layer  # in layers
        share = (total + head) / pp
        fair = np.maximum(np.ceil(share - head), 0.0) if last else np.ceil(share)
        return np.where(pp == 1, total, np.minimum(fair, total))
    first: Floats = np.ceil(total / pp)
    return np.maximum(total - first * (pp - 1), 1.0) if last else first


def _weights_of_stage(
    model: ModelShape, layers: Floats, tp: Ints, one_stage: NDArray[np.bool_], *, last: bool
) -> Floats:
    embedding = model.vocab_size * model.hidden_size
    tables = 1 if model.tied_embeddings else np.where(one_stage, 2, 1)
    norm = model.hidden_size if last else np.where(one_stage, model.hidden_size, 0)
    weights: Floats = (layers * model.parameters_per_layer + tables * embedding) / tp + norm
    return weights


def _gathered_weights(
    model: ModelShape, table: LayoutTable, element: Floats, local: Floats, trainer: Trainer
) -> Floats | float:
    """The weights that ZeRO 3 gathers to compute with: the units in use, at most what it sharded.

    The embedding may be the largest unit.
    """
    sharded = table.zero_stage >= 3
    if not sharded.any():
        return 0.0
    shards = table.data_parallel_size * table.context_parallel_size
    largest = max(model.parameters_per_layer, model.vocab_size * model.hidden_size)
    wanted = trainer.gathered_units * (largest / table.tensor_parallel_size) * element
    return np.where(sharded, np.minimum(wanted, local * element * (1.0 - 1.0 / shards)), 0.0)


def _head_moments(
    model: ModelShape,
    table: LayoutTable,
    element: Floats,
    tokens: Ints,
    head_gradient: Floats,
    trainer: Trainer,
) -> Floats:
    """The fuller of the loss's backward and the head's.

    The loss's: final norm, logits in fp32 and their gradient, 12 bytes a logit, unchunked.
    """
    h, vocab = model.hidden_size, model.vocab_size / table.tensor_parallel_size
    # No measured run separates the last stage of a pipeline from its first with one micro-batch:
    # a pipeline counts as accumulating.
    accumulates = (table.grad_accum_steps > 1) | (table.pipeline_parallel_size > 1)
    logit_bytes = trainer.logit_bytes * np.where(accumulates, 1.0 + trainer.accumulated_logits, 1.0)
    fuller: Floats = np.maximum(
        tokens * (2 * element * h + 4 + logit_bytes * vocab),
        tokens * (3 * element * h + element * vocab) + head_gradient,
    )
    return fuller


def _layers(
    table: LayoutTable,
    model: ModelShape,
    sequence_length: int,
    trainer: Trainer,
    element: Floats,
    layers: Floats,
) -> tuple[Floats, Floats]:
    """Bytes per token that all layers of a stage keep, and that the last one's backward adds."""
    tp, pp = table.tensor_parallel_size, table.pipeline_parallel_size
    # Few kinds of layers, many rows: one entry per recomputation and precision, the last row plain.
    kinds = [
        [_LayerBytes.of(model, r, sequence_length, trainer, _BYTES[p]) for p in table.precisions]
        for r in (*table.recomputes, Recompute())
    ]

    def look_up(name: str, code: Ints | int) -> Floats:
        each = np.array([[getattr(kind, name) for kind in row] for row in kinds])
        found: Floats = each[code, table.precision]
        return found

    def kept_by(code: Ints | int) -> Floats:
        gathered, split = look_up("gathered", code), look_up("split", code)
        return look_up("whole", code) + gathered * share + split / tp

    share = np.where(
        pp > 1,
        trainer.gathered_inputs_in_pipeline * (1.0 - 2.0 / np.maximum(pp, 2)),
        trainer.gathered_inputs,
    )
    share = share + (1.0 - share) / tp
    none, mine = kept_by(-1), kept_by(table.recompute)
    recomputed = _recomputed_layers(table, layers, model)
    kept = recomputed * mine + (layers - recomputed) * none
    # Gradients of the layer's widest products.
    widest = element * (model.hidden_size + 2 * model.ffn_hidden_size) / tp
    all_recomputed = recomputed == layers
    redone, more = look_up("redone", table.recompute), look_up("more", table.recompute)
    working = np.where(all_recomputed, redone * (none - mine) + more / tp, 0.0) + widest
    if trainer.eager_attention:
        core = np.where(all_recomputed, look_up("core", table.recompute), look_up("core", -1))
        working = np.maximum(working, core / tp)
    return kept, working


def _recomputed_layers(table: LayoutTable, layers: Floats, model: ModelShape) -> Floats:
    """How many of a stage's layers are recomputed."""
    by_code = np.array([r.layers_of(model.num_layers) for r in table.recomputes])
    found: Floats = np.minimum(layers, by_code[table.recompute])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerBytes:
    """Bytes per token of one layer of a kind: kept for its backward pass, and needed in it.

    With fused norms e(6h+2k+4f)+4a+8 are kept, eager e(8h+4f)+(4 or 6)as+8;
    selective_ops e(4h+k+f)+4a; full e h.
    """

    whole: float  # kept on every rank, whatever the tensor parallel size
    # Inputs of column-parallel products: whole if the trainer keeps what it gathered, else split.
    gathered: float
    split: float
    redone: float  # 1 if the layer's backward begins by computing again what was not kept
    more: float  # of the backward, besides what is recomputed and the widest products' gradients
    core: float  # of eager attention's backward, besides what the layers keep

    @classmethod
    def of(
        cls,
        model: ModelShape,
        recompute: Recompute,
        sequence_length: int,
        trainer: Trainer,
        element: int,
    ) -> _LayerBytes:
        h, k, f = model.hidden_size, model.kv_size, model.ffn_hidden_size
        a = model.num_attention_heads
        square, eager, mixed = a * sequence_length, trainer.eager_attention, element < 4
        flash = 4.0 * a
        if recompute.mode is RecomputeMode.FULL:
            return cls(
                whole=0.0 if trainer.sequence_parallel else element * h,
                gathered=0.0,
                split=element * h if trainer.sequence_parallel else 0.0,
                redone=1.0,
                more=0.0,
                core=12.0 * square + element * (6 * h + 2 * k),
            )
        if recompute.policy is SelectivePolicy.OPS:
            return cls(
                whole=0.0,
                gathered=element * 2.0 * h,
                split=element * (2 * h + k + f) + (element * square if eager else flash),
                redone=1.0,
                more=element * h,
                core=(10.0 if mixed else 8.0) * square + element * (5 * h + k),
            )
        if recompute.policy is SelectivePolicy.ATTENTION:
            # Attention is recomputed later than the feed-forward's backward.
            attention, core = 0.0, 12.0 * square + element * (2 * h - 4 * f)
        else:
            scores = (6.0 if mixed else 4.0) * square + element * (2 * h - 2 * k)
            attention = scores if eager else flash
            core = (6.0 if mixed else 8.0) * square + element * (2 * k - 2 * h - 4 * f)
        # Inputs and residuals of the two norms are split by sequence parallelism only.
        norms = element * 2.0 * h
        whole_norms, split_norms = (0.0, norms) if trainer.sequence_parallel else (norms, 0.0)
        return cls(
            whole=8.0 + whole_norms,
            gathered=element * 2.0 * h,
            split=element * (2 * h + 2 * k + 4 * f) + attention + split_norms,
            redone=0.0,
            more=0.0,
            core=core,
        )
