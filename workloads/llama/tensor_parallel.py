"""The ranks that share each layer: each has some of its heads and some of its width.

Between the products of a layer each rank holds its own part of the sequence (sequence parallelism,
Korthikanti et al. 2022): the products need the whole sequence, and leave a summand of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them and nothing else.
all_gather = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
reduce_scatter = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This rank's place in its group. A group of one has no process group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Turn this rank's part of a sequence (b, s / size, h) into the whole."""
        if self.group is None:
            return x
        whole: Tensor = Gather.apply(x, self.size, self.group)  # type: ignore[no-untyped-call]
        return whole

    def scatter(self, x: Tensor) -> Tensor:
        """Turn the ranks' summands of a sequence (b, s, h) into this rank's part of the sum."""
        if self.group is None:
            return x
        part: Tensor = Scatter.apply(x, self.size, self.group)  # type: ignore[no-untyped-call]
        return part

    def own(self, whole: Tensor, *, dim: int | None, sections: Sequence[int] = ()) -> Tensor:
        """Return this rank's part of a weight: of all of it, or of each of its sections.

        It is cut along `dim`; None: every rank has the whole.
        """
        if self.size == 1 or dim is None:
            return whole
        parts = torch.split(whole, list(sections) or [whole.shape[dim]], dim)
        return torch.cat([part.chunk(self.size, dim)[self.rank] for part in parts], dim)

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add up the ranks' gradients of weights that each of them has: each saw its own tokens."""
        if self.group is None or not gradients:
            return
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        sums = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))


ALONE = TensorParallel()


class Gather(torch.autograd.Function):
    """All ranks' parts of a sequence (b, s / size, ...), one after another (b, s, ...).

    Backward, a sum over ranks of which each gets its part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.group = size, group
        return gathered(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return scattered(gradients[0], ctx.size, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """A sum over ranks of sequences (b, s, ...), of which each gets its part (b, s / size, ...).

    Backward, all ranks' parts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.group = size, group
        return scattered(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradients[0], ctx.size, ctx.group), None, None


def gathered(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Lay the ranks' x (b, s, ...) one after another: (b, size x s, ...)."""
    parts = x.new_empty((size * x.shape[0], *x.shape[1:]))
    all_gather(parts, x.contiguous(), group=group)
    return parts.view(size, *x.shape).transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' x (b, s, ...), and return this rank's part (b, s / size, ...)."""
    own = x.new_empty((x.shape[0], x.shape[1] // size, *x.shape[2:]))
    parts = x.reshape(x.shape[0], size, *own.shape[1:]).transpose(0, 1).flatten(0, 1)
    reduce_scatter(own, parts.contiguous(), group=group)
    return own
