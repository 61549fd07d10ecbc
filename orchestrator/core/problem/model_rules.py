"""The layouts that a model's sizes rule out with any program."""

from __future__ import annotations

import numpy as np

from orchestrator.core.problem.arrays import Ints
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.problem.rule import Rule


def placement_rules(model: ModelShape, sequence_length: int) -> list[Rule]:
    """The rules over the parallel sizes."""
    return [
        tensor_parallel_divides("num_attention_heads", model.num_attention_heads),
        tensor_parallel_divides("num_key_value_heads", model.num_key_value_heads),
        tensor_parallel_divides("ffn_hidden_size", model.ffn_hidden_size),
        # Stages of unequal depth are legal: nanotron and torchtitan build them, and 28 or 126
        # layers leave no choice.
        Rule(
            f"pipeline_parallel_size is more than {model.num_layers}, the layers of the model",
            lambda t: t.pipeline_parallel_size > model.num_layers,
        ),
        # Each rank takes one piece from the front and one from the back: causal attention is then
        # balanced.
        Rule(
            f"2 x context_parallel_size does not divide sequence_length {sequence_length}",
            lambda t: (
                (t.context_parallel_size > 1)
                & (sequence_length % (2 * t.context_parallel_size) != 0)
            ),
        ),
    ]


def schedule_rule(model: ModelShape) -> Rule:
    """Every stage of an interleaved pipeline has a layer."""
    return Rule(
        "pipeline_parallel_size x stages per rank of pipeline_schedule is more than"
        f" {model.num_layers}, the layers of the model",
        lambda t: t.pipeline_parallel_size * virtual_stages(t) > model.num_layers,
    )


def tensor_parallel_divides(name: str, size: int) -> Rule:
    return Rule(
        f"tensor_parallel_size does not divide {name} {size}",
        lambda t: size % t.tensor_parallel_size != 0,
    )


def virtual_stages(table: LayoutTable) -> Ints:
    """The pipeline stages of each rank, by row."""
    by_code = np.array([s.virtual_stages for s in table.pipeline_schedules], dtype=np.int64)
    return by_code[table.pipeline_schedule]
