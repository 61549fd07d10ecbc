"""Rotary position embeddings in fp32: the two halves of a head are turned by an angle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROPE_THETA = 500_000.0  # Llama 3

# Cosines and sines (sequence_length, 1, head_dim / 2) of the angles.
Rotation = tuple[Tensor, Tensor]


def rotation(head_dim: int, positions: Tensor) -> Rotation:
    """Return cosine and sine of the angle of each position, (positions, 1, head_dim / 2) each.

    The angle is position times frequency.
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = torch.outer(positions.float(), ROPE_THETA ** -(even / head_dim))[:, None, :]
    return angles.cos(), angles.sin()


class RotateQueriesAndKeys(torch.autograd.Function):
    """Cuts the fused projection (b, s, heads, head_dim) into queries, keys and values.

    The first two are rotated. Autograd keeps nothing: the backward pass turns gradients by the
    opposite angle.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        queries, keys, values = _cut(qkv, num_kv_heads)
        rotated = queries.new_empty(queries.shape), keys.new_empty(keys.shape)
        _rotate(queries, cos, sin, out=rotated[0])
        _rotate(keys, cos, sin, out=rotated[1])
        # A view would keep the memory of all three.
        return *rotated, values.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d_queries, d_keys, d_values = gradients
        num_heads, num_kv_heads = d_queries.shape[2], d_keys.shape[2]
        d_qkv = d_queries.new_empty(
            (*d_queries.shape[:2], num_heads + 2 * num_kv_heads, d_queries.shape[3])
        )
        queries, keys, values = _cut(d_qkv, num_kv_heads)
        _rotate(d_queries, cos, -sin, out=queries)
        _rotate(d_keys, cos, -sin, out=keys)
        values.copy_(d_values)
        return d_qkv, None, None, None


def _cut(qkv: Tensor, num_kv_heads: int) -> list[Tensor]:
    sizes = [qkv.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    return list(torch.split(qkv, sizes, dim=2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    first, second = x.float().chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.copy_((first * cos).addcmul_(second, sin, value=-1.0))
    out_second.copy_((second * cos).addcmul_(first, sin))
