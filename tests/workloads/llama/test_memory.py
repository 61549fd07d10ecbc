"""What a step keeps, counted to the byte, equals the closed forms of docs/measuring.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.trainer import llama_trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind, LlamaOptions
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from workloads.live_tensors import LiveTensors
from workloads.llama.memory import DeviceMemory, LiveMemory, MemoryReport, States
from workloads.llama.optimizer import AdamW
from workloads.llama.training_loop import TrainingLoop

SHAPE = ModelShape(
    name="grouped",
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=160,
    vocab_size=512,
)
LENGTH = 32
KINDS = (AttentionKind.FLASH, AttentionKind.EAGER)  # of a CPU
# Every token of a step, not only of a micro-batch, has an id and a target, both int64.
TOKEN_BYTES = 16
# The loss, and cross entropy's number of targets: 4 bytes each.
LOSS_SCALARS = 8
RECOMPUTES = ("none", "selective_attention", "selective_ops", "full", "full:2", "selective_ops:1")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # as ranks on a CPU


def trainer(
    layout: Layout, *, shape: ModelShape = SHAPE, length: int = LENGTH, **options: object
) -> TrainingLoop:
    request = TrialRequest(
        sweep="memory",
        trial_id=1,
        attempt=1,
        workload="llama",
        model=shape,
        sequence_length=length,
        layout=layout,
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.02
        ),
        limits=PhaseLimits(
            start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60
        ),
        seed=5,
    )
    return TrainingLoop(
        request,
        LlamaOptions.model_validate({"loss": "whole", **options}),
        device=torch.device("cpu"),
    )


def report(of: TrainingLoop) -> MemoryReport:
    return LiveMemory(of.states(), limit_bytes=None).report(of.untimed_step)


def layer_bytes_per_token(
    recompute: Recompute,
    precision: Precision,
    attention: AttentionKind,
    *,
    shape: ModelShape = SHAPE,
    length: int = LENGTH,
) -> int:
    """The closed form: what a layer keeps of one token for its backward pass."""
    element = 2 if precision is Precision.BF16 else 4
    h, kv, ffn, heads = (
        shape.hidden_size,
        shape.kv_size,
        shape.ffn_hidden_size,
        shape.num_attention_heads,
    )
    eager = attention is AttentionKind.EAGER
    match str(recompute):
        case "full":
            return element * h  # its input
        case "selective_ops":
            # Its input, queries, keys and values, the attention's result, and w1's.
            # Scores, or one fp32 log-sum per head.
            core = element * heads * length if eager else 4 * heads
            return element * (3 * h + 2 * kv + ffn) + core
        case "selective_attention":  # all but the core's insides
            return element * (6 * h + 2 * kv + 4 * ffn) + 8
        case _ if eager:
            # Keys and values of all heads; fp32 weights and, in bf16, their rounded copy.
            return element * (8 * h + 4 * ffn) + (6 if element == 2 else 4) * heads * length + 8
        case _:
            return (
                element * (6 * h + 2 * kv + 4 * ffn) + 4 * heads + 8
            )  # 8: the two norms' fp32 scale


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("recompute_text", RECOMPUTES)
def test_activations_are_the_closed_form_to_the_byte(
    recompute_text: str, attention: AttentionKind, precision: Precision
) -> None:
    recompute = Recompute.parse(recompute_text)
    measured = report(
        trainer(
            Layout(micro_batch_size=2, recompute=recompute, precision=precision),
            attention=attention,
        )
    )
    num_recomputed = recompute.layers_of(SHAPE.num_layers)
    whole = Recompute(mode=recompute.mode, policy=recompute.policy)
    layers = num_recomputed * layer_bytes_per_token(whole, precision, attention)
    layers += (SHAPE.num_layers - num_recomputed) * layer_bytes_per_token(
        Recompute(), precision, attention
    )
    element = 2 if precision is Precision.BF16 else 4
    # The last norm's input, result and scale; fp32 log-softmax.
    head = 2 * element * SHAPE.hidden_size + 4 + 4 * SHAPE.vocab_size
    assert (
        measured.bytes_by_part["activations"]
        == 2 * LENGTH * (layers + head + TOKEN_BYTES) + LOSS_SCALARS
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("recompute", ["none", "selective_ops", "full"])
def test_the_loss_needs_eight_bytes_a_logit_for_a_moment(
    recompute: str, precision: Precision
) -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=4096)  # the loss is the peak
    measured = report(
        trainer(
            Layout(
                micro_batch_size=2,
                grad_accum_steps=2,
                recompute=Recompute.parse(recompute),
                precision=precision,
            ),
            shape=shape,
        )
    )
    logits = 2 * LENGTH * shape.vocab_size
    assert measured.bytes_by_part["temporaries"] == pytest.approx(8 * logits, abs=64)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_a_chunked_loss_holds_the_logits_of_a_chunk_and_two_gradients(
    num_chunks: int, precision: Precision
) -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=4096)  # the loss is the peak
    measured = report(
        trainer(
            Layout(micro_batch_size=16, grad_accum_steps=2, precision=precision),
            shape=shape,
            loss=f"chunked:{num_chunks}",
        )
    )
    element, h = 2 if precision is Precision.BF16 else 4, shape.hidden_size
    tokens = 16 * LENGTH
    layers = SHAPE.num_layers * layer_bytes_per_token(
        Recompute(), precision, AttentionKind.FLASH, shape=shape
    )
    # The last norm's input and scale, and the gradients of its result and of the head's weight.
    head = tokens * (2 * element * h + 4) + element * shape.vocab_size * h
    assert measured.bytes_by_part["activations"] == pytest.approx(
        tokens * (layers + 2 * TOKEN_BYTES) + head, abs=64
    )
    # Logits and their log-softmax, both in fp32; the last norm's result.
    chunk = 8 * shape.vocab_size * tokens / num_chunks
    assert measured.bytes_by_part["temporaries"] == pytest.approx(
        tokens * element * h + chunk, abs=1024
    )


def test_gradients_of_one_micro_batch_are_gone_before_the_next_forward_pass() -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=4096)

    def peak(grad_accum_steps: int, micro_batch_size: int, precision: Precision) -> MemoryReport:
        layout = Layout(
            micro_batch_size=micro_batch_size,
            grad_accum_steps=grad_accum_steps,
            precision=precision,
        )
        return report(trainer(layout, shape=shape))

    # The loss is the peak, of many tokens: no gradient exists then.
    lasting, freed = peak(2, 32, Precision.FP32), peak(1, 32, Precision.FP32)
    assert lasting.bytes_by_part["gradients"] == 4 * shape.num_parameters
    assert freed.bytes_by_part["gradients"] == 0
    tokens = 32 * LENGTH
    assert lasting.peak_allocated_bytes - freed.peak_allocated_bytes == pytest.approx(
        4 * shape.num_parameters + tokens * TOKEN_BYTES, abs=64
    )
    # With few tokens it is the optimizer's step: all gradients, and in bf16 their fp32 copies.
    step = peak(1, 1, Precision.BF16).bytes_by_part
    assert step["activations"] + step["temporaries"] == pytest.approx(
        (2 + 4) * shape.num_parameters + LENGTH * TOKEN_BYTES, abs=256
    )


def peak_bytes_per_token(
    recompute: Recompute,
    precision: Precision,
    attention: AttentionKind,
    *,
    shape: ModelShape,
    length: int,
) -> float:
    """The peak above the states for one sequence: the highest of four moments of backward."""
    element = 2 if precision is Precision.BF16 else 4
    h, kv, ffn, vocab = shape.hidden_size, shape.kv_size, shape.ffn_hidden_size, shape.vocab_size
    scores = shape.num_attention_heads * length
    kept = layer_bytes_per_token(recompute, precision, attention, shape=shape, length=length)
    whole = layer_bytes_per_token(Recompute(), precision, attention, shape=shape, length=length)
    eager = attention is AttentionKind.EAGER
    match str(recompute):
        case "none":
            feed_forward = element * (h + 2 * ffn)
            core = (6 if element == 2 else 8) * scores + element * (2 * kv - 2 * h - 4 * ffn)
        case "selective_attention":
            feed_forward = element * (h + 2 * ffn)
            core = 12 * scores + element * (2 * h - 4 * ffn)
        case "selective_ops":
            # The first norm is computed again later.
            feed_forward = whole - kept + element * 2 * ffn - 4
            core = 12 * scores + element * (h - ffn)
        case _:
            feed_forward = whole - kept + element * (h + 2 * ffn)
            core = 12 * scores + element * (6 * h + 2 * kv)
    return shape.num_layers * kept + max(
        2 * element * h + 4 + 12 * vocab,
        3 * element * h + element * vocab + element * vocab * h / length,
        max(feed_forward, core) if eager else feed_forward,
        16 * h + 8,  # the last norm, in fp32
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("recompute_text", ["none", "selective_attention", "selective_ops", "full"])
def test_the_peak_is_the_closed_form(
    recompute_text: str, attention: AttentionKind, precision: Precision
) -> None:
    recompute = Recompute.parse(recompute_text)
    # The head's weight gradient, the loss and a layer in turn.
    for vocab_size, length in ((2048, 64), (512, 128), (32, 256)):
        shape = dataclasses.replace(SHAPE, vocab_size=vocab_size)
        parts = report(
            trainer(
                Layout(grad_accum_steps=2, recompute=recompute, precision=precision),
                shape=shape,
                length=length,
                attention=attention,
            )
        ).bytes_by_part
        expected = length * (
            peak_bytes_per_token(recompute, precision, attention, shape=shape, length=length)
            + 2 * TOKEN_BYTES
        )
        assert parts["activations"] + parts["temporaries"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tied_embeddings_hold_the_head_s_weight_gradient_until_the_end(recompute: str) -> None:
    def above_states(tied: bool) -> int:
        shape = dataclasses.replace(SHAPE, vocab_size=64, tied_embeddings=tied)
        of = trainer(
            Layout(
                grad_accum_steps=2,
                recompute=Recompute.parse(recompute),
                precision=Precision.FP32,
            ),
            shape=shape,
            length=256,
        )
        parts = report(of).bytes_by_part
        return parts["activations"] + parts["temporaries"]

    assert above_states(True) - above_states(False) == 4 * 64 * SHAPE.hidden_size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "length", "precision", "recompute", "attention"),
    [
        (
            16000,
            64,
            Precision.FP32,
            "full",
            AttentionKind.FLASH,
            # The head's gradient is the peak, or three of them.
        ),
        (16000, 64, Precision.BF16, "none", AttentionKind.FLASH),
        (64, 256, Precision.FP32, "selective_ops", AttentionKind.FLASH),  # a layer
        (64, 256, Precision.FP32, "full:2", AttentionKind.FLASH),
        (64, 256, Precision.BF16, "full", AttentionKind.EAGER),
    ],
)
def test_the_planner_predicts_the_peak_within_1_percent(
    vocab_size: int,
    length: int,
    precision: Precision,
    recompute: str,
    attention: AttentionKind,
    tied: bool,
) -> None:
    shape = dataclasses.replace(
        SHAPE, hidden_size=128, ffn_hidden_size=352, vocab_size=vocab_size, tied_embeddings=tied
    )
    layout = Layout(grad_accum_steps=2, recompute=Recompute.parse(recompute), precision=precision)
    measured = report(trainer(layout, shape=shape, length=length, attention=attention))
    cell = Cell(model=shape, num_gpus=1, sequence_length=length, global_batch_size=2)
    options = {"attention": attention, "loss": "whole"}
    predicted = predict_memory(LayoutTable.of([layout]), cell, llama_trainer(options, on_gpu=False))
    assert measured.peak_allocated_bytes == pytest.approx(float(predicted.total[0]), rel=0.01)


@pytest.mark.parametrize(
    ("precision", "gradient_dtype", "bytes_per_parameter"),
    [(Precision.FP32, "bf16", 16), (Precision.BF16, "bf16", 16), (Precision.BF16, "fp32", 20)],
)
def test_states_are_so_many_bytes_a_parameter(
    precision: Precision, gradient_dtype: str, bytes_per_parameter: int
) -> None:
    parts = report(
        trainer(Layout(grad_accum_steps=2, precision=precision), gradient_dtype=gradient_dtype)
    ).bytes_by_part
    num_tensors = 3 + SHAPE.num_layers * 7
    # AdamW counts its steps in one fp32 number per tensor.
    step_counters = 4 * num_tensors
    element = 4 if precision is Precision.FP32 else 2
    assert parts["parameters"] == element * SHAPE.num_parameters
    assert (
        parts["gradients"]
        == (element + (4 if bytes_per_parameter == 20 else 0)) * SHAPE.num_parameters
    )
    assert (
        parts["optimizer"]
        == (8 if precision is Precision.FP32 else 12) * SHAPE.num_parameters + step_counters
    )
    assert (
        sum(parts[part] for part in ("parameters", "gradients", "optimizer")) - step_counters
        == bytes_per_parameter * SHAPE.num_parameters
    )


def test_parts_add_up_to_the_peak() -> None:
    measured = report(trainer(Layout(micro_batch_size=2)))
    assert sum(measured.bytes_by_part.values()) == measured.peak_allocated_bytes


def test_the_first_step_holds_what_every_later_one_holds() -> None:
    of = trainer(Layout(micro_batch_size=2, grad_accum_steps=2))
    first = report(of)
    of.step(of.micro_batches(1))
    assert report(of) == first


@pytest.mark.parametrize("attention", KINDS)
def test_more_recomputation_keeps_less(attention: AttentionKind) -> None:
    kept = [
        report(
            trainer(
                Layout(micro_batch_size=2, recompute=Recompute.parse(text)), attention=attention
            )
        ).bytes_by_part["activations"]
        for text in ("none", "selective_attention", "selective_ops", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


def test_a_limit_is_met_by_the_exception_of_a_full_device() -> None:
    of = trainer(Layout(micro_batch_size=4))
    peak = report(of).peak_allocated_bytes
    with LiveMemory(of.states(), limit_bytes=peak).first_step():
        of.untimed_step(lambda: None)
    too_small = LiveMemory(of.states(), limit_bytes=peak - 1).first_step()
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate .* MiB"),
        too_small,
    ):
        of.untimed_step(lambda: None)


def test_what_the_allocator_of_a_gpu_did_before_the_second_step_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is needed: the allocator's counters are scripted."""
    counters = {
        "retries": 2,
        "peak": 900,
        "allocated": 500,
        "cached": True,
    }  # as after building the model
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: counters.update(cached=False))
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _: counters.update(peak=counters["allocated"])
    )
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": counters["retries"]}
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counters["peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 800)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: counters["allocated"])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: type("Properties", (), {"total_memory": 1000}),
    )

    def step(after_forward: Callable[[], None]) -> None:
        counters["allocated"] += 70
        after_forward()
        counters["allocated"] -= 70
        counters["retries"] += 100  # by an untimed step

    weights = torch.zeros(100)
    memory = DeviceMemory(
        States(parameters=(weights,), gradients=(), optimizer=(), constants=()),
        device=torch.device("cuda", 0),
    )
    assert not counters["cached"]
    counters["retries"] += 5  # in the first step
    memory.after_first_step()
    counters.update(peak=600, retries=counters["retries"] + 1)
    found = memory.report(step)
    assert found.allocator_retries == 1
    assert found.peak_allocated_bytes == 600
    assert found.bytes_by_part["activations"] == 70
    assert sum(found.bytes_by_part.values()) == 600
    assert (found.peak_reserved_bytes, found.device_bytes) == (800, 1000)


def test_views_and_work_in_place_are_not_counted_twice() -> None:
    with LiveTensors() as tracker:
        a = torch.zeros(1000)
        b = a.view(10, 100).t()
        b.add_(1)
        assert tracker.live_bytes == 4000
        c = a + 1
        assert tracker.live_bytes == 8000
        del a, b
        assert tracker.live_bytes == 4000
        del c
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 8000


def test_master_weights_are_stepped_in_chunks_with_the_same_result() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 5), (64,), (3, 50))
    ]
    gradients = [torch.randn(weight.shape, generator=generator).bfloat16() for weight in weights]
    cut = [weight.clone() for weight in weights]
    for part, chunk_elements in ((weights, 1 << 20), (cut, 40)):
        adamw = AdamW(part, learning_rate=1e-2, chunk_elements=chunk_elements)
        for _ in range(3):
            adamw.step(gradients)
    assert all(torch.equal(a, b) for a, b in zip(weights, cut, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_needs_a_chunk_of_fp32_gradients_for_a_moment(dtype: torch.dtype) -> None:
    weights = [torch.randn(shape).to(dtype) for shape in ((7, 5), (64,), (3, 34))]
    gradients = [torch.randn(weight.shape).to(dtype) for weight in weights]
    adamw = AdamW(weights, learning_rate=1e-2, chunk_elements=40)
    with LiveTensors([*weights, *gradients, *adamw.tensors()]) as tracker:
        held_bytes = tracker.live_bytes
        adamw.step(gradients)
    assert tracker.peak_bytes - held_bytes == (0 if dtype == torch.float32 else 4 * 40)


def test_stepping_is_torch_s_own_adamw() -> None:
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(8, 8, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    gradient = torch.randn(8, 8, generator=generator)
    adamw = AdamW([ours], learning_rate=1e-2)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        adamw.step([gradient.clone() * 8.0], divisor=torch.tensor(8.0))
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_a_step_whose_gradients_overflow_is_not_taken() -> None:
    weights = [torch.ones(4), torch.ones(4).half()]
    for weight in weights:
        adamw = AdamW([weight], learning_rate=1e-2)
        gradients = [torch.full_like(weight, torch.inf)]
        adamw.step(gradients, divisor=torch.tensor(2.0), overflows=torch.tensor(1.0))
        assert torch.equal(weight, torch.ones_like(weight))
        adamw.step([torch.ones_like(weight)], divisor=torch.tensor(2.0), overflows=torch.zeros(()))
        assert torch.all(weight < 1)
