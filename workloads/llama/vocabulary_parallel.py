"""The first and the last product of a model, cut by vocabulary among tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.llama.tensor_parallel import TensorParallel


class Embedding(nn.Module):
    """Token ids (b, s) in; this rank's part of their vectors (b, s / size, h) out."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.weight = nn.Parameter(torch.empty(vocab_size // tensor_parallel.size, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tensor_parallel.group is None:
            return F.embedding(tokens, self.weight)
        rows, elsewhere = own_ids(tokens, len(self.weight), self.tensor_parallel)
        vectors = F.embedding(rows, self.weight).masked_fill(elsewhere[..., None], 0.0)
        return self.tensor_parallel.scatter(vectors)


def own_ids(ids: Tensor, num_rows: int, tensor_parallel: TensorParallel) -> tuple[Tensor, Tensor]:
    """Return the ids' rows in this rank's part of the vocabulary, and where they have none.

    The mask is True where an id is in another rank's part; its row is then 0.
    """
    rows = ids - tensor_parallel.rank * num_rows
    elsewhere = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(elsewhere, 0), elsewhere


def cross_entropy(logits: Tensor, targets: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Return the summed loss, the same on each rank.

    Logits are fp32 (tokens, vocab / size), targets are ids (tokens).
    """
    if tensor_parallel.group is None:
        return F.cross_entropy(logits, targets, reduction="sum")
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, tensor_parallel
    )
    return loss


def loss_and_gradient(
    logits: Tensor, targets: Tensor, factor: float | Tensor, tensor_parallel: TensorParallel
) -> tuple[Tensor, Tensor]:
    """Return the loss of `cross_entropy`, and the gradient of its product with the factor.

    The logits may be in any precision; the gradient has it, too.
    """
    dtype, logits = logits.dtype, logits.float()
    log_probabilities = _log_probabilities(logits, tensor_parallel)
    del logits
    loss = _negative_sum(log_probabilities, targets, tensor_parallel)
    gradient = _gradient(log_probabilities.exp_(), targets, tensor_parallel).mul_(factor)
    return loss, gradient.to(dtype)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logarithms of the probabilities, of this rank's part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, tensor_parallel: TensorParallel
    ) -> Tensor:
        log_probabilities = _log_probabilities(logits, tensor_parallel)
        ctx.save_for_backward(log_probabilities, targets)
        ctx.tensor_parallel = tensor_parallel
        return _negative_sum(log_probabilities, targets, tensor_parallel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        log_probabilities, targets = ctx.saved_tensors
        d_logits = _gradient(log_probabilities.exp(), targets, ctx.tensor_parallel)
        return d_logits.mul_(gradients[0]), None, None


def _log_probabilities(logits: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """The log-softmax of fp32 logits over all ranks' parts."""
    if tensor_parallel.group is None:
        return F.log_softmax(logits, dim=-1)
    largest = logits.max(dim=-1, keepdim=True).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor_parallel.group)
    shifted = logits - largest
    total = shifted.exp().sum(dim=-1, keepdim=True)
    dist.all_reduce(total, group=tensor_parallel.group)
    return shifted.sub_(total.log_())


def _negative_sum(
    log_probabilities: Tensor, targets: Tensor, tensor_parallel: TensorParallel
) -> Tensor:
    if tensor_parallel.group is None:
        return F.nll_loss(log_probabilities, targets, reduction="sum")
    rows, elsewhere = own_ids(targets, log_probabilities.shape[-1], tensor_parallel)
    own = log_probabilities.gather(-1, rows[:, None]).squeeze(-1).masked_fill(elsewhere, 0.0)
    total = own.sum().neg()
    dist.all_reduce(total, group=tensor_parallel.group)
    return total


def _gradient(probabilities: Tensor, targets: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Turn probabilities into the gradient of the summed loss, in place."""
    if tensor_parallel.group is None:
        minus_one = probabilities.new_full((len(targets), 1), -1.0)
        return probabilities.scatter_add_(-1, targets[:, None], minus_one)
    rows, elsewhere = own_ids(targets, probabilities.shape[-1], tensor_parallel)
    less = elsewhere.to(probabilities.dtype).sub_(1.0)[:, None]
    return probabilities.scatter_add_(-1, rows[:, None], less)
