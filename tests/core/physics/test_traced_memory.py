"""Memory by a trace: arithmetic that can be checked by hand, in the same parts as a Llama's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.physics.memory import MemoryPrediction, Stage, predict_memory
from orchestrator.core.physics.traced_memory import TracedBytes, TracedMemory, TracedMode
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

LENGTH, LAYERS = 4096, 32
PLAIN = TracedMode(
    kept=TracedBytes(per_token=100_000.0, per_token_and_position=2.0, fixed=5e6),
    backward=TracedBytes(per_token=70_000.0),
    head=TracedBytes(per_token=1_500_000.0, fixed=3e6),
)
FULL = TracedMode(
    kept=TracedBytes(per_token=8_000.0),
    backward=TracedBytes(per_token=200_000.0),
    head=TracedBytes(per_token=1_000_000.0),
)
TRACED = Trainer(traced=TracedMemory(modes=(("none", PLAIN), ("full", FULL))))


def predict(
    *layouts: Layout, trainer: Trainer = TRACED, stage: Stage = Stage.FULLEST
) -> MemoryPrediction:
    cell = Cell(
        model=PRESETS["llama-3.1-8b"],
        num_gpus=layouts[0].world_size,
        sequence_length=LENGTH,
        global_batch_size=layouts[0].global_batch_size,
    )
    return predict_memory(LayoutTable.of(layouts), cell, trainer, stage=stage)


def test_bytes_are_a_line_in_tokens_whose_slope_grows_with_the_sequence() -> None:
    assert PLAIN.kept.of(tokens=10, sequence_length=100) == 10 * (100_000 + 2 * 100) + 5e6
    assert list(PLAIN.kept.at(np.array([10, 20]), 100)) == [10 * 100_200 + 5e6, 20 * 100_200 + 5e6]


def test_every_layer_keeps_what_was_traced_and_the_head_comes_on_top() -> None:
    found = predict(Layout(micro_batch_size=2))
    assert found.activations[0] == LAYERS * (2 * LENGTH * (100_000 + 2 * LENGTH) + 5e6)
    assert found.temporaries[0] == 2 * LENGTH * 1_500_000 + 3e6
    assert (
        found.total[0] - found.activations[0] - found.temporaries[0]
        == 16 * PRESETS["llama-3.1-8b"].num_parameters
    )


def test_of_layers_that_are_partly_recomputed_each_keeps_its_own() -> None:
    found = predict(Layout(recompute=Recompute.parse("full:8")))
    assert found.activations[0] == 8 * LENGTH * 8_000 + 24 * (LENGTH * (100_000 + 2 * LENGTH) + 5e6)
    assert found.temporaries[0] == LENGTH * 1_500_000 + 3e6  # the last layer is not recomputed


def test_a_mode_that_was_not_traced_counts_as_not_recomputed() -> None:
    for size in (1, 8):
        for mode in ("selective_attention", "selective_ops", "selective_ops:16"):
            layout = Layout(tensor_parallel_size=size, recompute=Recompute.parse(mode))
            assert predict(layout).total == predict(Layout(tensor_parallel_size=size)).total
    with pytest.raises(ValueError, match="traced modes full: none is missing"):
        TracedMemory(modes=(("full", FULL),))
    with pytest.raises(ValueError, match="traced modes empty: none is missing"):
        TracedMemory(modes=())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_tensor_parallelism_divides_what_was_traced_as_it_does_a_llama_s(mode: str) -> None:
    whole = Layout(recompute=Recompute.parse(mode))
    for size in (2, 8):
        split = replace(whole, tensor_parallel_size=size)
        expected = (
            predict(split, trainer=Trainer()).activations
            / predict(whole, trainer=Trainer()).activations
        )
        assert predict(split).activations / predict(whole).activations == pytest.approx(expected)
        assert predict(split).temporaries[0] == pytest.approx(predict(whole).temporaries[0] / size)


def test_tensor_parallel_ranks_share_the_end_of_the_backward_pass() -> None:
    mode = replace(PLAIN, end=TracedBytes(fixed=1e12))
    trainer = Trainer(traced=TracedMemory(modes=(("none", mode),)))
    for size in (1, 2):
        found = predict(Layout(tensor_parallel_size=size), trainer=trainer)
        assert found.activations[0] + found.temporaries[0] == pytest.approx(1e12 / size)


def test_neighbours_in_a_table_are_recomputed_each_in_its_own_mode() -> None:
    modes = [Layout(recompute=Recompute.parse(mode)) for mode in ("none", "full", "full:8", "none")]
    found = predict(*modes)
    assert found.total.tolist() == [predict(mode).total[0] for mode in modes]


def test_only_the_last_stage_of_a_pipeline_holds_the_head() -> None:
    layout = Layout(pipeline_parallel_size=4, grad_accum_steps=8)
    first, last = (predict(layout, stage=stage) for stage in (Stage.FIRST, Stage.LAST))
    of_stage = 8 * (LENGTH * (100_000 + 2 * LENGTH) + 5e6)
    # 1F1B: four micro-batches wait at the first.
    assert (first.activations[0], last.activations[0]) == (
        4 * of_stage,
        of_stage,
    )
    assert first.temporaries[0] == LENGTH * 70_000
    assert last.temporaries[0] == LENGTH * 1_500_000 + 3e6


def test_weights_in_fp32_that_are_rounded_at_each_use_take_sixteen_bytes_too() -> None:
    autocast = replace(TRACED, parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
    assert predict(Layout(), trainer=autocast).total == predict(Layout()).total
    sharded = Layout(data_parallel_size=8, zero_stage=1)  # but there is less to shard
    assert predict(sharded, trainer=autocast).total > predict(sharded).total


def test_a_whole_model_s_peak_is_its_layers_and_the_fuller_moment_or_the_end() -> None:
    mode = TracedMode(
        kept=TracedBytes(per_token=10.0),
        backward=TracedBytes(per_token=7.0),
        head=TracedBytes(fixed=600.0),
        end=TracedBytes(fixed=1000.0),
    )
    # At 50 tokens of which each layer keeps 500 bytes, the head's 600 are more than 350.
    assert mode.peak_bytes(num_layers=3, tokens=50, sequence_length=1) == 3 * 500 + 600
    # At 100 tokens the backward pass of a layer has 700.
    assert mode.peak_bytes(num_layers=3, tokens=100, sequence_length=1) == 3 * 1000 + 700
    assert mode.peak_bytes(num_layers=1, tokens=1, sequence_length=1) == 1000
