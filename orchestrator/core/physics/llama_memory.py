"""The peak memory of workload llama, by part: the highest of a step's moments.

Its gradients come and go, its weights are gathered, and its pipelines keep buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.physics.micro_batch_memory import MicroBatchMemory
from orchestrator.core.physics.stage_peak import StagePeak
from orchestrator.core.physics.stage_rows import StageRows
from orchestrator.core.physics.step_moments import Moments, Units
from orchestrator.core.problem.arrays import Floats, Ints, Mask

# Weights for which the optimizer step widens half-precision gradients at once.
_OPTIMIZER_CHUNK = 1 << 28


def llama_peak(rows: StageRows, one: MicroBatchMemory) -> StagePeak:
    """Return the peak of workload llama in bytes, by part: the highest of a step's moments.

    Its gradients come and go, its weights are gathered, and its pipelines keep buffers.
    """
    trainer, spread = rows.trainer, rows.groups.spread
    mixed = rows.element < 4
    gradients = _Gradients.of(rows)
    more = _units(rows, gradients).moments()
    kept = one.kept * trainer.activation_factor
    waiting = one.kept * spread(rows.in_flight) * trainer.activation_factor
    # The head of other micro-batches, and what was sent.
    buffers, sent = _pipeline_buffers(rows)
    waiting += spread(sent)
    waiting += spread(one.head_kept * np.where(rows.has_head, rows.schedule.heads - 1.0, 0.0))
    at_head = waiting + spread(one.head)
    at_head += spread(more.head)
    elsewhere = _elsewhere(rows, one, more, waiting, kept)
    stepping = np.maximum(_stepping(rows, gradients.is_sharded) + more.step, gradients.averaging)
    elsewhere = np.maximum(elsewhere, spread(stepping), out=elsewhere)
    head_is_fullest = spread(rows.has_head) & (at_head >= elsewhere)
    temporaries = np.maximum(at_head, elsewhere, out=elsewhere)
    temporaries -= waiting
    temporaries += spread(buffers)
    weights, shards, is_sharded = rows.weights, gradients.shards, gradients.is_sharded
    return StagePeak(
        rows=rows,
        parameters=weights
        * np.where(is_sharded, 4.0, np.where(mixed, trainer.parameter_bytes, 4.0))
        / shards,
        gradients=np.where(gradients.frees, 0.0, weights * gradients.each_bytes / shards),
        optimizer=weights
        * np.where(is_sharded, 8.0, np.where(mixed, trainer.optimizer_bytes, 8.0))
        / shards,
        activations=waiting,
        temporaries=temporaries,
        at_head=head_is_fullest,
    )


def _elsewhere(
    rows: StageRows, one: MicroBatchMemory, more: Moments, waiting: Floats, kept: Floats
) -> Floats:
    """The fullest moment of the backward pass, but for the head's."""
    spread = rows.groups.spread
    # The gradient on its way from layer to layer; and the backward pass of a norm, in fp32.
    hidden = rows.cell.model.hidden_size * rows.tokens / rows.table.tensor_parallel_size
    flowing, norm = spread(rows.element * hidden), spread(16.0 * hidden)
    fullest = waiting + spread(_scattering(rows))
    fullest += spread(more.head)

    def compare(moment: Floats, of_groups: Floats) -> None:
        moment += spread(of_groups)
        np.maximum(fullest, moment, out=fullest)

    compare(waiting + flowing, more.head_reduced)
    of_layer = kept / spread(np.maximum(rows.layers, 1.0))
    for layer in more.layers:
        left = waiting - spread(layer.done) * of_layer
        compare(left + one.layer, layer.early)
        left -= of_layer
        compare(left + norm, layer.late)
        compare(left + flowing, layer.reduced)
    end = waiting - kept
    end += flowing
    end += spread(one.end)
    compare(end, more.end)
    return fullest


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gradients:
    """How the gradients of each group's weights are kept, reduced and sharded."""

    is_sharded: Mask
    shards: Ints
    # Bytes of a gradient that is kept.
    each_bytes: Floats
    # Made in the backward pass, and freed after the step.
    frees: Mask
    # Gradients of shards are summed up over replicas after the last micro-batch.
    sums: Mask
    # The weights in one bucket, if an all-reduce widens its buckets; else 0.
    bucket: Floats
    # Bytes of a pipeline's buckets while they are averaged.
    averaging: Floats

    @classmethod
    def of(cls, rows: StageRows) -> _Gradients:
        table, trainer, element = rows.table, rows.trainer, rows.element
        mixed = element < 4
        is_sharded = (table.zero_stage >= 1) & (rows.shards > 1)
        alone = (table.data_parallel_size == 1) & (table.context_parallel_size == 1)
        several = table.grad_accum_steps > 1
        # Fp32 sums of half-precision gradients stay.
        sums_up = mixed & (trainer.gradient_bytes > 4)
        freed_whole = alone & rows.one_stage & ~sums_up
        # An all-reduce of half-precision gradients widens its buckets. A pipeline averages after
        # its last micro-batch: buckets are put together first, and two are under way.
        averages = ~is_sharded & ~alone
        widens = averages & mixed & (trainer.gradient_bytes < 4) & (trainer.reduce_bytes > element)
        in_bucket = trainer.reduction_bucket_bytes / element
        averaging = np.where(averages & ~rows.one_stage, element + np.where(widens, 4.0, 0.0), 0.0)
        return cls(
            is_sharded=is_sharded,
            shards=np.where(is_sharded, rows.shards, 1),
            each_bytes=np.where(is_sharded, 4.0, np.where(mixed, trainer.gradient_bytes, 4.0)),
            frees=trainer.frees_gradients & ~several & (is_sharded | freed_whole),
            sums=is_sharded & several & (trainer.replicas > 1) & trainer.scatters_each,
            bucket=np.minimum(rows.weights, in_bucket) * (widens & rows.one_stage),
            averaging=averaging * np.minimum(rows.weights, 2.0 * in_bucket),
        )


def _units(rows: StageRows, gradients: _Gradients) -> Units:
    table, trainer, element, model = rows.table, rows.trainer, rows.element, rows.cell.model
    several = table.grad_accum_steps > 1
    reduced_bytes = np.maximum(element, trainer.reduce_bytes)
    return Units(
        num_layers=rows.layers,
        layer=rows.layer_weights,
        embedding=rows.embedding_weights,
        head=rows.head_weights,
        product=model.hidden_size * model.ffn_hidden_size / table.tensor_parallel_size,
        element_bytes=element,
        gradient_bytes=gradients.each_bytes,
        reduced_bytes=reduced_bytes,
        copied_bytes=reduced_bytes * trainer.copied_reductions,
        bucket=gradients.bucket,
        shards=gradients.shards.astype(np.float64),
        is_sharded=gradients.is_sharded,
        gathers_again=table.zero_stage >= 3,
        # Replicas that sum up after the last of two micro-batches hold all sums only then.
        is_followed=several & ~(gradients.sums & (table.grad_accum_steps == 2)),
        makes_gradients=gradients.frees,
        holds_whole_gradients=gradients.is_sharded & several & (not trainer.scatters_each),
        holds_sums=gradients.sums,
        chunks_loss=trainer.loss_chunks > 0,
    )


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
    # Each virtual stage receives both, but the model's first one no activations, and its last one
    # no gradients.
    num = 2.0 * schedule.virtual_stages - 1.0
    return num * table.grad_accum_steps * each, (schedule.sent - schedule.received) * each


def _stepping(rows: StageRows, in_place: Mask) -> Floats:
    """The optimizer's step: gradients of a chunk in fp32, unless rows step `in_place`."""
    widened = (rows.element < 4) & (rows.trainer.gradient_bytes < 4) & ~in_place
    found: Floats = np.where(widened, 4.0, 0.0) * np.minimum(rows.weights, _OPTIMIZER_CHUNK)
    return found
