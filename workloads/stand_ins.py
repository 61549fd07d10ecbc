"""Replacements, in a trace on a CPU, for what a GPU does in another way: norms, dropout, the
device.

Only sizes and lifetimes are right: nothing is computed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StandIns(TorchFunctionMode):
    """While active, torch's functions keep what they would keep on CUDA, in tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.rms_norm, F.rms_norm):
            return _rms_norm(*args, **kwargs)
        if func in (torch.dropout, F.dropout):
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is Tensor.cuda:
            return args[0]
        if func is torch.device:
            return _on_cpu(func(*args, **kwargs))  # cuda:3 is no cpu:3
        return func(*(_on_cpu(a) for a in args), **{name: _on_cpu(a) for name, a in kwargs.items()})


def _on_cpu(value: Any) -> Any:
    """FakeTensors on a `cuda` that is missing abort the process in their backward pass."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    is_name = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return "cpu" if is_name else value


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """CPUs decompose it, and autograd keeps 12 bytes more per element than the fused kernel."""
    return cast(Tensor, _FusedRMSNorm.apply(input, weight))  # type: ignore[no-untyped-call]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CPUs keep a mask of the input's type, CUDA one byte per element."""
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """With dropout CPUs write the scores out; CUDA's fused kernels keep the random state."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **kwargs)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, rstd, *(() if weight is None else (weight,)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None
