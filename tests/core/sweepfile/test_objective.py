"""The order of each objective, and the value that a measured layout has of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.objective import LayoutNumbers, Objective
from orchestrator.core.trial.merit import Merit, OtherMerits

CELL = Cell(model=PRESETS["llama-3.1-8b"], num_gpus=8, sequence_length=4096, global_batch_size=256)
NUMBERS = LayoutNumbers.of_step(
    CELL,
    16.0,
    others=OtherMerits(headroom=0.25, joules_per_token=0.08),
    price_per_gpu_hour=3.6,
)


@pytest.mark.parametrize(
    ("objective", "larger", "merit"),
    [
        (Objective.TOKENS_PER_SECOND_PER_GPU, True, Merit.SPEED),
        (Objective.STEP_SECONDS, False, Merit.SPEED),
        (Objective.MEMORY_HEADROOM, True, Merit.HEADROOM),
        (Objective.DOLLARS_PER_BILLION_TOKENS, False, Merit.SPEED),
        (Objective.JOULES_PER_TOKEN, False, Merit.EFFICIENCY),
    ],
)
def test_an_objective_orders_by_a_merit_up_or_down(
    objective: Objective, larger: bool, merit: Merit
) -> None:
    assert objective.is_larger_better is larger
    assert objective.merit is merit


@pytest.mark.parametrize(
    ("objective", "value"),
    [
        # 256 sequences of 4,096 tokens on 8 GPUs in 16 s.
        (Objective.TOKENS_PER_SECOND_PER_GPU, 8192.0),
        (Objective.STEP_SECONDS, 16.0),
        (Objective.MEMORY_HEADROOM, 0.25),
        # 0.001 dollars of a GPU-second buy 8,192 tokens.
        (Objective.DOLLARS_PER_BILLION_TOKENS, 0.001 / 8192 * 1e9),
        (Objective.JOULES_PER_TOKEN, 0.08),
    ],
)
def test_each_objective_follows_from_the_numbers_of_a_layout(
    objective: Objective, value: float
) -> None:
    assert NUMBERS.value(objective) == pytest.approx(value, rel=1e-12)


def test_an_objective_is_unknown_without_its_number() -> None:
    unknown = LayoutNumbers(tokens_per_second_per_gpu=None, step_seconds=None)
    assert {unknown.value(objective) for objective in Objective} == {None}
    for absent in ("tokens_per_second_per_gpu", "price_per_gpu_hour"):
        numbers = replace(NUMBERS, **{absent: None})
        assert numbers.value(Objective.DOLLARS_PER_BILLION_TOKENS) is None
