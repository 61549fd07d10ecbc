"""The layouts that workload llama refuses, of those that a model's sizes allow.

The search never proposes them, and a rank that is asked for one rejects it before it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.layout_table import LayoutTable, Mask
from orchestrator.core.problem.model_rules import tensor_parallel_divides
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.problem.pipeline_schedule import ScheduleKind
from orchestrator.core.problem.rule import Rule

# The smallest block of torch's scaled matrix products.
FP8_BLOCK = 16


def llama_placement_rules(model: ModelShape, sequence_length: int) -> list[Rule]:
    """The rules over the parallel sizes."""
    return [
        # The embedding and the head are cut by vocabulary.
        tensor_parallel_divides("vocab_size", model.vocab_size),
        # Between the products of a layer, each rank holds its own part of the sequence.
        Rule(
            "tensor_parallel_size x context_parallel_size does not divide sequence_length"
            f" {sequence_length}: each rank holds a part of the sequence",
            lambda t: (
                (t.tensor_parallel_size > 1)
                & (sequence_length % (t.tensor_parallel_size * t.context_parallel_size) != 0)
            ),
        ),
        Rule(
            "pipeline_parallel_size is more than 1 with tied_embeddings:"
            " the first and the last stage would share a weight",
            lambda t: (t.pipeline_parallel_size > 1) & model.tied_embeddings,
        ),
    ]


def llama_row_rules(model: ModelShape) -> list[Rule]:
    """The rules over axes of several kinds."""
    return [
        Rule(
            "grad_accum_steps is less than pipeline_parallel_size, and pipeline_schedule is 1f1b:"
            " each stage needs a micro-batch",
            lambda t: (
                _is_scheduled(t, ScheduleKind.ONE_F_ONE_B)
                & (t.grad_accum_steps < t.pipeline_parallel_size)
            ),
        ),
        Rule(
            "pipeline_parallel_size does not divide grad_accum_steps,"
            " and pipeline_schedule is interleaved: it works in rounds of a micro-batch per stage",
            lambda t: (
                _is_scheduled(t, ScheduleKind.INTERLEAVED)
                & (t.grad_accum_steps % t.pipeline_parallel_size != 0)
            ),
        ),
        Rule(
            "zero_stage is 3 with pipeline_parallel_size above 1:"
            " every micro-batch would gather the weights again",
            lambda t: (t.zero_stage == 3) & (t.pipeline_parallel_size > 1),
        ),
        Rule(
            f"precision is fp8, and a matrix has a side that is no multiple of {FP8_BLOCK}"
            " (hidden_size, key and value size, ffn_hidden_size, each over tensor_parallel_size)",
            lambda t: (
                _of_precision(t, Precision.FP8)
                & ~_is_in_blocks(t, (model.hidden_size, model.kv_size, model.ffn_hidden_size))
            ),
        ),
    ]


def _is_scheduled(table: LayoutTable, kind: ScheduleKind) -> Mask:
    return _coded(table.pipeline_schedules, table.pipeline_schedule, lambda it: it.kind is kind)


def _of_precision(table: LayoutTable, precision: Precision) -> Mask:
    return _coded(table.precisions, table.precision, lambda it: it is precision)


def _coded(values: tuple[Any, ...], codes: Any, test: Callable[[Any], bool]) -> Mask:
    by_code = np.array([test(value) for value in values], dtype=np.bool_)
    mask: Mask = by_code[codes]
    return mask


def _is_in_blocks(table: LayoutTable, sizes: tuple[int, ...]) -> Mask:
    """True where each size is whole blocks, also the part of a rank."""
    tp = table.tensor_parallel_size
    found: Mask = np.all([size % (FP8_BLOCK * tp) == 0 for size in sizes], axis=0)
    return found
