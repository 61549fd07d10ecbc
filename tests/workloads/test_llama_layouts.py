"""Every layout trains the same: for one seed and one global batch, loss, gradients and weights agree within rounding."""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from orchestrator.core.layout import Layout, Precision, Recompute
from orchestrator.core.model_shape import ModelShape
from orchestrator.core.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from workloads.llama.options import Options
from workloads.llama.train import Trainer

SHAPE = ModelShape(
    name="grouped", num_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, ffn_hidden_size=160, vocab_size=256
)
GLOBAL_BATCH_SIZE, LENGTH, STEPS = 4, 32, 2
RECOMPUTES = ("none", "selective_attention", "selective_ops", "full", "full:1", "selective_ops:2")
REFERENCE = Layout(micro_batch_size=GLOBAL_BATCH_SIZE, precision=Precision.FP32)

# Relative distance |a - b| / |b| over all elements; beside each bound, the largest distance seen. fp32: the same sums in another
# order. bf16: every product, and each addition of a micro-batch's gradient, is rounded to 8 bits (0.4 %); fp32 sums spare the latter.
GRADIENT_TOLERANCE = {
    (Precision.FP32, "bf16"): 1e-6,  # 1.9e-7
    (Precision.BF16, "bf16"): 8e-3,  # 3.3e-3
    (Precision.BF16, "fp32"): 6e-3,  # 2.5e-3
}
WEIGHT_TOLERANCE = {Precision.FP32: 2e-7, Precision.BF16: 1e-3}  # 3.9e-8, 2.4e-4
LOSS_TOLERANCE = {Precision.FP32: 5e-7, Precision.BF16: 1e-4}  # 8.6e-8, 2.1e-5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # as ranks on a CPU have; two threads that wait for each other crawl on a busy machine


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
        measurement=MeasurementPlan(warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.02),
        limits=PhaseLimits(start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60),
        seed=11,
    )


def train(layout: Layout, gradient_dtype: str, *, rank: int = 0) -> Training:
    options = Options.model_validate({"gradient_dtype": gradient_dtype})
    trainer = Trainer(request(layout), options, device=torch.device("cpu"), data_parallel_rank=rank)
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
    return Training(losses=losses, gradients=gradients, weights=[weight.detach().float() for weight in trainer.replica.weights])


def num_all_reduces(grad_accum_steps: int) -> int:
    layout = Layout(data_parallel_size=2, micro_batch_size=1, grad_accum_steps=grad_accum_steps, precision=Precision.FP32)
    trainer = Trainer(request(layout), Options(), device=torch.device("cpu"), data_parallel_rank=dist.get_rank())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(trainer.micro_batches(0))
    return sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_reduce")


CASES = [(Precision.FP32, "bf16"), (Precision.BF16, "bf16"), (Precision.BF16, "fp32")]


def run_rank(rank: int, port: int, out: Path) -> None:
    """One of two ranks: train every layout of data-parallel size 2 in one process group."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    trained = {(case, layout): train(layout, case[1], rank=rank) for case in CASES for layout in layouts(2, case[0])}
    reduces = {n: num_all_reduces(n) for n in (1, 4)}
    torch.save({"trained": trained, "all_reduces": reduces}, out / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("forkserver")  # this process has run torch operations: a fork of it would inherit dead threads
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
    return {case: train(Layout(micro_batch_size=GLOBAL_BATCH_SIZE, precision=case[0]), case[1]) for case in CASES}


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative distance of all elements together."""
    a_flat, b_flat = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (a, b))
    return ((a_flat - b_flat).norm() / b_flat.norm()).item()


def assert_same_training(training: Training, reference: Training, case: tuple[Precision, str]) -> None:
    assert training.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE[case[0]])
    assert distance(training.gradients, reference.gradients) < GRADIENT_TOLERANCE[case]
    assert distance(training.weights, reference.weights) < WEIGHT_TOLERANCE[case[0]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_replica_trains_the_same_in_every_layout(case: tuple[Precision, str], references: dict) -> None:
    for layout in layouts(1, case[0]):
        assert_same_training(train(layout, case[1]), references[case], case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_replicas_train_the_same_as_one_in_every_layout(case: tuple[Precision, str], references: dict, two_ranks: list[dict]) -> None:
    for layout in layouts(2, case[0]):
        assert_same_training(two_ranks[0]["trained"][case, layout], references[case], case)


def test_both_replicas_end_with_the_same_weights_to_the_bit(two_ranks: list[dict]) -> None:
    for key, training in two_ranks[0]["trained"].items():
        other = two_ranks[1]["trained"][key]
        assert all(torch.equal(a, b) for a, b in zip(training.weights, other.weights, strict=True)), key


def test_fp32_accumulation_is_closer_to_exact_than_bf16_accumulation(references: dict) -> None:
    exact = references[Precision.FP32, "bf16"].gradients
    layout = Layout(micro_batch_size=1, grad_accum_steps=GLOBAL_BATCH_SIZE, precision=Precision.BF16)
    assert distance(train(layout, "fp32").gradients, exact) < distance(train(layout, "bf16").gradients, exact)


def test_gradients_are_synchronised_once_per_step_however_many_micro_batches(two_ranks: list[dict]) -> None:
    for rank in two_ranks:
        assert rank["all_reduces"][4] == rank["all_reduces"][1] > 0


def test_the_global_batch_does_not_depend_on_the_layout() -> None:
    whole = Trainer(request(REFERENCE), Options(), device=torch.device("cpu"), data_parallel_rank=0).micro_batches(3)[0][0]
    for layout in layouts(2, Precision.FP32):
        parts = [
            tokens
            for rank in range(2)
            for tokens, _ in Trainer(request(layout), Options(), device=torch.device("cpu"), data_parallel_rank=rank).micro_batches(3)
        ]
        assert torch.equal(torch.cat(parts), whole)
