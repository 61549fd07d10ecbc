"""The decoder computes a Llama, with the core's number of parameters and FLOPs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from orchestrator.core.problem.layout import Recompute
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from workloads.llama.fp8 import use_fp8_products
from workloads.llama.model import Llama, LlamaPart
from workloads.llama.rms_norm import NORM_EPSILON
from workloads.llama.rotary import ROPE_THETA

SHAPE = ModelShape(
    name="grouped",
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=160,
    vocab_size=256,
)
TIED = ModelShape(
    name="tied",
    num_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    ffn_hidden_size=64,
    vocab_size=64,
    tied_embeddings=True,
)
CPU = torch.device("cpu")
BATCH, LENGTH = 2, 32
KINDS = (AttentionKind.FLASH, AttentionKind.EAGER)  # of a CPU
RECOMPUTES = ("none", "selective_attention", "selective_ops", "full", "full:2", "selective_ops:1")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # as ranks on a CPU


def build(
    shape: ModelShape = SHAPE,
    *,
    attention: AttentionKind = AttentionKind.FLASH,
    recompute: str = "none",
    dtype: torch.dtype = torch.float32,
    loss_chunk_tokens: int | None = None,
    fp8: bool = False,
) -> Llama:
    model = Llama(
        shape,
        sequence_length=LENGTH,
        attention=attention,
        recompute=Recompute.parse(recompute),
        loss_chunk_tokens=loss_chunk_tokens,
        dtype=dtype,
        device=CPU,
    )
    if fp8:
        use_fp8_products(model)
    model.materialise(CPU, seed=7)
    return model


def batch(shape: ModelShape = SHAPE) -> tuple[Tensor, Tensor]:
    ids = torch.randint(
        0, shape.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3)
    )
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def naive_loss(
    weights: dict[str, Tensor], shape: ModelShape, tokens: Tensor, targets: Tensor
) -> Tensor:
    """A second, plain Llama: real rotations, one head at a time, no fused function."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + NORM_EPSILON) * weight

    def rotate(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = shape.head_dim // 2
        for i in range(half):
            angle = torch.arange(LENGTH, dtype=x.dtype) * ROPE_THETA ** (-2 * i / shape.head_dim)
            first, second = x[..., i], x[..., half + i]
            out[..., i] = first * angle.cos() - second * angle.sin()
            out[..., half + i] = first * angle.sin() + second * angle.cos()
        return out

    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(shape.num_layers):
        w = {
            name.removeprefix(f"layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = norm(x, w["attention_norm.weight"])
        wq, wk, wv = w["attention.wqkv.weight"].split(
            [shape.hidden_size, shape.kv_size, shape.kv_size]
        )
        heads = []
        for head in range(shape.num_attention_heads):
            shared = head // (shape.num_attention_heads // shape.num_key_value_heads)
            rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            shared_rows = slice(shared * shape.head_dim, (shared + 1) * shape.head_dim)
            q = rotate(normed @ wq[rows].T)
            k = rotate(normed @ wk[shared_rows].T)
            v = normed @ wv[shared_rows].T
            scores = q @ k.transpose(1, 2) / math.sqrt(shape.head_dim)
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, dim=-1) @ w["attention.wo.weight"].T
        normed = norm(x, w["ffn_norm.weight"])
        gate = normed @ w["feed_forward.w1.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (normed @ w["feed_forward.w3.weight"].T))
            @ w["feed_forward.w2.weight"].T
        )
    logits = (
        norm(x, weights["head.norm.weight"])
        @ weights.get("head.output.weight", weights["tok_embeddings.weight"]).T
    )
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=lambda s: s.name)
@pytest.mark.parametrize("loss_chunk_tokens", [None, 1, 5], ids=str)
def test_loss_and_gradients_are_those_of_a_naive_llama(
    loss_chunk_tokens: int | None, shape: ModelShape, attention: AttentionKind
) -> None:
    model = build(shape, attention=attention, loss_chunk_tokens=loss_chunk_tokens)
    tokens, targets = batch(shape)
    loss = model(tokens, targets)
    loss.backward()
    weights = {
        name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()
    }
    expected = naive_loss(weights, shape, tokens, targets)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        error = (weight.grad.double() - weights[name].grad).norm() / weights[name].grad.norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("recompute", [r for r in RECOMPUTES if r != "none"])
@pytest.mark.parametrize("attention", KINDS)
def test_recomputation_changes_no_bit_of_the_gradients(
    attention: AttentionKind, recompute: str
) -> None:
    tokens, targets = batch()
    plain, recomputed = build(attention=attention), build(attention=attention, recompute=recompute)
    plain(tokens, targets).backward()
    recomputed(tokens, targets).backward()
    for (name, a), (_, b) in zip(
        plain.named_parameters(), recomputed.named_parameters(), strict=True
    ):
        assert torch.equal(a.grad, b.grad), name


def test_the_efficient_kernel_gets_a_head_of_keys_for_each_head_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no groups: on a GPU torch found no kernel for them."""
    shapes = []
    plain = F.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shapes.append((k.shape[1], v.shape[1], options["enable_gqa"]))
        return plain(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    for dtype in (torch.float32, torch.bfloat16):
        build(attention=AttentionKind.EFFICIENT, dtype=dtype)(*batch())
    assert set(shapes) == {(4, 4, False)}


@pytest.mark.parametrize("shape", [*PRESETS.values(), SHAPE, TIED], ids=lambda s: s.name)
def test_parameters_are_as_many_as_the_core_says(shape: ModelShape) -> None:
    model = Llama(
        shape,
        sequence_length=8,
        attention=AttentionKind.FLASH,
        recompute=Recompute(),
        loss_chunk_tokens=None,
        dtype=torch.bfloat16,
        device=CPU,
    )
    assert all(weight.is_meta for weight in model.parameters())
    assert sum(weight.numel() for weight in model.parameters()) == shape.num_parameters


def _cpu_attention_flops() -> dict[object, object]:
    """torch does not count the CPU's fused attention; here all heads count as query heads."""

    def forward(q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
        return sdpa_flop_count(q, [*q[:2], *k[2:]], [*q[:2], *v[2:]])

    def backward(
        d_out: list[int], q: list[int], k: list[int], v: list[int], *_: object, **__: object
    ) -> int:
        return sdpa_backward_flop_count(d_out, q, [*q[:2], *k[2:]], [*q[:2], *v[2:]])

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("attention", KINDS)
def test_flops_are_counted_as_the_core_says_for_every_recomputation(
    attention: AttentionKind, recompute: str
) -> None:
    model = build(attention=attention, recompute=recompute)
    tokens, targets = batch()
    with FlopCounterMode(display=False, custom_mapping=_cpu_attention_flops()) as counter:
        model(tokens, targets).backward()
    counted = counter.get_total_flops() / (BATCH * LENGTH)
    one_product_of_the_scores = 2 * SHAPE.hidden_size * LENGTH
    if attention is AttentionKind.FLASH:
        # A flash kernel's backward makes the scores anew from q and k: no work of the model, so
        # neither MFU nor HFU count it.
        counted -= SHAPE.num_layers * one_product_of_the_scores
    elif recompute == "selective_attention":
        # Recomputing the eager core stops at the weights: the second product's result is not needed
        # again. The core counts both, as
        # the paper does and as a fused kernel repeats both.
        counted += SHAPE.num_layers * one_product_of_the_scores
    expected = SHAPE.flops_per_token(LENGTH) + SHAPE.recomputed_flops_per_token(
        LENGTH, Recompute.parse(recompute)
    )
    assert counted == pytest.approx(expected, rel=1e-12)


def test_bf16_is_fp32_within_its_rounding() -> None:
    tokens, targets = batch()
    exact, rounded = build(), build(dtype=torch.bfloat16)
    exact(tokens, targets).backward()
    rounded(tokens, targets).backward()
    for (name, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        error = (a.grad - b.grad.float()).norm() / a.grad.norm()
        # Bf16 keeps 8 bits: 0.4 % a rounding, and some ten roundings in a row.
        assert error < 0.03, name


def test_parts_of_a_model_compute_what_the_whole_does() -> None:
    def part(first: int, count: int) -> Llama:
        model = Llama(
            SHAPE,
            sequence_length=LENGTH,
            attention=AttentionKind.FLASH,
            recompute=Recompute(),
            loss_chunk_tokens=None,
            dtype=torch.float32,
            device=CPU,
            part=LlamaPart(
                first_layer=first,
                num_layers=count,
                has_embedding=first == 0,
                has_head=first + count == SHAPE.num_layers,
            ),
        )
        model.materialise(CPU, seed=7)
        return model

    whole, first, last = build(), part(0, 2), part(2, 1)
    names = [name for model in (first, last) for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    tokens, targets = batch()
    assert torch.equal(last(first(tokens), targets), whole(tokens, targets))


@pytest.mark.filterwarnings("ignore")
def test_fp8_products_are_bf16_within_their_rounding() -> None:
    pytest.importorskip("torchao", reason="an optional package")
    tokens, targets = batch()
    exact, rounded = (build(dtype=torch.bfloat16, fp8=fp8) for fp8 in (False, True))
    weights = rounded.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in exact.state_dict().items())
    losses = [model(tokens, targets) for model in (exact, rounded)]
    for loss in losses:
        loss.backward()
    assert 0 < abs(losses[0] - losses[1]) / losses[0] < 2e-3
    for (name, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        # Fp8 keeps 3 bits of a number and 2 of a gradient: 6 % and 12 % a rounding.
        assert (a.grad - b.grad).float().norm() / a.grad.float().norm() < 0.15, name
