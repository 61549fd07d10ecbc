"""Predicted peak memory of one GPU, by part, for many layouts at once (numpy).

Closed forms of `workloads/llama` (docs/measuring.md), within 1 % there for live tensors (`memory_allocated`) without parallel sizes, and
without the 16 bytes of every token's ids; tensor, pipeline and ZeRO sharding divide them as the literature does. What other trainers, and
an allocator, hold besides are the constants of `Trainer`. Symbols: h hidden, k kv width, f ffn, a heads, s sequence length, V vocabulary,
e bytes of an element, T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.traced_memory import TracedMemory
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Precision, Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import Ints, LayoutTable
from orchestrator.core.problem.model_shape import ModelShape

Floats = NDArray[np.float64]

_BYTES = {
    Precision.FP32: 4,
    Precision.BF16: 2,
    Precision.FP16: 2,
    Precision.FP8: 2,
}  # fp8 products still keep bf16 activations
_OPTIMIZER_CHUNK = (
    1 << 26
)  # weights for which the optimizer step widens bf16 gradients, or gathers shares, at once


class Stage(StrEnum):
    """The pipeline stage whose memory is asked for: a log may show the first one's, and the last may be the fullest."""

    FULLEST = "fullest"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPrediction:
    """Bytes per GPU of one pipeline stage, one entry per layout."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats  # kept for the backward pass by all layers, for every micro-batch in flight
    loss: Floats  # on top of them where the loss, or the head's backward, is the fullest moment: logits in fp32 and their gradient
    workspace: Floats  # on top of them where a layer's recomputation and backward, or the optimizer's step, is; gathered weights
    reserve: Floats  # what the allocator and other streams hold besides

    @property
    def temporaries(self) -> Floats:
        """What the fullest moment adds to what waits for the backward pass."""
        return self.loss + self.workspace

    @property
    def total(self) -> Floats:
        """The peak: of live tensors, and of what the trainer's constants add to them."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.loss
            + self.workspace
            + self.reserve
        )


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


def playbook_activation_bytes(
    recompute: Recompute,
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    sequence_length: int,
    micro_batch_size: int = 1,
) -> float:
    """Activations as the Ultra-Scale Playbook's figure "memory-recomputation" counts them: a GPT of 2-byte activations and eager attention.

    L s b h (34 + 5 a s / h), selective 34 L s b h, full 2 L s b h (Korthikanti et al. 2022), and s b h of the embedding. With flash
    attention the square of the sequence does not exist: `predict_memory` is for that.
    """
    tokens_hidden = float(micro_batch_size * sequence_length * hidden_size)
    match recompute.mode:
        case RecomputeMode.NONE:
            per_layer = 34 + 5 * num_attention_heads * sequence_length / hidden_size
        case RecomputeMode.SELECTIVE:
            per_layer = 34.0
        case RecomputeMode.FULL:
            per_layer = 2.0
    return num_layers * tokens_hidden * per_layer + tokens_hidden


def playbook_parameters(
    *, num_layers: int, hidden_size: int, vocab_size: int, sequence_length: int = 0
) -> int:
    """Weights as the playbook counts them (:196): h V + L (12 h^2 + 13 h) + 2 h, and s h where positions are learned."""
    h = hidden_size
    return h * vocab_size + num_layers * (12 * h * h + 13 * h) + 2 * h + sequence_length * h


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

    layers = _layers_of_stage(model, pp, trainer, last=last)
    local = _weights_of_stage(model, layers, tp, one_stage, last=last)
    gradient_element = np.where(mixed, trainer.gradient_bytes, 4.0)
    bucketed = np.where(mixed & (zero == 0) & (shards > 1), trainer.bucket_bytes, 0.0)
    parameters = (
        local * np.where(mixed, trainer.parameter_bytes, 4.0) / np.where(zero >= 3, shards, 1)
    )
    gradients = local * (gradient_element + bucketed) / np.where(zero >= 2, shards, 1)
    optimizer = (
        local * np.where(mixed, trainer.optimizer_bytes, 8.0) / np.where(zero >= 1, shards, 1)
    )  # in fp32 the weights are the master

    tokens = table.micro_batch_size * (cell.sequence_length // cp)
    one = _micro_batch(table, cell, trainer, element, layers, tokens, has_head)
    in_flight = (
        1 if last else np.minimum(pp, table.grad_accum_steps)
    )  # 1F1B: the first stage holds one micro-batch per stage behind it
    activations = (
        one.kept
        * in_flight
        * np.where(one_stage, trainer.activation_factor, trainer.pipeline_activation_factor)
    )
    layer_moment = one.layer + _gathered_weights(model, table, element, local, trainer)
    temporaries = np.maximum(layer_moment, one.head)
    widened = mixed & (trainer.gradient_bytes < 4)
    stepping = np.minimum(local, _OPTIMIZER_CHUNK) * _stepping_per_weight(
        zero, shards, element, widened=widened
    )
    if trainer.stepping_bytes:
        stepping = np.maximum(
            stepping, local * trainer.stepping_bytes / np.where(zero >= 1, shards, 1)
        )
    temporaries_then = np.maximum(stepping, one.end) - activations  # no activation is alive then
    workspace_wins = np.maximum(layer_moment, temporaries_then) >= one.head
    temporaries = np.maximum(temporaries, temporaries_then)
    return MemoryPrediction(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        loss=np.where(workspace_wins, 0.0, temporaries),
        workspace=np.where(workspace_wins, temporaries, 0.0),
        reserve=np.full(len(table), trainer.reserve_bytes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _MicroBatch:
    """Bytes of one micro-batch: kept by the stage's layers, and on top of them at the fullest moment of the last layer and of the head."""

    kept: Floats
    layer: Floats
    head: Floats
    end: Floats  # on top of nothing, when the backward pass of all layers is over


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
    head = np.where(
        has_head, element * model.vocab_size * model.hidden_size / tp, 0.0
    )  # its weights' gradient, before it is added
    # For the embedding's, through the backward of all layers; at its end there are three: the head's, the embedding's, and their sum.
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
    # A mode that was not traced is none in every respect: its own closed form would share the bytes of none as it shares others.
    table = replace(
        table,
        recomputes=tuple(
            recompute if traced.has(recompute) else Recompute() for recompute in table.recomputes
        ),
    )
    modes = [traced.of(recompute) for recompute in table.recomputes]
    plain = traced.of(Recompute())
    recomputed = np.minimum(
        layers,
        np.array([r.layers_of(cell.model.num_layers) for r in table.recomputes])[table.recompute],
    )
    of_last = np.where(
        recomputed == layers, table.recompute, len(modes)
    )  # the first layers are recomputed: the last one if all are

    def look_up(part: str, code: Ints) -> Floats:
        each = [getattr(mode, part).at(tokens, cell.sequence_length) for mode in (*modes, plain)]
        found: Floats = np.array(each)[code, np.arange(len(code))]
        return found

    tp = table.tensor_parallel_size
    whole = replace(table, tensor_parallel_size=np.ones_like(tp))  # as traces know it

    def share(of: Recompute | None) -> Floats:
        """What tensor parallelism leaves on a rank of a layer's bytes: of one kind, None for each row's own."""
        kinds = table.recomputes if of is None else (of,) * len(table.recomputes)
        kinds = tuple(replace(kind, num_layers=None) for kind in kinds)
        split, all_of_it = (
            _layers(
                replace(some, recomputes=kinds),
                cell.model,
                cell.sequence_length,
                trainer,
                element,
                layers,
            )[0]
            for some in (table, whole)
        )
        return split / all_of_it

    plain_kept = plain.kept.at(tokens, cell.sequence_length) * share(Recompute())
    return _MicroBatch(
        kept=recomputed * look_up("kept", table.recompute) * share(None)
        + (layers - recomputed) * plain_kept,
        layer=look_up("backward", of_last) / tp,
        head=np.where(has_head, look_up("head", of_last), 0.0) / tp,
        end=np.where(has_head, look_up("end", of_last), 0.0) / tp,
    )


def _stepping_per_weight(
    zero: Ints, shards: Ints, element: Floats, *, widened: NDArray[np.bool_]
) -> Floats:
    """Bytes per weight of a chunk in the optimizer step, when no activation is alive: own gradients in fp32, and everybody's new weights."""
    own = np.where(zero >= 1, shards, 1)
    gathered = np.where(own > 1, element, 0.0)
    stepping: Floats = np.where(widened, 4.0, 0.0) / own + gathered
    return stepping


def _layers_of_stage(model: ModelShape, pp: Ints, trainer: Trainer, *, last: bool) -> Floats:
    """How many layers the first or the last stage holds: as many each, or as many as balance the head's work at the end."""
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
    """What ZeRO 3 gathers to compute with: the units in use, the embedding being the largest; never more than it had shared out."""
    sharded = table.zero_stage >= 3
    if not sharded.any():
        return 0.0
    shards = table.data_parallel_size * table.context_parallel_size
    unit = (
        max(model.parameters_per_layer, model.vocab_size * model.hidden_size)
        / table.tensor_parallel_size
    )
    wanted = trainer.gathered_units * unit * element
    return np.where(sharded, np.minimum(wanted, local * element * (1.0 - 1.0 / shards)), 0.0)


def _head_moments(
    model: ModelShape,
    table: LayoutTable,
    element: Floats,
    tokens: Ints,
    head_gradient: Floats,
    trainer: Trainer,
) -> Floats:
    """The fuller of the loss's backward (final norm, logits in fp32 and their gradient: 12 bytes a logit, unchunked) and the head's."""
    h, vocab = model.hidden_size, model.vocab_size / table.tensor_parallel_size
    # No table tells the last stage of a pipeline from its first with one micro-batch: there, what could be held is.
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
    """Bytes per token that all layers of a stage keep, and the working set of the last layer's backward beyond what it keeps."""
    tp = table.tensor_parallel_size
    # Few kinds of layers, many rows: the bytes of each kind are looked up by the codes of recomputation and precision.
    kinds = [
        [_LayerBytes.of(model, r, sequence_length, trainer, _BYTES[p]) for p in table.precisions]
        for r in table.recomputes
    ]
    plain = [
        _LayerBytes.of(model, Recompute(), sequence_length, trainer, _BYTES[p])
        for p in table.precisions
    ]

    def look_up(name: str) -> Floats:
        found: Floats = np.array([[getattr(kind, name) for kind in row] for row in kinds])[
            table.recompute, table.precision
        ]
        return found

    def look_up_plain(name: str) -> Floats:
        found: Floats = np.array([getattr(kind, name) for kind in plain])[table.precision]
        return found

    pp = table.pipeline_parallel_size
    share = np.where(
        pp > 1,
        trainer.gathered_inputs_in_pipeline * (1.0 - 2.0 / np.maximum(pp, 2)),
        trainer.gathered_inputs,
    )
    share = share + (1.0 - share) / tp
    none = look_up_plain("whole") + look_up_plain("gathered") * share + look_up_plain("split") / tp
    if all(r.mode is RecomputeMode.NONE for r in table.recomputes):
        mine, recomputed = none, np.zeros(len(table))
    else:
        mine = look_up("whole") + look_up("gathered") * share + look_up("split") / tp
        recomputed = np.minimum(
            layers,
            np.array([r.layers_of(model.num_layers) for r in table.recomputes])[table.recompute],
        )
    kept = recomputed * mine + (layers - recomputed) * none
    widest = (
        element * (model.hidden_size + 2 * model.ffn_hidden_size) / tp
    )  # gradients of the layer's widest products
    all_recomputed = recomputed == layers
    working = (
        np.where(all_recomputed, look_up("redone") * (none - mine) + look_up("more") / tp, 0.0)
        + widest
    )
    if trainer.eager_attention:
        working = np.maximum(
            working, np.where(all_recomputed, look_up("core"), look_up_plain("core")) / tp
        )
    return kept, working


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerBytes:
    """Bytes per token of one layer of a kind: kept for its backward pass, and needed in it.

    With fused norms e(6h+2k+4f)+4a+8 are kept, eager e(8h+4f)+(4 or 6)as+8; selective_ops e(4h+k+f)+4a; full e h.
    """

    whole: float  # kept on every rank, whatever the tensor parallel size
    gathered: float  # inputs of column-parallel products: whole where the trainer keeps what it gathered, split where it gathers again
    split: float
    redone: float  # 1 where the layer's backward begins by computing again what was not kept
    more: (
        float  # of the backward, beyond what is recomputed and the gradients of the widest products
    )
    core: float  # of eager attention's backward, beyond what the layers keep

    @classmethod
    def of(
        cls,
        model: ModelShape,
        recompute: Recompute,
        sequence_length: int,
        trainer: Trainer,
        element: int,
    ) -> _LayerBytes:
        h, k, f, a = (
            model.hidden_size,
            model.kv_size,
            model.ffn_hidden_size,
            model.num_attention_heads,
        )
        square, eager, mixed = a * sequence_length, trainer.eager_attention, element < 4
        flash = 4.0 * a
        if recompute.mode is RecomputeMode.FULL:
            kept = element * h
            sequence_parallel = trainer.sequence_parallel
            return cls(
                whole=0.0 if sequence_parallel else kept,
                gathered=0.0,
                split=kept if sequence_parallel else 0.0,
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
        # Inputs and residuals of the two norms are split by sequence parallelism only.
        norms = element * 2.0 * h
        if (
            recompute.policy is SelectivePolicy.ATTENTION
        ):  # its attention is recomputed later than the feed-forward's backward
            attention, core = 0.0, 12.0 * square + element * (2 * h - 4 * f)
        else:
            attention = (
                (6.0 if mixed else 4.0) * square + element * (2 * h - 2 * k) if eager else flash
            )
            core = (6.0 if mixed else 8.0) * square + element * (2 * k - 2 * h - 4 * f)
        return cls(
            whole=8.0 + (0.0 if trainer.sequence_parallel else norms),
            gathered=element * 2.0 * h,
            split=element * (2 * h + 2 * k + 4 * f)
            + attention
            + (norms if trainer.sequence_parallel else 0.0),
            redone=0.0,
            more=0.0,
            core=core,
        )
