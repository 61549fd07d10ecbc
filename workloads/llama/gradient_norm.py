"""The norm of all gradients, over the ranks that hold different parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def gradient_norm(
    gradients: Sequence[Tensor],
    groups: Sequence[dist.ProcessGroup | None],
    *,
    copies: Sequence[Tensor] = (),
    num_copies: int = 1,
) -> Tensor:
    """Return the norm of all ranks' gradients, in fp32.

    Over each group in turn, the ranks' parts are put together. So many ranks of these groups have
    the same `copies`.
    """
    square = _square(gradients) + _square(copies) / num_copies if copies else _square(gradients)
    for group in groups:
        if group is not None:
            dist.all_reduce(square, group=group)
    return square.sqrt()


def _square(gradients: Sequence[Tensor]) -> Tensor:
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, torch.float32))
    square: Tensor = torch.linalg.vector_norm(norms).square()
    return square
