"""The peak memory of workload llama, by part: the highest of a step's moments.

Its gradients come and go, its weights are gathered, and its pipelines keep buffers.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from orchestrator.core.physics.micro_batch_memory import MicroBatch
from orchestrator.core.physics.stage_rows import Floats, StageRows
from orchestrator.core.physics.step_moments import Units
from orchestrator.core.problem.layout_table import Mask

# Weights for which the optimizer step widens half-precision gradients at once.
_OPTIMIZER_CHUNK = 1 << 28


def llama_parts(rows: StageRows, one: MicroBatch) -> dict[str, Floats]:
    """The peak of workload llama: the highest of a step's moments.

    Its gradients come and go, its weights are gathered, and its pipelines keep buffers.
    """
    table, trainer, element = rows.table, rows.trainer, rows.element
    mixed = element < 4
    is_sharded = (table.zero_stage >= 1) & (rows.shards > 1)
    alone = (table.data_parallel_size == 1) & (table.context_parallel_size == 1)
    several = table.grad_accum_steps > 1
    # Fp32 sums of half-precision gradients stay.
    sums_up = mixed & (trainer.gradient_bytes > 4)
    frees = trainer.frees_gradients & ~several & (is_sharded | (alone & rows.one_stage & ~sums_up))
    shards = np.where(is_sharded, rows.shards, 1)
    gradient_bytes = np.where(is_sharded, 4.0, np.where(mixed, trainer.gradient_bytes, 4.0))
    # An all-reduce of half-precision gradients widens its buckets. A pipeline averages after its
    # last micro-batch: buckets are put together first, and two are under way.
    averages = ~is_sharded & ~alone
    widens = averages & mixed & (trainer.gradient_bytes < 4) & (trainer.reduce_bytes > 2)
    in_bucket = trainer.reduction_bucket_bytes / element
    bucket = np.minimum(rows.weights, in_bucket) * (widens & rows.one_stage)
    averaging = np.where(averages & ~rows.one_stage, element + np.where(widens, 4.0, 0.0), 0.0)
    averaging = averaging * np.minimum(rows.weights, 2.0 * in_bucket)
    sums = is_sharded & several & (trainer.replicas > 1) & trainer.scatters_each
    units = Units(
        num_layers=rows.layers,
        layer=rows.layer_weights,
        embedding=rows.embedding_weights,
        head=rows.head_weights,
        product=rows.cell.model.hidden_size
        * rows.cell.model.ffn_hidden_size
        / table.tensor_parallel_size,
        element_bytes=element,
        gradient_bytes=gradient_bytes,
        reduced_bytes=np.maximum(element, trainer.reduce_bytes),
        copied_bytes=np.maximum(element, trainer.reduce_bytes) * trainer.copied_reductions,
        bucket=bucket,
        shards=shards.astype(np.float64),
        is_sharded=is_sharded,
        gathers_again=table.zero_stage >= 3,
        # Replicas that sum up after the last of two micro-batches hold all sums only then.
        is_followed=several & ~(sums & (table.grad_accum_steps == 2)),
        makes_gradients=frees,
        holds_whole_gradients=is_sharded & several & (not trainer.scatters_each),
        holds_sums=sums,
        chunks_loss=trainer.loss_chunks > 0,
    )
    more = units.moments()
    waiting = one.kept * rows.in_flight * trainer.activation_factor
    # The head of other micro-batches, and what was sent.
    buffers, sent = _pipeline_buffers(rows)
    waiting = waiting + sent
    waiting = waiting + one.head_kept * np.where(rows.has_head, rows.schedule.heads - 1.0, 0.0)
    alone_kept = one.kept * trainer.activation_factor
    of_layer = alone_kept / np.maximum(rows.layers, 1.0)
    # The gradient on its way from layer to layer; and the backward pass of a norm, in fp32.
    hidden = rows.cell.model.hidden_size * rows.tokens / table.tensor_parallel_size
    flowing, norm = element * hidden, 16.0 * hidden
    of_layers = []
    for layer in more.layers:
        left = waiting - layer.done * of_layer
        of_layers += [
            left + one.layer + layer.early,
            left - of_layer + norm + layer.late,
            left - of_layer + flowing + layer.reduced,
        ]
    at_head = waiting + one.head + more.head
    others = [
        waiting + _scattering(rows) + more.head,
        waiting + flowing + more.head_reduced,
        *of_layers,
        waiting - alone_kept + flowing + one.end + more.end,
        np.maximum(_stepping(rows, is_sharded) + more.step, averaging),
    ]
    elsewhere = reduce(np.maximum, others)
    above = np.maximum(at_head, elsewhere) - waiting + buffers
    head_is_fullest = rows.has_head & (at_head >= elsewhere)
    return {
        "parameters": rows.weights
        * np.where(is_sharded, 4.0, np.where(mixed, trainer.parameter_bytes, 4.0))
        / shards,
        "gradients": np.where(frees, 0.0, rows.weights * gradient_bytes / shards),
        "optimizer": rows.weights
        * np.where(is_sharded, 8.0, np.where(mixed, trainer.optimizer_bytes, 8.0))
        / shards,
        "activations": waiting,
        "loss": np.where(head_is_fullest, above, 0.0),
        "workspace": np.where(head_is_fullest, 0.0, above),
        "reserve": np.full(len(table), trainer.reserve_bytes),
    }


def _scattering(rows: StageRows) -> Floats:
    """At the end of a layer's forward pass: a sum over tensor-parallel ranks, of which each gets
    its part.

    The summand, in the order of ranks once more, its copies in the communication library, the part.
    """
    tp = rows.table.tensor_parallel_size
    whole = rows.element * rows.cell.model.hidden_size * rows.tokens
    copies = 2.0 + 2.0 * rows.trainer.copied_reductions
    return np.where(tp > 1, whole * (copies + 1.0 / tp), 0.0)


def _pipeline_buffers(rows: StageRows) -> tuple[Floats, Floats]:
    """What a pipeline stage receives of each micro-batch, in buffers that it keeps for good.

    Activations from the stage before it, gradients from the one behind it. And what comes on top
    during a step: results that were sent; less the inputs that wait for their backward pass, since
    they were counted with the layers.
    """
    table, schedule, none = rows.table, rows.schedule, np.zeros(len(rows.table))
    if rows.one_stage.all() or not rows.trainer.pipeline_buffers:
        return none, none
    each = rows.element * rows.cell.model.hidden_size * rows.tokens / table.tensor_parallel_size
    each = np.where(rows.one_stage, 0.0, each)
    # Of its virtual stages, the very first of the model receives no activations; the very last, no
    # gradients.
    num = 2.0 * schedule.virtual_stages - 1.0
    return num * table.grad_accum_steps * each, (schedule.sent - schedule.received) * each


def _stepping(rows: StageRows, in_place: Mask) -> Floats:
    """The optimizer's step: gradients of a chunk in fp32, unless rows step `in_place`."""
    widened = (rows.element < 4) & (rows.trainer.gradient_bytes < 4) & ~in_place
    found: Floats = np.where(widened, 4.0, 0.0) * np.minimum(rows.weights, _OPTIMIZER_CHUNK)
    return found
