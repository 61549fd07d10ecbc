"""Predicted peak memory of one GPU, by part, for many layouts at once (numpy).

Closed forms of `workloads/llama` (docs/measuring.md). Without parallel sizes they are within 1 % of
its live tensors (`memory_allocated`), less the 16 bytes of every token's ids; tensor, pipeline and
ZeRO sharding divide them as the literature does. The constants of `Trainer` say what other trainers
and an allocator hold in addition. Symbols: h hidden, k kv width, f ffn, a heads, s sequence
length, V vocabulary, e bytes of an element, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from operator import attrgetter

import numpy as np

from orchestrator.core.physics.traced_memory import Floats, TracedMemory
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Precision, Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import Ints, LayoutTable, Mask
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
    rows = _StageRows(table=table, cell=cell, trainer=trainer, last=stage is Stage.LAST)
    found = _predict_stage(rows)
    if stage is not Stage.FULLEST:
        return found
    pipelined = np.flatnonzero(table.pipeline_parallel_size > 1)
    if len(pipelined):
        last = _predict_stage(replace(rows, table=table.take(pipelined), last=True))
        fuller = last.total > found.total[pipelined]
        for part in fields(MemoryPrediction):
            getattr(found, part.name)[pipelined[fuller]] = getattr(last, part.name)[fuller]
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _StageRows:
    """The layouts of a table, on one rank of their first or last pipeline stage."""

    table: LayoutTable
    cell: Cell
    trainer: Trainer
    last: bool

    @cached_property
    def element(self) -> Floats:
        """Bytes of an activation's element."""
        by_code = np.array([_BYTES[p] for p in self.table.precisions], dtype=np.float64)
        found: Floats = by_code[self.table.precision]
        return found

    @cached_property
    def one_stage(self) -> Mask:
        mask: Mask = self.table.pipeline_parallel_size == 1
        return mask

    @cached_property
    def has_head(self) -> Mask:
        return np.ones_like(self.one_stage) if self.last else self.one_stage

    @cached_property
    def shards(self) -> Ints:
        """Ranks that ZeRO shards over."""
        return self.table.data_parallel_size * self.table.context_parallel_size

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
        first: Floats = np.ceil(total / pp)
        return np.maximum(total - first * (pp - 1), 1.0) if self.last else first

    @property
    def recomputed_layers(self) -> Floats:
        num = self.cell.model.num_layers
        by_code = np.array([r.layers_of(num) for r in self.table.recomputes])
        found: Floats = np.minimum(self.layers, by_code[self.table.recompute])
        return found

    @cached_property
    def weights(self) -> Floats:
        model = self.cell.model
        embedding = model.vocab_size * model.hidden_size
        tables = 1 if model.tied_embeddings else np.where(self.one_stage, 2, 1)
        split = self.layers * model.parameters_per_layer + tables * embedding
        norm = np.where(self.has_head, model.hidden_size, 0)
        weights: Floats = split / self.table.tensor_parallel_size + norm
        return weights

    def sharded(self, bytes_of_all: Floats, *, zero_stage: int) -> Floats:
        """What a rank holds if ZeRO shards it from this stage on."""
        share: Floats = bytes_of_all / np.where(self.table.zero_stage >= zero_stage, self.shards, 1)
        return share


def _predict_stage(rows: _StageRows) -> MemoryPrediction:
    table, trainer, element, weights = rows.table, rows.trainer, rows.element, rows.weights
    mixed = element < 4
    unsharded = (table.zero_stage == 0) & (rows.shards > 1)
    bucketed = np.where(mixed & unsharded, trainer.bucket_bytes, 0.0)
    gradient_bytes = np.where(mixed, trainer.gradient_bytes, 4.0) + bucketed
    one = _micro_batch(rows) if trainer.traced is None else _traced(rows, trainer.traced)
    # 1F1B: the first stage holds one micro-batch per stage behind it.
    in_flight = 1 if rows.last else np.minimum(table.pipeline_parallel_size, table.grad_accum_steps)
    factor = np.where(rows.one_stage, trainer.activation_factor, trainer.pipeline_activation_factor)
    activations = one.kept * in_flight * factor
    # No activation is alive in the optimizer's step and at the end of the backward pass.
    end_moment = np.maximum(_stepping(rows), one.end) - activations
    workspace = np.maximum(one.layer + _gathered_weights(rows), end_moment)
    workspace_wins = workspace >= one.head
    return MemoryPrediction(
        parameters=rows.sharded(
            weights * np.where(mixed, trainer.parameter_bytes, 4.0), zero_stage=3
        ),
        gradients=rows.sharded(weights * gradient_bytes, zero_stage=2),
        # In fp32 the weights are the master.
        optimizer=rows.sharded(
            weights * np.where(mixed, trainer.optimizer_bytes, 8.0), zero_stage=1
        ),
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
    # When the backward pass of all layers is over, on top of nothing.
    end: Floats


def _micro_batch(rows: _StageRows) -> _MicroBatch:
    model, tokens, tp = rows.cell.model, rows.tokens, rows.table.tensor_parallel_size
    kept, working = _layers(rows)
    # The gradient of the head's weights, before it is added.
    head = np.where(rows.has_head, rows.element * model.vocab_size * model.hidden_size / tp, 0.0)
    # With tied embeddings it waits for the embedding's, through the backward of all layers. At its
    # end there are three: the head's, the embedding's, and their sum.
    waits = np.where(rows.one_stage, head, 0.0) if model.tied_embeddings else np.zeros(len(head))
    return _MicroBatch(
        kept=tokens * kept,
        layer=tokens * working + waits,
        head=np.where(rows.has_head, _head_moments(rows, head), 0.0),
        end=3 * waits,
    )


def _traced(rows: _StageRows, traced: TracedMemory) -> _MicroBatch:
    # A mode that was not traced counts as none in every respect: its own closed form would divide
    # the bytes of none wrongly.
    recomputes = tuple(r if traced.has(r) else Recompute() for r in rows.table.recomputes)
    table = replace(rows.table, recomputes=recomputes)
    rows = replace(rows, table=table)
    modes = [traced.of(recompute) for recompute in (*recomputes, Recompute())]
    tp, recomputed = table.tensor_parallel_size, rows.recomputed_layers
    none = np.full(len(table), len(recomputes))
    # The first layers are recomputed; the last one only if all are.
    of_last = np.where(recomputed == rows.layers, table.recompute, none)

    def look_up(part: str, code: Ints) -> Floats:
        length = rows.cell.sequence_length
        each = np.array([getattr(mode, part).at(rows.tokens, length) for mode in modes])
        found: Floats = each[code, np.arange(len(code))]
        return found

    def share(kinds: Sequence[Recompute]) -> Floats:
        """The share of a layer's bytes that tensor parallelism leaves on a rank."""
        of_all = tuple(replace(kind, num_layers=None) for kind in kinds)
        split, whole = (
            _layers(
                replace(rows, table=replace(table, recomputes=of_all, tensor_parallel_size=sizes))
            )[0]
            for sizes in (tp, np.ones_like(tp))  # traces are without tensor parallelism
        )
        return split / whole

    plain = look_up("kept", none) * share([Recompute()] * len(recomputes))
    return _MicroBatch(
        kept=recomputed * look_up("kept", table.recompute) * share(recomputes)
        + (rows.layers - recomputed) * plain,
        layer=look_up("backward", of_last) / tp,
        head=np.where(rows.has_head, look_up("head", of_last), 0.0) / tp,
        end=np.where(rows.has_head, look_up("end", of_last), 0.0) / tp,
    )


def _stepping(rows: _StageRows) -> Floats:
    """The optimizer's step: own gradients of a chunk in fp32, and all its new weights."""
    trainer = rows.trainer
    own = np.where(rows.table.zero_stage >= 1, rows.shards, 1)
    widened = (rows.element < 4) & (trainer.gradient_bytes < 4)
    per_weight = np.where(widened, 4.0, 0.0) / own + np.where(own > 1, rows.element, 0.0)
    stepping: Floats = np.minimum(rows.weights, _OPTIMIZER_CHUNK) * per_weight
    if not trainer.stepping_bytes:
        return stepping
    return np.maximum(stepping, rows.weights * trainer.stepping_bytes / own)


def _gathered_weights(rows: _StageRows) -> Floats:
    """The weights that ZeRO 3 gathers to compute with: the units in use, at most what it sharded.

    The embedding may be the largest unit.
    """
    model, table = rows.cell.model, rows.table
    is_gathered = table.zero_stage >= 3
    if not is_gathered.any():
        return np.zeros(len(table))
    largest = max(model.parameters_per_layer, model.vocab_size * model.hidden_size)
    unit = largest / table.tensor_parallel_size
    wanted = rows.trainer.gathered_units * unit * rows.element
    gathered = np.minimum(wanted, rows.weights * rows.element * (1.0 - 1.0 / rows.shards))
    return np.where(is_gathered, gathered, 0.0)


def _head_moments(rows: _StageRows, head_gradient: Floats) -> Floats:
    """The fuller of the loss's backward and the head's.

    The loss's: final norm, logits in fp32 and their gradient, 12 bytes a logit, unchunked.
    """
    table, trainer, element, tokens = rows.table, rows.trainer, rows.element, rows.tokens
    h, vocab = rows.cell.model.hidden_size, rows.cell.model.vocab_size / table.tensor_parallel_size
    # No measured run separates the last stage of a pipeline from its first with one micro-batch:
    # a pipeline counts as accumulating.
    accumulates = (table.grad_accum_steps > 1) | (table.pipeline_parallel_size > 1)
    logit_bytes = trainer.logit_bytes * np.where(accumulates, 1.0 + trainer.accumulated_logits, 1.0)
    fuller: Floats = np.maximum(
        tokens * (2 * element * h + 4 + logit_bytes * vocab),
        tokens * (3 * element * h + element * vocab) + head_gradient,
    )
    return fuller


def _layers(rows: _StageRows) -> tuple[Floats, Floats]:
    """Bytes per token that all layers of a stage keep, and that the last one's backward adds."""
    table, trainer, model = rows.table, rows.trainer, rows.cell.model
    tp, pp = table.tensor_parallel_size, table.pipeline_parallel_size
    # Few kinds of layers, many rows: one entry per recomputation and precision, the last row plain.
    length = rows.cell.sequence_length
    kinds = [
        [_BYTES_OF(_LayerBytes.of(model, r, length, trainer, _BYTES[p])) for p in table.precisions]
        for r in (*table.recomputes, Recompute())
    ]
    columns = np.array(kinds).reshape(-1, len(_LAYER_BYTES)).T.copy()
    bytes_of = dict(zip(_LAYER_BYTES, columns, strict=True))
    place_of: Ints = table.recompute
    # Most tables have one precision: then one place holds the plain layers of all rows.
    plain_place: Ints | int = len(table.recomputes)
    if len(table.precisions) > 1:
        place_of = place_of * len(table.precisions) + table.precision
        plain_place = plain_place * len(table.precisions) + table.precision

    def kept_by(place: Ints | int) -> Floats:
        # An intermediate array without a name costs no memory of its own.
        kept: Floats = (
            bytes_of["gathered"].take(place) * share
            + bytes_of["split"].take(place) / tp
            + bytes_of["whole"].take(place)
        )
        return kept

    share = np.where(
        pp > 1,
        trainer.gathered_inputs_in_pipeline * (1.0 - 2.0 / np.maximum(pp, 2)),
        trainer.gathered_inputs,
    )
    share = share + (1.0 - share) / tp
    none, mine = kept_by(plain_place), kept_by(place_of)
    layers, recomputed = rows.layers, rows.recomputed_layers
    kept = recomputed * mine + (layers - recomputed) * none
    # Gradients of the layer's widest products.
    widest = rows.element * (model.hidden_size + 2 * model.ffn_hidden_size) / tp
    all_recomputed = recomputed == layers
    again = bytes_of["redone"].take(place_of) * (none - mine) + bytes_of["more"].take(place_of) / tp
    working = np.where(all_recomputed, again, 0.0) + widest
    if trainer.eager_attention:
        core_of = bytes_of["core"].take
        core = np.where(all_recomputed, core_of(place_of), core_of(plain_place))
        working = np.maximum(working, core / tp)
    return kept, working


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerBytes:
    """Bytes per token of one layer of a kind: kept for its backward pass, and needed in it.

    With fused norms e(6h+2k+4f)+4a+8 are kept, eager e(8h+4f)+(4 or 6)as+8;
    selective_ops e(3h+2k+f)+4a; full e h.
    """

    # Kept on every rank, whatever the tensor parallel size.
    whole: float
    # Inputs of column-parallel products: whole if the trainer keeps what it gathered, else split.
    gathered: float
    split: float
    # 1 if the layer's backward begins by computing again what was not kept.
    redone: float
    # Of the backward, without what is recomputed and the widest products' gradients.
    more: float
    # Of eager attention's backward, in addition to what the layers keep.
    core: float

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
                split=element * (h + 2 * k + f) + (element * square if eager else flash),
                redone=1.0,
                # The first norm and product are computed again later.
                more=-element * h - 4,
                core=12.0 * square + element * (h - f),
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


_LAYER_BYTES = tuple(field.name for field in fields(_LayerBytes))
_BYTES_OF = attrgetter(*_LAYER_BYTES)
