"""A root mean square norm for which autograd keeps its input and one fp32 number per token."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5


class RMSNorm(nn.Module):
    """Divides each token's vector by its root mean square, and multiplies it by a weight.

    Takes and returns (..., hidden_size).
    """

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
