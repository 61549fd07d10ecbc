"""Bytes of one token in the layers of a stage: kept for the backward pass, and needed in it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np

from orchestrator.core.physics.stage_rows import ELEMENT_BYTES, Floats, StageRows
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.layout import Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.layout_table import Ints
from orchestrator.core.problem.model_shape import ModelShape


def layer_bytes(rows: StageRows) -> tuple[Floats, Floats]:
    """Bytes per token that all layers of a stage keep, and that the last one's backward adds."""
    table, trainer, model = rows.table, rows.trainer, rows.cell.model
    tp, pp = table.tensor_parallel_size, table.pipeline_parallel_size
    # Few kinds of layers, many rows: one entry per recomputation and precision, the last row plain.
    length = rows.cell.sequence_length
    kinds = [
        [_BYTES_OF(_LayerBytes.of(model, r, trainer, ELEMENT_BYTES[p])) for p in table.precisions]
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
        if trainer.eager_attention:
            kept = kept + bytes_of["scores"].take(place) * keys / tp
        if others is not None:
            cut = rows.table.context_parallel_size > 1
            joined = bytes_of["pieces"].take(place) * cut / tp
            kept = kept + bytes_of["context"].take(place) * others / tp + joined
            if trainer.has_masks:
                kept = kept + bytes_of["masks"].take(place) * cut * masks
        return kept

    share = np.where(
        (pp > 1) & (not trainer.fully_shards),
        trainer.gathered_inputs_in_pipeline * (1.0 - 2.0 / np.maximum(pp, 2)),
        trainer.gathered_inputs,
    )
    share = share + (1.0 - share) / tp
    if trainer.compiled:
        # A compiled norm computes its result again. What was gathered is kept.
        share = np.where(tp > 1, share, 0.0)
    others = masks = None
    keys: Floats | float = float(length)
    if trainer.gathers_context and (rows.table.context_parallel_size > 1).any():
        others = rows.table.context_parallel_size - 1.0
        # Two pieces of s / 2cp queries, with s + s / 2cp keys between them.
        piece = length / (2.0 * rows.table.context_parallel_size)
        masks = (length + piece) / (2.0 * rows.table.micro_batch_size)
        keys = np.where(rows.table.context_parallel_size > 1, (length + piece) / 2.0, length)
    none, mine = kept_by(plain_place), kept_by(place_of)
    layers, recomputed = rows.layers, rows.recomputed_layers
    kept = recomputed * mine + (layers - recomputed) * none
    # Gradients of the layer's widest products.
    widest = rows.element * (model.hidden_size + 2 * model.ffn_hidden_size) / tp
    all_recomputed = recomputed == layers
    again = bytes_of["redone"].take(place_of) * (none - mine) + bytes_of["more"].take(place_of) / tp
    if trainer.fully_shards:
        again = again - bytes_of["later"].take(place_of) * share
    working = np.where(all_recomputed, again, 0.0) + widest
    if trainer.eager_attention:
        core_of = bytes_of["core"].take
        scores_of = bytes_of["core_scores"].take
        core = np.where(
            all_recomputed,
            core_of(place_of) + scores_of(place_of) * keys,
            core_of(plain_place) + scores_of(plain_place) * keys,
        )
        working = np.maximum(working, core / tp)
    return kept, working


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerBytes:
    """Bytes per token of one layer of a kind: kept for its backward pass, and needed in it.

    With fused norms e(6h+2k+4f)+4a+8 are kept, eager e(8h+4f)+(4 or 6)as+8;
    selective_ops e(4h+2k+f)+4a; full e h.
    """

    # Kept on every rank, whatever the tensor parallel size.
    whole: float
    # Inputs of column-parallel products: whole if the trainer keeps what it gathered, else split.
    gathered: float
    split: float
    # Keys and values of each other rank that shares the sequence, if they are gathered.
    context: float
    # Of a sequence in pieces: the results side by side; and an element of the pieces' masks.
    pieces: float
    masks: float
    # 1 if the layer's backward begins by computing again what was not kept.
    redone: float
    # Of the backward, without what is recomputed and the widest products' gradients.
    more: float
    # Of what is recomputed, the gathered input that is recomputed later.
    later: float
    # Of eager attention, for each key that a token sees: kept, and in its backward pass.
    scores: float
    core_scores: float
    # Of eager attention's backward, in addition to what the layers keep.
    core: float

    @classmethod
    def of(
        cls,
        model: ModelShape,
        recompute: Recompute,
        trainer: Trainer,
        element: int,
    ) -> _LayerBytes:
        h, k, f = model.hidden_size, model.kv_size, model.ffn_hidden_size
        a = model.num_attention_heads
        eager, mixed = trainer.eager_attention, element < 4
        flash = 0.0 if eager else 4.0 * a
        if recompute.mode is RecomputeMode.FULL:
            return cls(
                whole=0.0 if trainer.sequence_parallel else element * h,
                gathered=0.0,
                split=element * h if trainer.sequence_parallel else 0.0,
                context=0.0,
                pieces=0.0,
                masks=0.0,
                redone=1.0,
                more=0.0,
                later=0.0,
                scores=0.0,
                core_scores=12.0 * a,
                core=element * (6 * h + 2 * k),
            )
        if recompute.policy is SelectivePolicy.OPS and trainer.fully_shards:
            # Two regions are recomputed: what is before attention, later than what is behind it.
            # The inputs of both are kept, w1's result, and what attention keeps.
            return cls(
                whole=0.0,
                gathered=0.0,
                split=element * (3 * h + 2 * k + f) + flash,
                context=element * 2.0 * k,
                pieces=element * h,
                masks=element,
                redone=1.0,
                more=-4.0,
                later=element * h,
                scores=element * a if eager else 0.0,
                core_scores=12.0 * a,
                core=element * (h - f),
            )
        if recompute.policy is SelectivePolicy.OPS:
            return cls(
                whole=0.0,
                gathered=element * 2.0 * h,
                split=element * (2 * h + 2 * k + f) + flash,
                context=0.0,
                pieces=0.0,
                masks=0.0,
                redone=1.0,
                more=element * h,
                later=0.0,
                scores=element * a if eager else 0.0,
                core_scores=(10.0 if mixed else 8.0) * a,
                core=element * 5.0 * h,
            )
        if recompute.policy is SelectivePolicy.ATTENTION:
            # Attention is recomputed later than the feed-forward's backward.
            attention, core = 0.0, element * (2 * h - 4 * f)
            scores, core_scores = 0.0, 12.0 * a
        else:
            attention = element * (2 * h - 2 * k) if eager else flash
            core = element * (2 * k - 2 * h - 4 * f)
            scores = (6.0 if mixed else 4.0) * a if eager else 0.0
            core_scores = (6.0 if mixed else 8.0) * a
        # Inputs and residuals of the two norms are split by sequence parallelism only.
        norms = element * 2.0 * h
        whole_norms, split_norms = (0.0, norms) if trainer.sequence_parallel else (norms, 0.0)
        # Of SwiGLU, w1's and w3's results, the activation and the product; compiled, the first two.
        swiglu = (2 if trainer.compiled else 4) * f
        return cls(
            whole=8.0 + whole_norms,
            gathered=element * 2.0 * h,
            split=element * (2 * h + 2 * k + swiglu) + attention + split_norms,
            context=element * 2.0 * k,
            pieces=0.0 if recompute.policy is SelectivePolicy.ATTENTION else element * h,
            masks=0.0 if recompute.policy is SelectivePolicy.ATTENTION else element,
            redone=0.0,
            more=0.0,
            later=0.0,
            scores=scores,
            core_scores=core_scores,
            core=core,
        )


_LAYER_BYTES = tuple(field.name for field in fields(_LayerBytes))
_BYTES_OF = attrgetter(*_LAYER_BYTES)
