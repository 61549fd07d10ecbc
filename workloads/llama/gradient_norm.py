"""The norm of all gradients, over the ranks that hold different parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the norm in fp32. Over each group in turn, the ranks' parts are put together."""
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, torch.float32))
    square: Tensor = torch.linalg.vector_norm(norms).square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()
