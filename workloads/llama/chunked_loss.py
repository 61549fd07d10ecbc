"""The product with the vocabulary and the loss, forward and backward, by chunks of the tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
        num_chunks: int,
    ) -> Tensor:
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        losses: list[Tensor] = []
        chunks = zip(
            x.chunk(num_chunks), d_x.chunk(num_chunks), targets.chunk(num_chunks), strict=True
        )
        for x_part, d_x_part, targets_part in chunks:
            loss, d_logits = _loss_and_gradient(x_part @ weight.t(), targets_part, factor)
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
        return d_x, d_weight, None, None, None


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, factor: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the summed loss in fp32, and the gradient of its product with the factor."""
    dtype, logits = logits.dtype, logits.float()
    log_probabilities = F.log_softmax(logits, dim=-1)
    del logits
    loss = F.nll_loss(log_probabilities, targets, reduction="sum")
    gradient = log_probabilities.exp_()
    minus_one = gradient.new_full((len(targets), 1), -1.0)
    gradient.scatter_add_(-1, targets[:, None], minus_one).mul_(factor)
    return loss, gradient.to(dtype)
