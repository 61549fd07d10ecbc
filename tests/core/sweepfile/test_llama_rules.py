"""Each rule of workload llama at its bound: the last layout that runs, the first that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.sweepfile.llama_rules import llama_row_rules, refusal
from orchestrator.core.sweepfile.workload_options import Accumulate, LlamaOptions

# 8 heads of 12; the keys and values have 4 of them: 96, 48 and 192 are sides of matrices.
MODEL = ModelShape(
    name="m",
    num_layers=8,
    hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=4,
    ffn_hidden_size=192,
    vocab_size=128,
)
LAST = LlamaOptions(accumulate=Accumulate.LAST)


def why_not(
    layout: Layout, *, model: ModelShape = MODEL, sequence_length: int = 64, **options: Any
) -> str:
    return (
        refusal(
            layout,
            model=model,
            sequence_length=sequence_length,
            options=LlamaOptions(**options),
        )
        or ""
    )


def layout(**sizes: Any) -> Layout:
    if "pipeline_schedule" in sizes:
        sizes["pipeline_schedule"] = PipelineSchedule.parse(sizes["pipeline_schedule"])
    return Layout(**{"data_parallel_size": 1} | sizes)


def test_ranks_of_a_tensor_hold_equal_parts_of_the_vocabulary_and_the_sequence() -> None:
    odd = replace(MODEL, vocab_size=126)
    assert not why_not(layout(tensor_parallel_size=2), model=odd)
    assert "vocab_size 126" in why_not(layout(tensor_parallel_size=4), model=odd)
    # 2 x 2 parts of 66 are none, and neither is a quotient of 2 and 2.
    assert not why_not(layout(tensor_parallel_size=2), sequence_length=66)
    both = layout(tensor_parallel_size=2, context_parallel_size=2)
    assert not why_not(both, sequence_length=64)
    assert "context_parallel_size does not divide sequence_length 66" in why_not(
        layout(tensor_parallel_size=4), sequence_length=66
    )
    assert "does not divide sequence_length 68" in why_not(
        layout(tensor_parallel_size=4, context_parallel_size=2), sequence_length=68
    )


def test_stages_do_not_share_a_weight() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    assert not why_not(layout(), model=tied)
    pipeline = layout(pipeline_parallel_size=2, grad_accum_steps=2)
    assert not why_not(pipeline)
    assert "tied_embeddings" in why_not(pipeline, model=tied)


@pytest.mark.parametrize(
    ("schedule", "num_micro_batches", "said"),
    [
        ("1f1b", 1, "less than pipeline_parallel_size"),
        ("1f1b", 2, ""),
        ("1f1b", 3, ""),
        ("gpipe", 1, ""),
        ("interleaved:2", 3, "does not divide grad_accum_steps"),
        ("interleaved:2", 4, ""),
    ],
)
def test_micro_batches_fill_the_stages(schedule: str, num_micro_batches: int, said: str) -> None:
    asked = layout(
        pipeline_parallel_size=2, pipeline_schedule=schedule, grad_accum_steps=num_micro_batches
    )
    found = why_not(asked)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("zero_stage", "stages", "is_refused"), [(2, 2, False), (3, 2, True), (3, 1, False)]
)
def test_weights_are_not_gathered_for_each_micro_batch_of_a_pipeline(
    zero_stage: int, stages: int, is_refused: bool
) -> None:
    asked = layout(
        data_parallel_size=2,
        pipeline_parallel_size=stages,
        zero_stage=zero_stage,
        grad_accum_steps=4,
    )
    assert ("zero_stage is 3" in why_not(asked)) is is_refused


def test_replicas_are_groups_of_several_ranks_that_shard() -> None:
    assert not why_not(layout(data_parallel_size=4, zero_stage=1), replicas=2)
    assert not why_not(layout(data_parallel_size=4, zero_stage=0), replicas=1)
    assert "all ranks are replicas" in why_not(layout(data_parallel_size=4), replicas=2)
    assert "does not divide" in why_not(layout(data_parallel_size=4, zero_stage=1), replicas=3)
    assert "leaves one rank" in why_not(layout(data_parallel_size=2, zero_stage=1), replicas=2)
    # Ranks of the same tokens' parts shard as well: two groups of 2 ranks.
    with_context = layout(data_parallel_size=2, context_parallel_size=2, zero_stage=1)
    assert not why_not(with_context, replicas=2)
    more = layout(data_parallel_size=4, context_parallel_size=2, zero_stage=1)
    assert not why_not(more, replicas=2)


@pytest.mark.parametrize(
    ("zero_stage", "num_micro_batches", "said"),
    [
        (0, 2, "same as workload.options.accumulate scatter"),
        (1, 1, "same as workload.options.accumulate scatter"),
        (1, 2, ""),
        (2, 2, "zero_stage above 1"),
        (3, 2, "zero_stage above 1"),
    ],
)
def test_whole_gradients_are_kept_where_they_may_be_and_differ(
    zero_stage: int, num_micro_batches: int, said: str
) -> None:
    """Only one of two option sets is legal if both make the same layout."""
    asked = layout(data_parallel_size=2, zero_stage=zero_stage, grad_accum_steps=num_micro_batches)
    row = LayoutTable.of([asked])

    def broken(sets: list[LlamaOptions]) -> list[str]:
        return [rule.reason for rule in llama_row_rules(MODEL, sets) if rule.broken(row)[0]]

    found = broken([LAST, LlamaOptions()])
    assert len(found) == bool(said)
    assert all(said in reason for reason in found)
    # Without the twin, a choice that makes no difference is no mistake.
    alone = broken([LAST])
    assert alone == [reason for reason in found if "same as" not in reason]
    assert not broken([LlamaOptions()])


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel", "is_refused"),
    [
        # 96, 48 and 192 are 6, 3 and 12 blocks of 16.
        ({}, 1, False),
        ({}, 2, True),  # 24 of the keys and values
        ({"num_key_value_heads": 8}, 2, False),  # 48, 48 and 96
        ({"num_key_value_heads": 8}, 4, True),  # 24
        ({"ffn_hidden_size": 200}, 1, True),  # 12 and a half
    ],
)
def test_matrices_of_fp8_are_whole_blocks(
    sizes: dict[str, Any], tensor_parallel: int, is_refused: bool
) -> None:
    model = replace(MODEL, **sizes)
    asked = layout(tensor_parallel_size=tensor_parallel, precision=Precision.FP8)
    assert ("precision is fp8" in why_not(asked, model=model)) is is_refused
    assert not why_not(layout(tensor_parallel_size=tensor_parallel), model=model)


def test_each_of_two_tensor_parallel_ranks_holds_half_of_the_sequence() -> None:
    two = layout(tensor_parallel_size=2)
    assert "does not divide sequence_length 63" in why_not(two, sequence_length=63)
    assert why_not(two, sequence_length=62) == ""
    assert why_not(layout(), sequence_length=63) == ""
