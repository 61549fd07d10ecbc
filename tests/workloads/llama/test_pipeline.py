"""The parts of a pipeline; tests/workloads/llama/equivalence trains them."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from workloads.llama.pipeline import parts_of_rank


@pytest.mark.parametrize("num_layers", [4, 5, 7, 8, 28, 126])
@pytest.mark.parametrize(
    ("num_ranks", "schedule"), [(2, "1f1b"), (4, "gpipe"), (2, "interleaved:2")]
)
def test_the_parts_of_all_ranks_are_the_model_and_each_part_has_a_layer(
    num_layers: int, num_ranks: int, schedule: str
) -> None:
    named = PipelineSchedule.parse(schedule)
    by_rank = [
        parts_of_rank(num_layers, schedule=named, num_ranks=num_ranks, rank=rank)
        for rank in range(num_ranks)
    ]
    # Stage 0 is on rank 0, stage 1 on rank 1, and so on, round by round.
    stages = [part for of_round in zip(*by_rank, strict=True) for part in of_round]
    assert len(stages) == num_ranks * named.virtual_stages
    layers = [
        layer
        for part in stages
        for layer in range(part.first_layer, part.first_layer + part.num_layers)
    ]
    assert layers == list(range(num_layers))
    assert {part.num_layers for part in stages} <= {
        num_layers // len(stages),
        num_layers // len(stages) + 1,
    }
    assert [part.has_embedding for part in stages] == [True] + [False] * (len(stages) - 1)
    assert [part.has_head for part in stages] == [False] * (len(stages) - 1) + [True]


def test_the_first_stages_have_the_layers_that_are_over() -> None:
    schedule = PipelineSchedule.parse("interleaved:2")
    layers = [
        [part.num_layers for part in parts_of_rank(6, schedule=schedule, num_ranks=2, rank=rank)]
        for rank in range(2)
    ]
    assert layers == [[2, 1], [2, 1]]
