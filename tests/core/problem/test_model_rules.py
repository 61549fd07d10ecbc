"""The layouts that a model's sizes allow, at the bounds."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_rules import placement_rules, schedule_rule, virtual_stages
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.problem.rule import Rule
from tests.core.by_hand import MODEL


def broken(rules: list[Rule], **sizes: int) -> list[str]:
    table = LayoutTable.of([Layout(**sizes)])  # type: ignore[arg-type]  # names of sizes
    return [rule.reason for rule in rules if rule.broken(table)[0]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, []),
        ({"pipeline_parallel_size": 4}, []),
        (
            {"pipeline_parallel_size": 5},
            ["pipeline_parallel_size is more than 4, the layers of the model"],
        ),
        # Two ranks take two pieces of 5 tokens each.
        ({"context_parallel_size": 2}, []),
        (
            {"context_parallel_size": 4},
            ["2 x context_parallel_size does not divide sequence_length 20"],
        ),
        (
            {"tensor_parallel_size": 2},
            [
                "tensor_parallel_size does not divide num_attention_heads 3",
                "tensor_parallel_size does not divide num_key_value_heads 1",
            ],
        ),
    ],
)
def test_sizes_divide_what_they_share(sizes: dict[str, int], said: list[str]) -> None:
    assert broken(placement_rules(MODEL, 20), **sizes) == said


def test_two_pieces_of_an_odd_sequence_are_not_alike() -> None:
    assert broken(placement_rules(MODEL, 6), context_parallel_size=2) != []
    assert broken(placement_rules(MODEL, 6), context_parallel_size=1) == []
    assert broken(placement_rules(MODEL, 6), context_parallel_size=3) == []


@pytest.mark.parametrize(("stages", "is_legal"), [(2, True), (3, False)])
def test_each_stage_of_an_interleaved_pipeline_has_a_layer(stages: int, *, is_legal: bool) -> None:
    """Two of each rank, and four layers."""
    of = Layout(
        pipeline_parallel_size=stages, pipeline_schedule=PipelineSchedule.parse("interleaved:2")
    )
    table = LayoutTable.of([of])
    assert virtual_stages(table).tolist() == [2]
    assert schedule_rule(MODEL).broken(table).tolist() == [not is_legal]
