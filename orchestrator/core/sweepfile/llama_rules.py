"""The layouts that workload llama refuses, of those that a model's sizes allow.

The search never proposes them, and a rank that is asked for one rejects it before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.core.problem.arrays import Mask
from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_rules import (
    placement_rules,
    schedule_rule,
    tensor_parallel_divides,
)
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.problem.pipeline_schedule import ScheduleKind
from orchestrator.core.problem.rule import Rule
from orchestrator.core.sweepfile.workload_options import Accumulate, LlamaOptions

# The smallest block of torch's scaled matrix products.
FP8_BLOCK = 16


def refusal(
    layout: Layout, *, model: ModelShape, sequence_length: int, options: LlamaOptions
) -> str | None:
    """Return why workload llama cannot run a layout of a model; None if it can."""
    rules = [
        *placement_rules(model, sequence_length),
        schedule_rule(model),
        *llama_placement_rules(model, sequence_length),
        *llama_row_rules(model, [options]),
    ]
    row = LayoutTable.of([layout])
    return next((rule.reason for rule in rules if rule.broken(row)[0]), None)


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


def llama_row_rules(model: ModelShape, options: Sequence[LlamaOptions]) -> list[Rule]:
    """The rules over axes of several kinds. `options`: those of each of a table's option sets."""
    return [*_pipeline_rules(), *_sharding_rules(options), _fp8_rule(model)]


def _pipeline_rules() -> list[Rule]:
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
    ]


def _sharding_rules(options: Sequence[LlamaOptions]) -> list[Rule]:
    replicas = np.array([each.replicas for each in options], dtype=np.int64)
    keeps_whole = np.array([each.accumulate is Accumulate.LAST for each in options], dtype=np.bool_)
    has_twin = np.array([_scattering(each) in options for each in options], dtype=np.bool_)
    return [
        Rule(
            "workload.options.replicas is above 1 with zero_stage 0: all ranks are replicas",
            lambda t: (replicas[t.options] > 1) & (t.zero_stage == 0),
        ),
        Rule(
            "workload.options.replicas does not divide data_parallel_size",
            lambda t: t.data_parallel_size % replicas[t.options] != 0,
        ),
        Rule(
            "workload.options.replicas leaves one rank to shard over",
            lambda t: (
                (replicas[t.options] > 1)
                & (t.data_parallel_size * t.context_parallel_size == replicas[t.options])
            ),
        ),
        Rule(
            "workload.options.accumulate is last with zero_stage above 1:"
            " it keeps whole gradients, which these stages shard",
            lambda t: keeps_whole[t.options] & (t.zero_stage > 1),
        ),
        Rule(
            "same as workload.options.accumulate scatter:"
            " one micro-batch, or gradients that are not sharded",
            lambda t: (
                (keeps_whole & has_twin)[t.options]
                & ((t.zero_stage == 0) | (t.grad_accum_steps == 1))
            ),
        ),
    ]


def _fp8_rule(model: ModelShape) -> Rule:
    sizes = (model.hidden_size, model.kv_size, model.ffn_hidden_size)
    return Rule(
        f"precision is fp8, and a matrix has a side that is no multiple of {FP8_BLOCK}"
        " (hidden_size, key and value size, ffn_hidden_size, each over tensor_parallel_size)",
        lambda t: _of_precision(t, Precision.FP8) & ~_is_in_blocks(t, sizes),
    )


def _scattering(options: LlamaOptions) -> LlamaOptions:
    """The same options with gradients that are scattered."""
    is_last = options.accumulate is Accumulate.LAST
    return options.model_copy(update={"accumulate": Accumulate.SCATTER}) if is_last else options


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
