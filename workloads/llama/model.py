"""A Llama decoder in plain torch, in torchtitan's vocabulary: RMSNorm, RoPE, GQA, SwiGLU.

Autograd keeps what it would keep of a fused implementation and no more: docs/measuring.md has the
bytes per layer.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.problem.layout import Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from workloads.llama.recompute import checkpointed, checkpointed_ops

NORM_EPSILON = 1e-5
ROPE_THETA = 500_000.0  # Llama 3
INITIAL_STANDARD_DEVIATION = 0.02


class Llama(nn.Module):
    """Token ids (b, s) and their successors (b, s) in, mean cross entropy out."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        sequence_length: int,
        attention: AttentionKind,
        recompute: Recompute,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        num_recomputed = recompute.layers_of(shape.num_layers)
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            TransformerBlock(
                shape,
                attention=attention,
                recompute=recompute if i < num_recomputed else Recompute(),
            )
            for i in range(shape.num_layers)
        )
        self.norm = RMSNorm(shape.hidden_size)
        self.output = (
            None
            if shape.tied_embeddings
            else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        )
        self.to(dtype)
        # Constants, no buffers: they are the same on every rank, and DDP would send buffers around.
        self.freqs_cis = rotary_frequencies(shape.head_dim, sequence_length)
        self.causal_mask: Tensor | None = None
        if attention is AttentionKind.EAGER:
            every_pair = torch.ones(sequence_length, sequence_length, dtype=torch.bool)
            self.causal_mask = every_pair.triu(1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        length = tokens.shape[1]
        mask = None if self.causal_mask is None else self.causal_mask[:length, :length]
        for layer in self.layers:
            x = layer(x, self.freqs_cis[:length], mask)
        # Loss in fp32, as in every recipe; only the log-softmax of the logits outlives this line.
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), targets.flatten())

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(
            self.norm(x), self.tok_embeddings.weight if self.output is None else self.output.weight
        )

    def constants(self) -> tuple[Tensor, ...]:
        return (self.freqs_cis,) if self.causal_mask is None else (self.freqs_cis, self.causal_mask)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the weights: a seed gives the same on every rank, in bf16 those of fp32, rounded."""
        depth_scale = INITIAL_STANDARD_DEVIATION / math.sqrt(2 * len(self.layers))
        generator = torch.Generator(device=self.norm.weight.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                into_residual = name.endswith(("wo.weight", "w2.weight"))
                # Some versions of torch draw another sequence in bf16.
                drawn = torch.empty_like(weight, dtype=torch.float32)
                deviation = depth_scale if into_residual else INITIAL_STANDARD_DEVIATION
                weight.copy_(drawn.normal_(0.0, deviation, generator=generator))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(
        self, shape: ModelShape, *, attention: AttentionKind, recompute: Recompute
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = RMSNorm(shape.hidden_size)
        self.attention = Attention(
            shape, kind=attention, recompute_core=recompute.policy is SelectivePolicy.ATTENTION
        )
        self.ffn_norm = RMSNorm(shape.hidden_size)
        self.feed_forward = FeedForward(shape.hidden_size, shape.ffn_hidden_size)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        if self.recompute.mode is RecomputeMode.FULL:
            return checkpointed(self._forward, x, freqs_cis, mask)
        if self.recompute.policy is SelectivePolicy.OPS:
            return checkpointed_ops(self._forward, x, freqs_cis, mask)
        return self._forward(x, freqs_cis, mask)

    def _forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        added: Tensor = self.feed_forward(self.ffn_norm(x))
        return x + added


class Attention(nn.Module):
    def __init__(self, shape: ModelShape, *, kind: AttentionKind, recompute_core: bool) -> None:
        super().__init__()
        self.kind, self.recompute_core = kind, recompute_core
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.wk = nn.Linear(shape.hidden_size, shape.kv_size, bias=False)
        self.wv = nn.Linear(shape.hidden_size, shape.kv_size, bias=False)
        self.wo = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = apply_rotary(self.wq(x).view(heads), freqs_cis)
        k = apply_rotary(self.wk(x).view(heads), freqs_cis)
        v = self.wv(x).view(heads)
        core = eager_core if self.kind is AttentionKind.EAGER else sdpa_core
        out = checkpointed(core, q, k, v, mask) if self.recompute_core else core(q, k, v, mask)
        projected: Tensor = self.wo(out.flatten(2))
        return projected


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class RMSNorm(nn.Module):
    """A root mean square norm for which autograd keeps its input and one fp32 number per token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        # Only CUDA has a fused kernel: else autograd would keep 12 bytes more per element.
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPSILON)
        return cast(Tensor, _RMSNormFunction.apply(x, self.weight))  # type: ignore[no-untyped-call]


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(NORM_EPSILON).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        normalised: Tensor = wide * rstd
        return normalised.to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, rstd = ctx.saved_tensors
        dy = gradients[0].float()
        normalised = x.float() * rstd
        d_weight = (dy * normalised).flatten(0, -2).sum(0)
        dy = dy * weight
        projection = (dy * normalised).mean(-1, keepdim=True)
        dx = dy.sub_(normalised.mul_(projection)).mul_(rstd)
        return dx.to(x.dtype), d_weight.to(weight.dtype)


def rotary_frequencies(head_dim: int, sequence_length: int) -> Tensor:
    """Unit complex numbers (sequence_length, head_dim / 2) with angle position times frequency."""
    frequencies = ROPE_THETA ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(sequence_length, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Turn each pair of x (b, s, heads, head_dim) by its position's angle."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[:, None, :]).flatten(-2).to(x.dtype)


def sdpa_core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T) v, all (b, s, heads, head_dim), by the device's fused kernel."""
    num_groups = q.shape[2] // k.shape[2]
    if num_groups > 1 and q.is_cuda and q.dtype == torch.float32:
        # Flash has no fp32, and torch's fp32 kernel has no groups: torch would fall back to the
        # score matrix.
        k, v = k.repeat_interleave(num_groups, dim=2), v.repeat_interleave(num_groups, dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def eager_core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same with the score matrix: softmax in fp32, products in the inputs' precision."""
    assert mask is not None  # made for this attention
    num_groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(num_groups, dim=2), v.repeat_interleave(num_groups, dim=2)
    scores = (q * q.shape[-1] ** -0.5).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    weights = F.softmax(scores.masked_fill(mask, -math.inf), dim=-1, dtype=torch.float32).to(
        q.dtype
    )
    return (weights @ v.transpose(1, 2)).transpose(1, 2)
