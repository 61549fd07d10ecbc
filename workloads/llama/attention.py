"""Grouped-query attention: one fused projection, rotary embeddings, and a core by kind."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from workloads.llama.recompute import checkpointed
from workloads.llama.rotary import RotateQueriesAndKeys, Rotation
from workloads.llama.tensor_parallel import TensorParallel


class Attention(nn.Module):
    """The heads of this rank's share; without tensor parallelism, all."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        kind: AttentionKind,
        recompute_core: bool,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.kind, self.recompute_core = kind, recompute_core
        self.tensor_parallel = tensor_parallel
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_key_value_heads // tensor_parallel.size
        width = shape.hidden_size // tensor_parallel.size
        kv_width = self.num_kv_heads * self.head_dim
        # Queries, keys, values.
        self.wqkv = nn.Linear(shape.hidden_size, width + 2 * kv_width, bias=False)
        self.wo = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        q, k, v = self._queries_keys_values(self.tensor_parallel.gather(x), rotation)
        core = eager_core if self.kind is AttentionKind.EAGER else sdpa_core
        out = checkpointed(core, q, k, v, mask) if self.recompute_core else core(q, k, v, mask)
        return self.tensor_parallel.scatter(self.wo(out.flatten(2)))

    def _queries_keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim))
        return cast(
            tuple[Tensor, Tensor, Tensor],
            RotateQueriesAndKeys.apply(heads, *rotation, self.num_kv_heads),  # type: ignore[no-untyped-call]
        )


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
