"""The layouts that provably need as much memory as another: what an out-of-memory rules out.

A partial order, not an estimate: layouts whose difference in memory depends on sizes are not
comparable.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from orchestrator.core.problem.arrays import Mask
from orchestrator.core.problem.layout import Layout, Recompute, RecomputeMode
from orchestrator.core.problem.layout_table import LayoutTable


def needs_at_least(
    table: LayoutTable, layout: Layout, *, num_layers: int, sums_shards: bool = False
) -> Mask:
    """Mark the rows that need at least as much memory per GPU as `layout`, itself included.

    Only rows with the same GPUs per dimension, schedule, precision, batch and options of the
    workload are compared: a micro-batch as large or larger, a ZeRO stage as low or lower, and
    recomputation that keeps as much or more. `sums_shards`: replicas sum their shards of gradients
    up after the last micro-batch, as with option `replicas` of workload llama.
    """
    keeps = partial(keeps_at_least, num_layers=num_layers, num_stages=layout.pipeline_parallel_size)
    keeps_as_much = np.array([keeps(r, layout.recompute) for r in table.recomputes], dtype=np.bool_)
    same_precision = np.array([p is layout.precision for p in table.precisions], dtype=np.bool_)
    same_schedule = np.array(
        [s == layout.pipeline_schedule for s in table.pipeline_schedules], dtype=np.bool_
    )
    same_options = np.array([o == layout.options for o in table.option_sets], dtype=np.bool_)
    batch = layout.micro_batch_size * layout.grad_accum_steps
    same_split = (
        (table.data_parallel_size == layout.data_parallel_size)
        & (table.tensor_parallel_size == layout.tensor_parallel_size)
        & (table.pipeline_parallel_size == layout.pipeline_parallel_size)
        & (table.context_parallel_size == layout.context_parallel_size)
        & (table.micro_batch_size * table.grad_accum_steps == batch)
        & same_schedule[table.pipeline_schedule]
        & same_precision[table.precision]
        & same_options[table.options]
    )
    # Without accumulation there are no gradients at the activations' peak: a proof with
    # accumulation says nothing of it.
    holds_gradients = (table.grad_accum_steps > 1) | (layout.grad_accum_steps == 1)
    if sums_shards:
        # The second of two micro-batches is the last, so that weights are freed while all sums are
        # held: a proof with more micro-batches says nothing of two.
        holds_gradients &= (table.grad_accum_steps != 2) | (layout.grad_accum_steps <= 2)
    mask: Mask = (
        same_split
        & holds_gradients
        & (table.micro_batch_size >= layout.micro_batch_size)
        & (table.zero_stage <= layout.zero_stage)
        & keeps_as_much[table.recompute]
    )
    return mask


def keeps_at_least(a: Recompute, b: Recompute, *, num_layers: int, num_stages: int = 1) -> bool:
    """True if a GPU with `a` provably needs as much memory as with `b`.

    `none` keeps all of a layer, `full` the least. The two selective policies are not comparable:
    which of them keeps more depends on the sequence length and the attention kernel.
    """
    if a.layers_of(num_layers) > b.layers_of(num_layers):
        return False
    same_way = a.mode is b.mode and a.policy is b.policy
    as_with_b = a.layers_of(num_layers) if same_way else 0
    if as_with_b < b.layers_of(num_layers) and _may_end_a_stage(as_with_b, num_layers, num_stages):
        return False
    return same_way or a.mode is RecomputeMode.NONE or b.mode is RecomputeMode.FULL


def _may_end_a_stage(layer: int, num_layers: int, num_stages: int) -> bool:
    """True if of this layer, counted from 0, and those after it, a stage may recompute this alone.

    The backward pass of a stage's last layer comes first: what it did not keep is there again while
    all else is still held, and so is what it was recomputed from. So to recompute it alone saves
    nothing of the peak, and costs up to a few hidden sizes per token.
    """
    if num_stages == 1:
        return layer == num_layers - 1
    # The trainer decides where the stages are cut.
    return layer > 0 or num_layers // num_stages < 2
