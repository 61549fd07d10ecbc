"""Every layout trains the same: loss, gradients and weights agree within rounding.

Four ranks train the layouts of several ranks one after another, in one gang for all tests. A layout
of two ranks leaves the others idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from tests.workloads.llama.equivalence.forked_ranks import (
    ending_at_errors,
    join_group,
    run_ranks,
)
from tests.workloads.llama.equivalence.gang import PRELOAD
from workloads.llama.data_parallel import Replica
from workloads.llama.memory import LiveMemory, MemoryReport
from workloads.llama.mesh import Groups, Line, RankPlace
from workloads.llama.optimizer import AdamW
from workloads.llama.training_loop import TrainingLoop

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
NUM_RANKS = 4

# Relative distance |a - b| / |b| over all elements. The comment at each bound is the largest
# distance seen.
# fp32: the same sums in another order. Half precision: every product, and each addition of a
# micro-batch's gradient, is rounded to 8 bits (0.4 %), or to 11 in fp16.
GRADIENT_TOLERANCE = {
    Precision.FP32: 1e-6,  # 2.0e-7
    Precision.BF16: 8e-3,  # 3.3e-3
    Precision.FP16: 1e-3,
}
WEIGHT_TOLERANCE = {Precision.FP32: 4e-7, Precision.BF16: 1e-3, Precision.FP16: 5e-4}
LOSS_TOLERANCE = {Precision.FP32: 5e-7, Precision.BF16: 1e-4, Precision.FP16: 5e-5}
NORM_TOLERANCE = {Precision.FP32: 2e-6, Precision.BF16: 3e-3, Precision.FP16: 5e-4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and the options that it trains with."""

    layout: Layout
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.layout.short, *(f"{name}={value}" for name, value in self.options)])


def case(
    *,
    ranks: int = 1,
    micro_batch_size: int = 1,
    recompute: str = "none",
    precision: Precision = Precision.FP32,
    zero_stage: int = 0,
    **options: Any,
) -> Case:
    return Case(
        layout=Layout(
            data_parallel_size=ranks,
            micro_batch_size=micro_batch_size,
            grad_accum_steps=GLOBAL_BATCH_SIZE // (ranks * micro_batch_size),
            recompute=Recompute.parse(recompute),
            precision=precision,
            zero_stage=zero_stage,
        ),
        options=tuple(options.items()),
    )


FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
ONE_RANK = [
    *(
        case(micro_batch_size=size, recompute=recompute, precision=precision)
        for size in (1, 2, 4)
        for recompute in RECOMPUTES
        for precision in (FP32, BF16)
    ),
    case(precision=BF16, gradient_dtype="fp32"),
    case(loss="whole"),
    case(attention="eager", recompute="selective_ops"),
    case(precision=FP16),
    case(micro_batch_size=4, recompute="full", precision=FP16),
    *(
        case(micro_batch_size=4, recompute=recompute, compile=True)
        for recompute in ("none", "full", "selective_ops")
    ),
]
# What the table of combinations (tests/workloads/llama/equivalence) has not.
SEVERAL_RANKS = [
    *(case(ranks=2, recompute=recompute) for recompute in ("full:1", "selective_ops:2")),
    *(case(ranks=2, precision=BF16, gradient_dtype=dtype) for dtype in ("bf16", "fp32")),
    case(ranks=2, micro_batch_size=2, precision=BF16, reduce_dtype="bf16"),
    case(ranks=2, micro_batch_size=2, compile=True),
    *(
        case(ranks=2, zero_stage=stage, recompute=recompute)
        for stage in (1, 2)
        for recompute in ("full", "selective_ops")
    ),
    case(ranks=2, zero_stage=1, accumulate="last", precision=BF16),
    *(
        case(ranks=2, zero_stage=stage, precision=precision)
        for stage in (1, 2)
        for precision in (BF16, FP16)
    ),
    case(ranks=2, zero_stage=3, precision=BF16, reduce_dtype="bf16", loss="whole"),
    case(ranks=2, micro_batch_size=2, zero_stage=3, recompute="selective_ops", compile=True),
    case(ranks=4, zero_stage=1, replicas=2, accumulate="last"),
    case(ranks=4, zero_stage=3),
    case(ranks=4),
]
# Four micro-batches on each of two ranks.
FOUR = Layout(
    data_parallel_size=2, micro_batch_size=1, grad_accum_steps=4, precision=Precision.FP32
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # as ranks on a CPU


@dataclass(frozen=True, kw_only=True)
class Training:
    losses: list[float]
    norms: list[float]
    gradients: list[Tensor]  # of the first step
    weights: list[Tensor]  # after the last


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


def loop(
    layout: Layout,
    place: RankPlace | None = None,
    *,
    length: int = LENGTH,
    **options: object,
) -> TrainingLoop:
    return TrainingLoop(
        request(layout).model_copy(update={"sequence_length": length}),
        LlamaOptions.model_validate(options),
        device=torch.device("cpu"),
        place=place,
        compile_backend="aot_eager",
    )


def train(case: Case, place: RankPlace | None = None) -> Training:
    trainer = loop(case.layout, place, **dict(case.options))
    trainer.replica.step_gradients(trainer.micro_batches(0))
    gradients = [whole(gradient) for gradient in distributed_gradients(trainer)]
    trainer.replica.clear_gradients()
    losses, norms = [], []
    for step in range(STEPS):
        loss = trainer.step(trainer.micro_batches(step))
        if place is not None:
            dist.all_reduce(loss, group=place.data.group)
            loss /= place.data.size
        losses.append(loss.item())
        norms.append(trainer.gradient_norm())
    return Training(
        losses=losses,
        norms=norms,
        gradients=gradients,
        weights=[whole(weight.detach()) for weight in trainer.replica.model.parameters()],
    )


def distributed_gradients(trainer: TrainingLoop) -> list[Tensor]:
    if isinstance(trainer.replica, Replica):
        return trainer.replica.gradients()
    return [weight.grad for weight in trainer.replica.model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    """A copy in fp32; of a distributed tensor, all of it."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone().float()


def collectives_of_a_step(trainer: TrainingLoop) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(trainer.micro_batches(0))
    return {
        event.key: event.count for event in profiler.key_averages() if event.key.startswith("gloo:")
    }


def memory_of(trainer: TrainingLoop) -> MemoryReport:
    return LiveMemory(trainer.states(), limit_bytes=None).report(trainer.untimed_step)


def run_rank(rank: int, num_ranks: int, port: int, out: Path) -> None:
    """One of four ranks: take part in the layouts that have it."""
    join_group(rank, num_ranks, port)
    groups, found = Groups(), {"trained": {}, "collectives": {}, "memory": {}}
    for each in SEVERAL_RANKS:
        place = groups.place(each.layout, replicas=dict(each.options).get("replicas", 1))
        if rank < each.layout.world_size:
            with ending_at_errors(rank, each.name, out):
                found["trained"][each.name] = train(each, place)
    place = groups.place(FOUR)
    for options in ({}, {"accumulate": "last"}):
        for stage in (0, 1, 2, 3):
            if rank < 2 and (stage < 2 or not options):
                layout = replace(FOUR, zero_stage=stage)
                key = (stage, options.get("accumulate", "scatter"))
                found["collectives"][key] = collectives_of_a_step(loop(layout, place, **options))
                for steps in (1, 4):
                    trainer = loop(replace(layout, grad_accum_steps=steps), place, **options)
                    found["memory"][*key, steps] = memory_of(trainer)
    torch.save(found, out / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, NUM_RANKS, out, patience_seconds=300, preload=PRELOAD)
    return [torch.load(out / f"rank-{i}.pt", weights_only=False) for i in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def references() -> dict[Precision, Training]:
    """Trained in one piece: one rank, one micro-batch, nothing recomputed, the loss as a whole."""
    return {
        precision: train(case(micro_batch_size=4, precision=precision, loss="whole"))
        for precision in (FP32, BF16, FP16)
    }


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative distance of all elements together."""
    a_flat, b_flat = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (a, b))
    return ((a_flat - b_flat).norm() / b_flat.norm()).item()


def assert_same_training(each: Case, training: Training, reference: Training) -> None:
    precision = each.layout.precision
    assert training.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE[precision])
    assert training.norms == pytest.approx(reference.norms, rel=NORM_TOLERANCE[precision])
    assert distance(training.gradients, reference.gradients) < GRADIENT_TOLERANCE[precision]
    assert distance(training.weights, reference.weights) < WEIGHT_TOLERANCE[precision]


@pytest.mark.parametrize("each", ONE_RANK, ids=lambda it: it.name)
def test_one_rank_trains_the_same_in_every_layout(
    each: Case, references: dict[Precision, Training]
) -> None:
    assert_same_training(each, train(each), references[each.layout.precision])


@pytest.mark.long
@pytest.mark.parametrize("each", SEVERAL_RANKS, ids=lambda it: it.name)
def test_several_ranks_train_the_same_as_one_in_every_layout(
    each: Case, references: dict[Precision, Training], ranks: list[dict]
) -> None:
    training = ranks[0]["trained"][each.name]
    assert_same_training(each, training, references[each.layout.precision])
    # All ranks end with the same weights, to the bit.
    for other in ranks[1 : each.layout.world_size]:
        pairs = zip(training.weights, other["trained"][each.name].weights, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_loss_in_chunks_trains_the_same() -> None:
    """In 3 chunks of 171 tokens and fewer."""
    whole, chunked = (
        case(micro_batch_size=4, precision=BF16, loss=loss, length=128)
        for loss in ("whole", "chunked:3")
    )
    assert_same_training(chunked, train(chunked), train(whole))


def test_fp32_accumulation_is_closer_to_exact_than_bf16_accumulation(
    references: dict[Precision, Training],
) -> None:
    exact = references[FP32].gradients
    distances = [
        distance(train(case(precision=BF16, gradient_dtype=dtype)).gradients, exact)
        for dtype in ("fp32", "bf16")
    ]
    assert distances[0] < distances[1]


def test_clipped_gradients_have_the_norm_that_was_asked_for() -> None:
    layout = Layout(micro_batch_size=GLOBAL_BATCH_SIZE, precision=FP32)
    divisors = []
    for clip in (0.25, 100.0, 0.0):
        trainer = loop(layout, clip_gradients=clip)
        trainer.optimizer = Recorder(trainer.optimizer)
        trainer.step(trainer.micro_batches(0))
        divisors.append(trainer.optimizer.divisor)
        norm = trainer.gradient_norm()
        if clip == 0.25:
            assert norm / divisors[0] == pytest.approx(0.25, rel=1e-6)
    assert divisors[1:] == [1.0, None]


class Recorder:
    """An optimizer that remembers what its gradients are divided by."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer, self.divisor = optimizer, None

    def step(self, gradients: list[Tensor], divisor: Tensor | None = None) -> None:
        self.divisor = None if divisor is None else divisor.item()
        self._optimizer.step(gradients, divisor=divisor)


@pytest.mark.long
def test_gradients_are_reduced_as_often_as_the_options_say(ranks: list[dict]) -> None:
    # The embedding, three layers and the head. With gloo, FSDP scatters by all_reduce.
    units = SHAPE.num_layers + 2
    of_norm = 1
    for rank in ranks[:2]:
        found = rank["collectives"]
        # So few weights are one bucket of DDP, and each rank has all gradients for the norm.
        assert found[0, "scatter"] == {"gloo:all_reduce": 1}
        for stage in (1, 2):
            assert found[stage, "scatter"] == {
                "gloo:all_gather": units,
                "gloo:all_reduce": 4 * units + of_norm,
            }
        assert found[1, "last"] == {
            "gloo:all_gather": units,
            "gloo:all_reduce": units + of_norm,
        }
        # Each of four micro-batches gathers twice, but the head, which is used at once, once.
        assert found[3, "scatter"] == {
            "gloo:all_gather": 4 * (2 * units - 1),
            "gloo:all_reduce": 4 * units + of_norm,
        }


@pytest.mark.long
def test_states_are_sharded_and_gradients_come_and_go(ranks: list[dict]) -> None:
    for rank in ranks[:2]:
        for (stage, _, steps), report in rank["memory"].items():
            parts, n = report.bytes_by_part, SHAPE.num_parameters
            shards = 2 if stage else 1
            counters = 4 * (3 + SHAPE.num_layers * 7)  # AdamW's, one for each weight
            assert parts["parameters"] == 4 * n / shards
            assert parts["optimizer"] == 8 * n / shards + counters
            # DDP's buckets stay in any case.
            lasting = steps > 1 or stage == 0
            assert parts["gradients"] == (4 * n / shards if lasting else 0)
            assert sum(parts.values()) == report.peak_allocated_bytes


def test_the_global_batch_does_not_depend_on_the_layout() -> None:
    reference = loop(Layout(micro_batch_size=GLOBAL_BATCH_SIZE, precision=FP32))
    expected = reference.micro_batches(3)[0][0]
    for layout in (case(ranks=2).layout, case(ranks=2, micro_batch_size=2).layout):
        parts = [
            tokens
            for index in range(2)
            for tokens, _ in loop(
                layout, RankPlace(dp=Line(ranks=(0, 1), index=index))
            ).micro_batches(3)
        ]
        assert torch.equal(torch.cat(parts), expected)
