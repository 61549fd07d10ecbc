"""Every layout trains the same: loss, gradients and weights agree within rounding.

Two ranks train all layouts of data-parallel size 2 in one process group, once for all tests.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from workloads.llama.live_tensors import LiveTensors
from workloads.llama.memory import LiveMemory, MemoryReport
from workloads.llama.optimizer import AdamW
from workloads.llama.train import TrainingLoop

SHAPE = ModelShape(
    name="grouped",
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=160,
    vocab_size=256,
)
GLOBAL_BATCH_SIZE, LENGTH, STEPS = 4, 32, 2
RECOMPUTES = ("none", "selective_attention", "selective_ops", "full", "full:1", "selective_ops:2")
REFERENCE = Layout(micro_batch_size=GLOBAL_BATCH_SIZE, precision=Precision.FP32)

# Relative distance |a - b| / |b| over all elements; beside each bound, the largest distance seen.
# fp32: the same sums in another
# order. bf16: every product, and each addition of a micro-batch's gradient, is rounded to 8 bits
# (0.4 %); fp32 sums spare the latter.
GRADIENT_TOLERANCE = {
    (Precision.FP32, "bf16"): 1e-6,  # 1.9e-7
    (Precision.BF16, "bf16"): 8e-3,  # 3.3e-3
    (Precision.BF16, "fp32"): 6e-3,  # 2.5e-3
}
WEIGHT_TOLERANCE = {Precision.FP32: 2e-7, Precision.BF16: 1e-3}  # 3.9e-8, 2.4e-4
LOSS_TOLERANCE = {Precision.FP32: 5e-7, Precision.BF16: 1e-4}  # 8.6e-8, 2.1e-5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # as ranks on a CPU


@dataclass(frozen=True, kw_only=True)
class Training:
    losses: list[float]
    gradients: list[Tensor]  # of the first step
    weights: list[Tensor]  # after the last


def layouts(data_parallel_size: int, precision: Precision) -> list[Layout]:
    per_rank = GLOBAL_BATCH_SIZE // data_parallel_size
    return [
        Layout(
            data_parallel_size=data_parallel_size,
            micro_batch_size=micro_batch_size,
            grad_accum_steps=per_rank // micro_batch_size,
            recompute=Recompute.parse(recompute),
            precision=precision,
        )
        for micro_batch_size in (1, 2, 4)
        if micro_batch_size <= per_rank
        for recompute in RECOMPUTES
    ]


def request(layout: Layout) -> TrialRequest:
    return TrialRequest(
        sweep="layouts",
        trial_id=1,
        attempt=1,
        workload="llama",
        model=SHAPE,
        sequence_length=LENGTH,
        layout=layout,
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.02
        ),
        limits=PhaseLimits(
            start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60
        ),
        seed=11,
    )


def train(layout: Layout, gradient_dtype: str, *, rank: int = 0) -> Training:
    options = LlamaOptions.model_validate({"gradient_dtype": gradient_dtype})
    trainer = TrainingLoop(
        request(layout), options, device=torch.device("cpu"), data_parallel_rank=rank
    )
    losses, gradients = [], []
    for step in range(STEPS):
        loss = trainer.replica.step_gradients(trainer.micro_batches(step))
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        if step == 0:
            gradients = [gradient.clone().float() for gradient in trainer.replica.gradients()]
        trainer.optimizer.step()
    return Training(
        losses=losses,
        gradients=gradients,
        weights=[weight.detach().float() for weight in trainer.replica.weights],
    )


def collectives_of_a_step(layout: Layout) -> dict[str, int]:
    trainer = TrainingLoop(
        request(layout),
        LlamaOptions(),
        device=torch.device("cpu"),
        data_parallel_rank=dist.get_rank(),
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(trainer.micro_batches(0))
    return {
        event.key: event.count for event in profiler.key_averages() if event.key.startswith("gloo:")
    }


def memory_of(layout: Layout, gradient_dtype: str) -> MemoryReport:
    options = LlamaOptions.model_validate({"gradient_dtype": gradient_dtype})
    trainer = TrainingLoop(
        request(layout), options, device=torch.device("cpu"), data_parallel_rank=dist.get_rank()
    )
    return LiveMemory(trainer.states(), limit_bytes=None).report(trainer.untimed_step)


@dataclass(frozen=True, kw_only=True)
class Stepped:
    weights: list[Tensor]
    temporary_bytes: int


def step_in_chunks(*, num_shards: int, dtype: torch.dtype) -> Stepped:
    """Step weights three times in chunks of 40: the last, of one element, has none for rank 1."""
    generator = torch.Generator().manual_seed(2)
    weights = [
        torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (64,), (3, 34))
    ]
    gradients = [torch.randn(weight.shape, generator=generator).to(dtype) for weight in weights]
    assert sum(weight.numel() for weight in weights) % 40 == 1
    shard = dist.get_rank() if num_shards > 1 else 0
    adamw = AdamW(
        weights,
        gradients,
        learning_rate=1e-2,
        num_shards=num_shards,
        shard=shard,
        chunk_elements=40,
    )
    with LiveTensors([*weights, *gradients, *adamw.tensors()]) as tracker:
        live_bytes = tracker.live_bytes
        # Only this one is looked at: gloo holds on to what it gathered for a while, even into a
        # step that follows at once
        adamw.step()
    for _ in range(2):
        adamw.step()
    return Stepped(weights=weights, temporary_bytes=tracker.peak_bytes - live_bytes)


CASES = [(Precision.FP32, "bf16"), (Precision.BF16, "bf16"), (Precision.BF16, "fp32")]


def sharded(layout: Layout) -> Layout:
    return replace(layout, zero_stage=1)


def run_rank(rank: int, port: int, out: Path) -> None:
    """One of two ranks: train every layout of data-parallel size 2 in one process group."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    one = Layout(data_parallel_size=2, micro_batch_size=2, precision=Precision.FP32)
    four = Layout(
        data_parallel_size=2, micro_batch_size=1, grad_accum_steps=4, precision=Precision.FP32
    )
    found = {
        "trained": {
            (case, layout): train(layout, case[1], rank=rank)
            for case in CASES
            for layout in every_layout(case[0])
        },
        "collectives": {layout: collectives_of_a_step(layout) for layout in (four, sharded(four))},
        "memory": {
            (case, zero_stage): memory_of(
                replace(one, precision=case[0], zero_stage=zero_stage), case[1]
            )
            for case in CASES
            for zero_stage in (0, 1)
        },
        "stepped": {
            (num_shards, dtype): step_in_chunks(num_shards=num_shards, dtype=dtype)
            for num_shards in (1, 2)
            for dtype in (torch.float32, torch.bfloat16)
        },
    }
    torch.save(found, out / f"rank-{rank}.pt")
    dist.destroy_process_group()


def every_layout(precision: Precision) -> list[Layout]:
    """All of data-parallel size 2; no recomputation with ZeRO stage 1: it ends before the step."""
    plain = layouts(2, precision)
    return [*plain, *(sharded(layout) for layout in plain if str(layout.recompute) == "none")]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A fork would inherit dead threads of torch.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["workloads.llama"])
    ranks = [server.Process(target=run_rank, args=(rank, port, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def references() -> dict:
    """Trained in one piece: one replica, one micro-batch, nothing recomputed."""
    return {
        case: train(Layout(micro_batch_size=GLOBAL_BATCH_SIZE, precision=case[0]), case[1])
        for case in CASES
    }


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative distance of all elements together."""
    a_flat, b_flat = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (a, b))
    return ((a_flat - b_flat).norm() / b_flat.norm()).item()


def assert_same_training(
    training: Training, reference: Training, case: tuple[Precision, str]
) -> None:
    assert training.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE[case[0]])
    assert distance(training.gradients, reference.gradients) < GRADIENT_TOLERANCE[case]
    assert distance(training.weights, reference.weights) < WEIGHT_TOLERANCE[case[0]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_replica_trains_the_same_in_every_layout(
    case: tuple[Precision, str], references: dict
) -> None:
    for layout in layouts(1, case[0]):
        assert_same_training(train(layout, case[1]), references[case], case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_replicas_train_the_same_as_one_in_every_layout(
    case: tuple[Precision, str], references: dict, two_ranks: list[dict]
) -> None:
    for layout in every_layout(case[0]):
        assert_same_training(two_ranks[0]["trained"][case, layout], references[case], case)


def test_both_replicas_end_with_the_same_weights_to_the_bit(two_ranks: list[dict]) -> None:
    for key, training in two_ranks[0]["trained"].items():
        other = two_ranks[1]["trained"][key]
        assert all(
            torch.equal(a, b) for a, b in zip(training.weights, other.weights, strict=True)
        ), key


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharing_out_the_optimizer_states_changes_no_bit(
    case: tuple[Precision, str], two_ranks: list[dict]
) -> None:
    trained = two_ranks[0]["trained"]
    pairs = [
        (trained[case, layout], trained[case, replace(layout, zero_stage=0)])
        for layout in every_layout(case[0])
        if layout.zero_stage
    ]
    assert len(pairs) == 2
    for shared_out, whole in pairs:
        assert shared_out.losses == whole.losses
        assert all(
            torch.equal(a, b) for a, b in zip(shared_out.gradients, whole.gradients, strict=True)
        )
        assert all(
            torch.equal(a, b) for a, b in zip(shared_out.weights, whole.weights, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_of_awkward_sizes_are_stepped_and_gathered_as_a_whole(
    dtype: torch.dtype, two_ranks: list[dict]
) -> None:
    for rank in two_ranks:
        whole, shares = rank["stepped"][1, dtype], rank["stepped"][2, dtype]
        assert all(torch.equal(a, b) for a, b in zip(shares.weights, whole.weights, strict=True))


def test_a_step_needs_a_chunk_of_fp32_gradients_and_of_gathered_weights_for_a_moment(
    two_ranks: list[dict],
) -> None:
    for rank in two_ranks:
        temporary = {key: stepped.temporary_bytes for key, stepped in rank["stepped"].items()}
        assert temporary == {
            (1, torch.float32): 0,
            (1, torch.bfloat16): 4 * 40,
            (2, torch.float32): 4 * 40,  # the gathered weights
            (2, torch.bfloat16): 4 * 20
            # Fp32 gradients of half the chunk, and gathered weights of 2 bytes.
            + 2 * 40,
        }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_optimizer_states_are_shared_out_equally_and_nothing_else_is(
    case: tuple[Precision, str], two_ranks: list[dict]
) -> None:
    # Bytes a parameter: m, v and, in bf16, the fp32 master.
    states = 8 if case[0] is Precision.FP32 else 12
    num_tensors = 3 + SHAPE.num_layers * 7
    shares = []
    for rank in two_ranks:
        whole, share = (rank["memory"][case, zero_stage].bytes_by_part for zero_stage in (0, 1))
        # 4: AdamW's step counter of each piece.
        assert whole["optimizer"] == states * SHAPE.num_parameters + 4 * num_tensors
        assert share["optimizer"] == pytest.approx(
            states * SHAPE.num_parameters / 2, abs=4 * num_tensors
        )
        shares.append(share["optimizer"])
        assert {part: share[part] for part in ("parameters", "gradients", "activations")} == {
            part: whole[part] for part in ("parameters", "gradients", "activations")
        }
    # Each rank steps a piece of one weight.
    num_cuts = 1
    assert sum(shares) == states * SHAPE.num_parameters + 4 * (num_tensors + num_cuts)


def test_fp32_accumulation_is_closer_to_exact_than_bf16_accumulation(references: dict) -> None:
    exact = references[Precision.FP32, "bf16"].gradients
    layout = Layout(
        micro_batch_size=1, grad_accum_steps=GLOBAL_BATCH_SIZE, precision=Precision.BF16
    )
    assert distance(train(layout, "fp32").gradients, exact) < distance(
        train(layout, "bf16").gradients, exact
    )


def test_gradients_are_synchronised_once_after_four_micro_batches_and_sharded_weights_gathered_once(
    two_ranks: list[dict],
) -> None:
    for rank in two_ranks:
        for layout, collectives in rank["collectives"].items():
            gathers = {"gloo:all_gather": 1} if layout.zero_stage else {}
            # So few weights are one bucket of DDP and one chunk of the optimizer.
            assert collectives == {"gloo:all_reduce": 1} | gathers


def test_the_global_batch_does_not_depend_on_the_layout() -> None:
    whole = TrainingLoop(
        request(REFERENCE), LlamaOptions(), device=torch.device("cpu"), data_parallel_rank=0
    ).micro_batches(3)[0][0]
    for layout in layouts(2, Precision.FP32):
        parts = [
            tokens
            for rank in range(2)
            for tokens, _ in TrainingLoop(
                request(layout), LlamaOptions(), device=torch.device("cpu"), data_parallel_rank=rank
            ).micro_batches(3)
        ]
        assert torch.equal(torch.cat(parts), whole)
