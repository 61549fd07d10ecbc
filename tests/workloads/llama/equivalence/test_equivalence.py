"""Every combination trains as one process does, and llama can do no layout that none of them has.

The tolerances are those of rounding: the same sums in another order, in fp32 or in half precision.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.problem.layout import PARALLEL_AXES
from orchestrator.core.problem.loss_chunks import chunk_tokens
from orchestrator.core.problem.pipeline_schedule import ScheduleKind
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from tests.workloads.llama.equivalence import table
from tests.workloads.llama.equivalence.combination import TOLERANCES
from tests.workloads.llama.equivalence.combinations import COMBINATIONS
from tests.workloads.llama.equivalence.gang import run_gang

EVERY = [combination for combinations in COMBINATIONS.values() for combination in combinations]
ABLE = CAPABILITIES["llama"]
MOST_RANKS = max(COMBINATIONS)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(num, marks=pytest.mark.long if num < MOST_RANKS else ()) for num in COMBINATIONS],
)
def test_every_combination_trains_as_one_process_does(num_ranks: int, tmp_path: Path) -> None:
    begin = time.perf_counter()
    combinations = [each for each in COMBINATIONS[num_ranks] if each.is_possible]
    results = run_gang(num_ranks, combinations, tmp_path / "gang")
    seconds = time.perf_counter() - begin
    kept = table.to_json({num_ranks: (combinations, results)}, seconds=seconds)
    print(table.text_of(kept))
    off = {
        combination.name: distance
        for combination, distance in zip(combinations, results.distances, strict=True)
        if not distance.is_within(TOLERANCES[combination.layout.precision])
    }
    assert off == {}


def test_no_combination_is_there_twice() -> None:
    names = [(c.layout.world_size, c.name) for c in EVERY]
    assert len(set(names)) == len(names) >= 70
    assert all(
        combination.layout.world_size == num_ranks
        for num_ranks, combinations in COMBINATIONS.items()
        for combination in combinations
    )


def test_each_chunked_loss_has_several_chunks() -> None:
    chunked = [c for c in EVERY if c.llama_options.loss_chunks is not None]
    assert len(chunked) >= 8
    for each in chunked:
        own = each.sequence_length // each.layout.context_parallel_size
        tokens = each.layout.micro_batch_size * own
        size = chunk_tokens(np.array([tokens]), each.llama_options.loss_chunks)[0]
        assert tokens >= 2 * size, each.name


def test_the_kept_table_has_these_combinations_within_their_tolerances() -> None:
    kept = json.loads(table.RESULTS.read_text())["combinations"]
    assert [(row["ranks"], row["layout"]) for row in kept] == [
        (combination.layout.world_size, combination.name) for combination in EVERY
    ]
    for row, combination in zip(kept, EVERY, strict=True):
        bound = TOLERANCES[combination.layout.precision]
        assert row["loss"] <= bound.loss, row
        assert row["gradient_norm"] <= bound.gradient_norm, row
        assert row["weights"] <= bound.weights, row


def test_llama_can_do_no_kind_of_layout_that_is_not_in_the_table() -> None:
    assert ABLE.zero_stages == {c.layout.zero_stage for c in EVERY}
    assert ABLE.precisions == {c.layout.precision for c in EVERY}
    in_pipelines = {
        c.layout.pipeline_schedule.kind for c in EVERY if c.layout.pipeline_parallel_size > 1
    }
    assert ABLE.pipeline_schedules <= in_pipelines | {ScheduleKind.ONE_F_ONE_B}
    for axis in PARALLEL_AXES[1:]:
        if getattr(ABLE, f"max_{axis}") != 1:
            assert {getattr(c.layout, axis) for c in EVERY} >= {1, 2, 4}
