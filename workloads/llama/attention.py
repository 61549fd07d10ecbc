"""Grouped-query attention: one fused projection, rotary embeddings, and a core by kind."""

from __future__ import annotations

import math
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from orchestrator.core.problem.layout import SelectivePolicy
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from workloads.llama.context_parallel import ContextParallel
from workloads.llama.recompute import checkpointed
from workloads.llama.rotary import RotateQueriesAndKeys, Rotation
from workloads.llama.tensor_parallel import TensorParallel


class Attention(nn.Module):
    """The heads of this rank's share; without tensor parallelism, all.

    In three parts, between which a layer's recomputation may begin and end.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        kind: AttentionKind,
        policy: SelectivePolicy | None,
        tensor_parallel: TensorParallel,
        context_parallel: ContextParallel,
    ) -> None:
        super().__init__()
        self.kind, self.policy = kind, policy
        self.tensor_parallel, self.context_parallel = tensor_parallel, context_parallel
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_key_value_heads // tensor_parallel.size
        width = shape.hidden_size // tensor_parallel.size
        kv_width = self.num_kv_heads * self.head_dim
        # Queries, keys, values.
        self.wqkv = nn.Linear(shape.hidden_size, width + 2 * kv_width, bias=False)
        self.wo = nn.Linear(width, shape.hidden_size, bias=False)

    def queries_keys_values(self, x: Tensor) -> Tensor:
        """Return the heads (b, s, heads, head_dim) of all three, not yet rotated."""
        product = self.wqkv(self.tensor_parallel.gather(x))
        heads: Tensor = product.unflatten(-1, (-1, self.head_dim))
        return heads

    def attend(self, qkv: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """Return the heads' results side by side (b, s, width)."""
        q, k, v = cast(
            tuple[Tensor, Tensor, Tensor],
            RotateQueriesAndKeys.apply(  # type: ignore[no-untyped-call]
                qkv, *rotation, self.num_kv_heads
            ),
        )
        # Nobody else holds it, and nothing needs it any more.
        del qkv
        return self.context_parallel.attend(partial(self._core, mask), q, k, v).flatten(2)

    def project(self, attended: Tensor) -> Tensor:
        """Return this rank's part of the result (b, s, h) for heads side by side (b, s, width)."""
        return self.tensor_parallel.scatter(self.wo(attended))

    def _core(
        self, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: CausalBias | None
    ) -> Tensor:
        is_recomputed = self.policy is SelectivePolicy.ATTENTION
        if self.kind is not AttentionKind.EAGER:
            core = partial(sdpa_core, has_groups=self.kind is not AttentionKind.EFFICIENT)
            return checkpointed(core, q, k, v, bias) if is_recomputed else core(q, k, v, bias)
        assert mask is not None  # made for this attention
        # The queries are those of the last tokens of the keys.
        length = k.shape[1]
        hidden = mask[length - q.shape[1] : length, :length]
        if is_recomputed:
            return checkpointed(eager_core, q, k, v, hidden)
        if self.policy is SelectivePolicy.OPS and not torch.compiler.is_compiling():
            # Both products are kept, what is between them is not.
            return checkpointed(weighted_values, checkpointed(scores, q, k), v, hidden)
        return eager_core(q, k, v, hidden)


def sdpa_core(
    q: Tensor, k: Tensor, v: Tensor, bias: CausalBias | None, *, has_groups: bool
) -> Tensor:
    """Return softmax(q k^T) v, all (b, s, heads, head_dim), by the device's fused kernel.

    With a bias, the queries are those of the last tokens of the keys. `has_groups`: the kernel
    takes one head of keys for several heads of queries, which the efficient one does not.
    """
    num_groups = q.shape[2] // k.shape[2]
    if num_groups > 1 and not has_groups:
        k, v = k.repeat_interleave(num_groups, dim=2), v.repeat_interleave(num_groups, dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        is_causal=bias is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def eager_core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k^T) v, all (b, s, heads, head_dim), with the matrix of scores.

    The softmax is in fp32, products are in the inputs' precision. `mask` (s, s) is True where a
    query must not see a key.
    """
    return weighted_values(scores(q, k), v, mask)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products of queries and keys (b, heads, s, s)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    found: Tensor = (q * q.shape[-1] ** -0.5).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    return found


def weighted_values(scores: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the values' means by the scores' softmax (b, s, heads, head_dim)."""
    v = v.repeat_interleave(scores.shape[1] // v.shape[2], dim=2)
    weights = F.softmax(scores.masked_fill(mask, -math.inf), dim=-1, dtype=torch.float32)
    return (weights.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)
