"""Bytes of one micro-batch on a stage, in layers, head and loss: by closed forms, or by a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.physics.layer_memory import layer_bytes
from orchestrator.core.physics.layout_groups import LayoutGroups
from orchestrator.core.physics.stage_rows import StageRows
from orchestrator.core.physics.traced_memory import TracedMemory
from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.layout import Recompute
from orchestrator.core.problem.loss_chunks import chunk_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchMemory:
    """Bytes of one micro-batch: of every layout, or of each group of `StageRows`."""

    # For every layout: kept by the stage's layers; and needed on top of that at the fullest moment
    # of the last layer.
    kept: Floats
    layer: Floats
    # For each group: needed on top of what layers keep, at the fullest moment of the head.
    head: Floats
    # Kept by the head for its backward pass, if another micro-batch comes first.
    head_kept: Floats
    # When the backward pass of all layers is over, on top of nothing.
    end: Floats


def micro_batch(rows: StageRows) -> MicroBatchMemory:
    """Return the bytes of one micro-batch by closed forms."""
    model, tp = rows.cell.model, rows.table.tensor_parallel_size
    kept, working = layer_bytes(rows)
    tokens = rows.groups.spread(rows.tokens)
    # The gradient of the head's weights, before it is added.
    head = np.where(rows.has_head, rows.element * model.vocab_size * model.hidden_size / tp, 0.0)
    # With tied embeddings it waits for the embedding's, through the backward of all layers. At its
    # end there are three: the head's, the embedding's, and their sum.
    waits = np.where(rows.one_stage, head, 0.0) if model.tied_embeddings else np.zeros(len(head))
    return MicroBatchMemory(
        kept=tokens * kept,
        layer=tokens * working + rows.groups.spread(waits),
        head=np.where(rows.has_head, _head_moments(rows, head), 0.0),
        head_kept=_head_kept(rows, head),
        end=3 * waits,
    )


def traced_micro_batch(rows: StageRows, traced: TracedMemory) -> MicroBatchMemory:
    """Return the bytes of one micro-batch of every layout by traces of its model.

    Traces are without tensor parallelism: it divides them as it divides the closed forms.
    """
    # A mode that was not traced counts as none in every respect: its own closed form would divide
    # the bytes of none wrongly.
    recomputes = tuple(r if traced.has(r) else Recompute() for r in rows.table.recomputes)
    table = replace(rows.table, recomputes=recomputes)
    rows = replace(rows, groups=LayoutGroups.alone(table))
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
        tables = (
            replace(table, recomputes=of_all, tensor_parallel_size=sizes)
            for sizes in (tp, np.ones_like(tp))  # traces are without tensor parallelism
        )
        split, whole = (
            layer_bytes(replace(rows, groups=LayoutGroups.alone(one)))[0] for one in tables
        )
        return split / whole

    plain = look_up("kept", none) * share([Recompute()] * len(recomputes))
    return MicroBatchMemory(
        kept=recomputed * look_up("kept", table.recompute) * share(recomputes)
        + (rows.layers - recomputed) * plain,
        layer=look_up("backward", of_last) / tp,
        head=np.where(rows.has_head, look_up("head", of_last), 0.0) / tp,
        head_kept=np.zeros(len(table)),
        end=np.where(rows.has_head, look_up("end", of_last), 0.0) / tp,
    )


def _head_moments(rows: StageRows, head_gradient: Floats) -> Floats:
    """The fuller of the loss's backward and the head's.

    The loss's: final norm, logits in fp32 and their gradient, 12 bytes a logit, unchunked.
    """
    table, trainer, element, tokens = rows.table, rows.trainer, rows.element, rows.tokens
    h, vocab = rows.cell.model.hidden_size, rows.cell.model.vocab_size / table.tensor_parallel_size
    # No measured run separates the last stage of a pipeline from its first with one micro-batch:
    # a pipeline counts as accumulating.
    if trainer.loss_chunks > 0:
        return _chunked_head_moments(rows, head_gradient)
    accumulates = (table.grad_accum_steps > 1) | (table.pipeline_parallel_size > 1)
    logit_bytes = trainer.logit_bytes * np.where(accumulates, 1.0 + trainer.accumulated_logits, 1.0)
    # The norm's input, split by sequence parallelism.
    input_bytes = element * h / (table.tensor_parallel_size if trainer.fully_shards else 1)
    fuller: Floats = np.maximum(
        tokens * (input_bytes + element * h + 4 + logit_bytes * vocab),
        tokens * (input_bytes + 2 * element * h + element * vocab) + head_gradient,
    )
    return fuller


def _head_kept(rows: StageRows, head_gradient: Floats) -> Floats:
    """What the head keeps of a micro-batch until its backward pass: the norm's input and scale.

    And the norm's result and the log-softmax; or, chunk by chunk, the gradients.
    """
    trainer, element, tokens = rows.trainer, rows.element, rows.tokens
    h = rows.cell.model.hidden_size
    norm = tokens * (element * h * (1.0 + 1.0 / rows.table.tensor_parallel_size) + 4)
    if trainer.loss_chunks > 0:
        return norm + head_gradient
    vocab = rows.cell.model.vocab_size / rows.table.tensor_parallel_size
    kept: Floats = norm + tokens * 4 * vocab
    return kept


def _chunked_head_moments(rows: StageRows, head_gradient: Floats) -> Floats:
    """The loss chunk by chunk, forward and backward: the logits of one, and all its gradients.

    Alive are also the norm's input and output, and what the forward pass leaves for the backward
    pass: the gradients of the hidden state and of the head's weights.
    """
    table, trainer, element = rows.table, rows.trainer, rows.element
    h, vocab = rows.cell.model.hidden_size, rows.cell.model.vocab_size / table.tensor_parallel_size
    chunk = chunk_tokens(rows.tokens, trainer.loss_chunks)
    # Tensor-parallel ranks keep the logits until they have exchanged sums of their exponentials.
    logit_bytes = trainer.logit_bytes + np.where(table.tensor_parallel_size > 1, 4.0, 0.0)
    logits: Floats = chunk * logit_bytes * vocab
    hidden = element * h * (2.0 + 1.0 / table.tensor_parallel_size)
    return logits + rows.tokens * (hidden + 4) + head_gradient
