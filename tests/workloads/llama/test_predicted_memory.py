"""The peak of every combination that is proved to train is predicted within 2 %.

The ranks of a gang train combination after combination; each counts its live tensors in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.trainer import llama_trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from tests.workloads.llama.equivalence.combination import NARROW, Combination
from tests.workloads.llama.equivalence.combinations import COMBINATIONS
from tests.workloads.llama.equivalence.forked_ranks import (
    ending_at_errors,
    join_group,
    run_ranks,
)
from tests.workloads.llama.equivalence.gang import PRELOAD
from workloads.live_tensors import LiveTensors
from workloads.llama.mesh import Groups, RankPlace
from workloads.llama.model import Llama
from workloads.llama.training_loop import TrainingLoop

PATIENCE_SECONDS = 540
# Longer than the hidden size: what is made of weights alone is then small compared with what tokens
# need.
LENGTH = 128
WITHIN = 0.02
MOST_STEPS = 8


def _larger(shape: ModelShape) -> ModelShape:
    return replace(
        shape,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        ffn_hidden_size=160,
        vocab_size=512,
    )


def counted(num_ranks: int) -> list[Combination]:
    """The combinations that are counted.

    Compiled layers use memory in addition to what they keep. How much depends on the kernels, and a
    CPU has others than a GPU. A shard of few rows is padded to as many as its neighbour has. A CPU
    emulates fp8 with copies that a GPU does not make.
    """
    return [
        replace(combination, shape=_larger(combination.shape))
        for combination in COMBINATIONS[num_ranks]
        if combination.shape != NARROW
        and "compile" not in dict(combination.options)
        and combination.layout.precision is not Precision.FP8
    ]


def predicted_bytes(combination: Combination) -> float:
    layout, shape = combination.layout, combination.shape
    options = dict(combination.llama_options)
    cell = Cell(
        model=shape,
        num_gpus=layout.world_size,
        sequence_length=LENGTH,
        global_batch_size=layout.global_batch_size,
    )
    found = predict_memory(LayoutTable.of([layout]), cell, llama_trainer(options, on_gpu=False))
    # Each position has cosines and sines of half a head, and a row of the mask of eager attention.
    constants = LENGTH * 4 * shape.head_dim
    constants += LENGTH**2 if options["attention"] == "eager" else 0
    # Ids and targets of a step.
    sequences = layout.micro_batch_size * layout.grad_accum_steps
    tokens = 16 * sequences * LENGTH // layout.context_parallel_size
    return float(found.total[0]) + constants + tokens


def counted_bytes(combination: Combination, place: RankPlace) -> int:
    """The peak of a step, of the fullest rank.

    Gloo's threads may free a buffer late, so each rank's peak is the lowest of its steps, and steps
    are counted until the fullest rank is near the prediction.
    """
    request = combination.request().model_copy(update={"sequence_length": LENGTH})
    loop = TrainingLoop(request, combination.llama_options, device=torch.device("cpu"), place=place)
    loop.step(loop.micro_batches(0))
    own = []
    near = (1.0 + WITHIN) * predicted_bytes(combination)
    for step in range(1, 1 + MOST_STEPS):
        micro_batches = loop.micro_batches(step)
        tokens = [tensor for micro_batch in micro_batches for tensor in micro_batch]
        with LiveTensors([*loop.states().tensors(), *tokens]) as tracker:
            loop.step(micro_batches)
        own.append(tracker.peak_bytes)
        fullest = torch.tensor(min(own))
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        if fullest <= near:
            break
    return int(fullest)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", COMBINATIONS)
def test_the_peak_is_predicted_within_2_percent(num_ranks: int, tmp_path: Path) -> None:
    combinations = counted(num_ranks)
    peaks = _peaks(num_ranks, tmp_path)
    errors = {
        combination.name: predicted_bytes(combination) / peak - 1.0
        for combination, peak in zip(combinations, peaks, strict=True)
    }
    for name, error in errors.items():
        print(f"{100 * error:6.2f} % {name}")
    assert {name: error for name, error in errors.items() if abs(error) > WITHIN} == {}


def test_seventy_combinations_are_counted() -> None:
    assert sum(len(counted(num_ranks)) for num_ranks in COMBINATIONS) >= 70


@pytest.mark.parametrize(
    ("recompute", "attention"),
    [
        ("none", AttentionKind.FLASH),
        *(
            pytest.param(*longer, marks=pytest.mark.long)
            for longer in (
                ("none", AttentionKind.EAGER),
                ("selective_attention", AttentionKind.FLASH),
                ("selective_ops", AttentionKind.FLASH),
            )
        ),
    ],
)
def test_a_compiled_layer_keeps_what_is_predicted(recompute: str, attention: AttentionKind) -> None:
    shape = replace(_larger(NARROW), num_layers=1)
    model = Llama(
        shape,
        sequence_length=LENGTH,
        attention=attention,
        recompute=Recompute.parse(recompute),
        loss_chunk_tokens=None,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    model.materialise(torch.device("cpu"), seed=1)
    layer = model.layers["0"]
    # This backend decides what is kept, as inductor does on every device, and compiles nothing.
    layer.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.ones(2, LENGTH, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    kept = _kept_bytes(model, lambda: layer(x, model.rotation, model.causal_mask))
    layout = Layout(
        micro_batch_size=2, recompute=Recompute.parse(recompute), precision=Precision.BF16
    )
    cell = Cell(model=shape, num_gpus=1, sequence_length=LENGTH, global_batch_size=2)
    trainer = llama_trainer({"attention": attention.value}, on_gpu=True)
    predicted = predict_memory(LayoutTable.of([layout]), cell, trainer).activations[0]
    assert predicted == pytest.approx(kept, rel=WITHIN)


def _kept_bytes(model: Llama, run: Callable[[], Tensor]) -> int:
    """The bytes that the result of a call keeps for its backward pass.

    Weights, constants and the state of the random numbers (some KiB) do not count.
    """
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.constants())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.uint8:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in known)


def _peaks(num_ranks: int, folder: Path) -> list[int]:
    """The peak of each combination on its fullest rank."""
    run_ranks(_run_rank, num_ranks, folder, patience_seconds=PATIENCE_SECONDS, preload=PRELOAD)
    found: list[int] = torch.load(folder / "peaks.pt")
    return found


def _run_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    join_group(rank, num_ranks, port)
    groups, peaks = Groups(), []
    for combination in counted(num_ranks):
        with ending_at_errors(rank, combination.name, folder):
            place = groups.place(combination.layout, replicas=combination.llama_options.replicas)
            peaks.append(counted_bytes(combination, place))
    if rank == 0:
        torch.save(peaks, folder / "peaks.pt")
    dist.destroy_process_group()
