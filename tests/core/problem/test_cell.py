from __future__ import annotations

from dataclasses import replace

from orchestrator.core.problem.cell import Cell, other_batches
from orchestrator.core.problem.model_shape import PRESETS

LLAMA_8B = PRESETS["llama-3.1-8b"]


def cell(**changes: object) -> Cell:
    return replace(
        Cell(model=LLAMA_8B, num_gpus=8, sequence_length=4096, global_batch_size=256), **changes
    )  # type: ignore[arg-type]


def test_the_key_of_a_preset_is_readable() -> None:
    assert cell().key == "llama-3.1-8b_8gpu_s4096_gb256"


def test_two_definitions_under_one_name_are_two_cells() -> None:
    other = cell(model=replace(LLAMA_8B, num_layers=31))
    assert other.key != cell().key
    assert other.key.startswith("llama-3.1-8b-")


def test_the_same_sizes_under_another_label_are_the_same_cell() -> None:
    other = cell(model=replace(LLAMA_8B, name="mine"))
    assert other == cell()
    assert {cell(): 1}[other] == 1
    assert other.key == f"mine-{LLAMA_8B.digest[:8]}_8gpu_s4096_gb256"


def test_tokens_per_step_are_sequences_times_their_length() -> None:
    assert cell().tokens_per_step == 256 * 4096


def test_a_new_cell_that_differs_in_its_batch_only_is_paired_with_the_old_one() -> None:
    old, new = cell(), cell(global_batch_size=512)
    assert other_batches([new], [old]) == [(new, old)]
    assert other_batches([old], [old]) == []
    # The file names both.
    assert other_batches([old, new], [old]) == []
    assert other_batches([cell(global_batch_size=512, num_gpus=16)], [old]) == []
    assert other_batches([new], []) == []


def test_the_speed_of_a_layout_is_per_gpu() -> None:
    assert cell().tokens_per_second_per_gpu(16.0) == 256 * 4096 / 8 / 16
