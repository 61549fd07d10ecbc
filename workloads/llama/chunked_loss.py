"""The product with the vocabulary and the loss, forward and backward, by chunks of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workloads.llama.tensor_parallel import TensorParallel
from workloads.llama.vocabulary_parallel import loss_and_gradient


class ChunkedLoss(torch.autograd.Function):
    """The summed cross entropy of x (tokens, h) for target ids (tokens), times a factor.

    The forward pass computes the gradients, too, so only a chunk's logits exist. The loss has to be
    the end of the graph: its own gradient is 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        factor: float | Tensor,
        chunk_tokens: int,
        tensor_parallel: TensorParallel,
    ) -> Tensor:
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        losses: list[Tensor] = []
        chunks = (torch.split(each, chunk_tokens) for each in (x, d_x, targets))
        for x_part, d_x_part, targets_part in zip(*chunks, strict=True):
            loss, d_logits = loss_and_gradient(
                x_part @ weight.t(), targets_part, factor, tensor_parallel
            )
            torch.mm(d_logits, weight, out=d_x_part)
            # The first product overwrites what was there.
            d_weight.addmm_(d_logits.t(), x_part, beta=1 if losses else 0)
            losses.append(loss)
            del d_logits  # before the next chunk's logits
        ctx.save_for_backward(d_x, d_weight)
        return torch.stack(losses).sum() * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Looked at on a CPU only: a GPU's queue would run empty.
        assert gradients[0].is_cuda or gradients[0].item() == 1.0, "the loss was scaled afterwards"
        d_x, d_weight = ctx.saved_tensors
        return d_x, d_weight, None, None, None, None
