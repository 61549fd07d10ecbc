"""Bytes of one token in the layers of a stage: kept for the backward pass, and needed in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from orchestrator.core.physics.stage_rows import ELEMENT_BYTES, StageRows
from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.layout import (
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.model_shape import ModelShape


def layer_bytes(rows: StageRows) -> tuple[Floats, Floats]:
    """Return bytes per token, of every layout: kept by a stage's layers, and added by a backward.

    The first are what all layers keep for their backward pass, the second what the backward pass of
    the last one needs in addition. `_LayerBytes` has the formulas.
    """
    trainer, model = rows.trainer, rows.cell.model
    bytes_of, place_of, plain_place = _kinds(rows)
    of_groups = _Shares.of(rows)
    shares = of_groups.spread(rows)
    eager = trainer.eager_attention
    mine = shares.kept(bytes_of, place_of, eager=eager)
    none = rows.groups.spread(of_groups.kept(bytes_of, plain_place, eager=eager))
    layers, recomputed = rows.groups.spread(rows.layers), rows.recomputed_layers
    kept = recomputed * mine + (layers - recomputed) * none
    all_recomputed = recomputed == layers
    again = bytes_of["redone"].take(place_of) * (none - mine)
    again += bytes_of["more"].take(place_of) / shares.tensor
    if trainer.fully_shards:
        again -= bytes_of["later"].take(place_of) * shares.gathered
    # Gradients of the layer's widest products.
    widest = rows.element * (model.hidden_size + 2 * model.ffn_hidden_size) / of_groups.tensor
    working = np.where(all_recomputed, again, 0.0) + rows.groups.spread(widest)
    if eager:
        core = np.where(
            all_recomputed,
            shares.core(bytes_of, place_of),
            rows.groups.spread(of_groups.core(bytes_of, plain_place)),
        )
        working = np.maximum(working, core / shares.tensor)
    return kept, working


def _kinds(rows: StageRows) -> tuple[Mapping[str, Floats], Ints, Ints]:
    """The bytes of each kind of layer; the kind of every layout; of each group, the plain kind."""
    table, trainer = rows.table, rows.trainer
    style = _LayerStyle(
        eager_attention=trainer.eager_attention,
        repeats_keys=frozenset(ELEMENT_BYTES[one] for one in trainer.repeats_keys),
        sequence_parallel=trainer.sequence_parallel,
        fully_shards=trainer.fully_shards,
        compiled=trainer.compiled,
        keeps_recomputed_products=trainer.keeps_recomputed_products,
    )
    bytes_of = _bytes_of(rows.cell.model, table.recomputes, table.precisions, style)
    plain_place = np.full(len(table), len(table.recomputes))
    if len(table.precisions) == 1:
        return bytes_of, rows.groups.recompute, plain_place
    num = len(table.precisions)
    return (
        bytes_of,
        rows.groups.recompute * num + rows.groups.spread(table.precision),
        plain_place * num + table.precision,
    )


class _LayerStyle(NamedTuple):
    """The properties of a trainer that change a layer's tensors, without fitted constants."""

    eager_attention: bool
    # Precisions whose fused attention repeats keys and values, each by the bytes of its numbers.
    repeats_keys: frozenset[int]
    sequence_parallel: bool
    fully_shards: bool
    compiled: bool
    keeps_recomputed_products: bool


# A fit asks for the same kinds a thousand times.
@lru_cache(maxsize=256)
def _bytes_of(
    model: ModelShape,
    recomputes: tuple[Recompute, ...],
    precisions: tuple[Precision, ...],
    style: _LayerStyle,
) -> Mapping[str, Floats]:
    """The bytes of each kind of layer: one for each recomputation and precision, the last ones
    plain.
    """
    kinds = [
        [
            _FIELDS_OF(_layer_bytes(model, recompute, style, ELEMENT_BYTES[precision]))
            for precision in precisions
        ]
        for recompute in (*recomputes, Recompute())
    ]
    columns = np.array(kinds).reshape(-1, len(_LAYER_BYTES)).T.copy()
    columns.flags.writeable = False
    return MappingProxyType(dict(zip(_LAYER_BYTES, columns, strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shares:
    """How much of a layer's bytes is on a rank: of each group, or of every layout."""

    tensor: Floats  # tensor parallel size
    # The share of the gathered inputs.
    gathered: Floats
    # The keys that a token sees, for eager attention.
    keys: Floats
    # If ranks gather keys and values: the other ranks, and the keys whose masks are kept for each
    # token of a micro-batch. None: no layout shares a sequence so, or no masks are kept.
    others: Floats | None
    masks: Floats | None

    @classmethod
    def of(cls, rows: StageRows) -> _Shares:
        trainer, length = rows.trainer, rows.cell.sequence_length
        tp = rows.table.tensor_parallel_size.astype(np.float64)
        pp, cp = rows.table.pipeline_parallel_size, rows.table.context_parallel_size
        share = np.where(
            (pp > 1) & (not trainer.fully_shards),
            trainer.gathered_inputs_in_pipeline * (1.0 - 2.0 / np.maximum(pp, 2)),
            trainer.gathered_inputs,
        )
        share = share + (1.0 - share) / tp
        others: Floats | None = None
        masks: Floats | None = None
        keys = np.full(len(tp), float(length))
        if trainer.gathers_context and (cp > 1).any():
            others = (cp - 1).astype(np.float64)
            # Two pieces of s / 2cp queries, with s + s / 2cp keys between them.
            piece = length / (2.0 * cp)
            if trainer.has_masks:
                seen = (length + piece) / (2.0 * rows.table.micro_batch_size)
                masks = np.where(cp > 1, seen, 0.0)
            keys = np.where(cp > 1, (length + piece) / 2.0, length)
        return cls(
            tensor=tp,
            gathered=share,
            keys=keys,
            others=others,
            masks=masks,
        )

    def spread(self, rows: StageRows) -> _Shares:
        """Return the shares by layout."""
        spread = rows.groups.spread
        return _Shares(
            tensor=spread(self.tensor),
            gathered=spread(self.gathered),
            keys=spread(self.keys),
            others=None if self.others is None else spread(self.others),
            masks=None if self.masks is None else spread(self.masks),
        )

    def kept(self, bytes_of: Mapping[str, Floats], place: Ints, *, eager: bool) -> Floats:
        """Return the bytes that a layer keeps for its backward pass."""
        kept: Floats = bytes_of["gathered"].take(place) * self.gathered
        kept += bytes_of["split"].take(place) / self.tensor
        kept += bytes_of["whole"].take(place)
        if eager:
            kept += bytes_of["scores"].take(place) * self.keys / self.tensor
        if self.others is not None:
            joined = bytes_of["pieces"].take(place) * (self.others > 0) / self.tensor
            kept += bytes_of["context"].take(place) * self.others / self.tensor + joined
        if self.masks is not None:
            kept += bytes_of["masks"].take(place) * self.masks
        return kept

    def core(self, bytes_of: Mapping[str, Floats], place: Ints) -> Floats:
        """Return the bytes of the backward pass of eager attention, before it is split."""
        scores: Floats = bytes_of["core_scores"].take(place) * self.keys
        return bytes_of["core"].take(place) + scores


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
    context: float = 0.0
    # If a sequence is in pieces: the results side by side; and an element of the pieces' masks.
    pieces: float = 0.0
    masks: float = 0.0
    # 1 if the layer's backward begins by computing again what was not kept.
    redone: float
    # Needed in the backward, without what is recomputed and the widest products' gradients.
    more: float = 0.0
    # The gathered input, if it is recomputed later than the rest.
    later: float = 0.0
    # Scores of eager attention, for each key that a token sees: kept, and in its backward pass.
    scores: float
    core_scores: float
    # Other bytes of eager attention's backward, in addition to what the layers keep.
    core: float


def _layer_bytes(
    model: ModelShape, recompute: Recompute, style: _LayerStyle, element: int
) -> _LayerBytes:
    """The bytes of a layer by what it recomputes. `element`: bytes of a number of it."""
    if recompute.mode is RecomputeMode.FULL:
        return _full_recompute_bytes(model, style, element)
    if recompute.policy is not SelectivePolicy.OPS:
        return _kept_layer_bytes(model, recompute, style, element)
    if style.fully_shards:
        return _sharded_ops_bytes(model, style, element)
    return _ops_bytes(model, style, element)


def _full_recompute_bytes(model: ModelShape, style: _LayerStyle, element: int) -> _LayerBytes:
    """The bytes of a layer that keeps its input, and in some trainers queries, keys and values."""
    h, k, a = model.hidden_size, model.kv_size, model.num_attention_heads
    products = element * (h + 2 * k) if style.keeps_recomputed_products else 0
    return _LayerBytes(
        whole=0.0 if style.sequence_parallel else element * h,
        gathered=0.0,
        split=products + (element * h if style.sequence_parallel else 0.0),
        redone=1.0,
        scores=0.0,
        core_scores=12.0 * a,
        core=element * (6 * h + 2 * k),
    )


def _sharded_ops_bytes(model: ModelShape, style: _LayerStyle, element: int) -> _LayerBytes:
    """The bytes of a layer that recomputes every other product, where all weights are sharded.

    Two regions are recomputed: what is before attention, later than what is behind it. The inputs
    of both are kept, w1's result, and what attention keeps.
    """
    h, k, f = model.hidden_size, model.kv_size, model.ffn_hidden_size
    a = model.num_attention_heads
    return _LayerBytes(
        whole=0.0,
        gathered=0.0,
        split=element * (3 * h + 2 * k + f) + _flash_bytes(model, style, element),
        context=element * 2.0 * k,
        pieces=element * h,
        masks=element,
        redone=1.0,
        more=-4.0,
        later=element * h,
        scores=element * a if style.eager_attention else 0.0,
        core_scores=12.0 * a,
        core=element * (h - f),
    )


def _ops_bytes(model: ModelShape, style: _LayerStyle, element: int) -> _LayerBytes:
    """The bytes of a layer that recomputes every other product, where a rank has its weights."""
    h, k, f = model.hidden_size, model.kv_size, model.ffn_hidden_size
    a = model.num_attention_heads
    return _LayerBytes(
        whole=0.0,
        gathered=element * 2.0 * h,
        split=element * (2 * h + 2 * k + f) + _flash_bytes(model, style, element),
        redone=1.0,
        more=element * h,
        scores=element * a if style.eager_attention else 0.0,
        core_scores=(10.0 if _is_mixed(element) else 8.0) * a,
        core=element * 5.0 * h,
    )


def _kept_layer_bytes(
    model: ModelShape, recompute: Recompute, style: _LayerStyle, element: int
) -> _LayerBytes:
    """The bytes of a layer that recomputes nothing, or attention only."""
    h, k, f = model.hidden_size, model.kv_size, model.ffn_hidden_size
    a, eager, mixed = model.num_attention_heads, style.eager_attention, _is_mixed(element)
    keeps_attention = recompute.policy is not SelectivePolicy.ATTENTION
    # SwiGLU keeps w1's and w3's results, the activation and the product. A compiled one keeps what
    # the gradients of products need, and computes the activation again.
    swiglu = (3 if style.compiled else 4) * f
    if keeps_attention:
        attention = element * (2 * h - 2 * k) if eager else _flash_bytes(model, style, element)
        core = element * (2 * k - 2 * h - swiglu)
        # A compiled softmax keeps its input in half precision, and no fp32 result.
        scores = (6.0 if mixed and not style.compiled else 4.0) * a if eager else 0.0
        core_scores = (6.0 if mixed else 8.0) * a
    else:
        # Attention is recomputed after the backward pass of the feed-forward. A compiled layer also
        # recomputes its result, which the projection after it needs.
        attention = -element * h if style.compiled else 0.0
        core = element * (2 * h - swiglu)
        scores, core_scores = 0.0, 12.0 * a
    # Inputs and residuals of the two norms are split by sequence parallelism only.
    norms = element * 2.0 * h
    whole_norms, split_norms = (0.0, norms) if style.sequence_parallel else (norms, 0.0)
    return _LayerBytes(
        whole=8.0 + whole_norms,
        gathered=element * 2.0 * h,
        split=element * (2 * h + 2 * k + swiglu) + attention + split_norms,
        context=element * 2.0 * k,
        pieces=element * h if keeps_attention else 0.0,
        masks=element if keeps_attention else 0.0,
        redone=0.0,
        scores=scores,
        core_scores=core_scores,
        core=core,
    )


def _flash_bytes(model: ModelShape, style: _LayerStyle, element: int) -> float:
    """The bytes that fused attention keeps in addition to its result, its keys and its values.

    It keeps one fp32 number for each head. If its kernel repeats keys and values for the heads of a
    group, it keeps the copies, too.
    """
    if style.eager_attention:
        return 0.0
    repeats = element in style.repeats_keys
    repeated = element * 2 * (model.hidden_size - model.kv_size) if repeats else 0
    return 4.0 * model.num_attention_heads + repeated


def _is_mixed(element: int) -> bool:
    """True if numbers are shorter than those of fp32."""
    return element < 4


_LAYER_BYTES = tuple(field.name for field in fields(_LayerBytes))
_FIELDS_OF = attrgetter(*_LAYER_BYTES)
