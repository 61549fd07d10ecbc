"""The end of a model: the final norm, the product with the vocabulary, and the loss."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.problem.model_shape import ModelShape
from workloads.llama.chunked_loss import ChunkedLoss
from workloads.llama.rms_norm import RMSNorm
from workloads.llama.tensor_parallel import TensorParallel


class Head(nn.Module):
    """Hidden states (b, s, h) and target ids (b, s) in; mean cross entropy times a scale out.

    `loss_chunks`: compute it by so many chunks of the tokens; None: as a whole. In chunks, the
    gradients are computed at once, so the scale has to contain all that the loss is scaled by.
    """

    def __init__(
        self, shape: ModelShape, *, tensor_parallel: TensorParallel, loss_chunks: int | None
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.loss_chunks = tensor_parallel, loss_chunks
        self.norm = RMSNorm(shape.hidden_size)
        self.output = nn.Linear(
            shape.hidden_size, shape.vocab_size // tensor_parallel.size, bias=False
        )

    def forward(self, x: Tensor, targets: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        factor = scale / len(targets)
        if self.loss_chunks is None:
            # Loss in fp32, as in every recipe; only the log-softmax of the logits outlives this.
            return F.cross_entropy(self.output(x).float(), targets, reduction="sum") * factor
        return cast(
            Tensor,
            ChunkedLoss.apply(x, self.output.weight, targets, factor, self.loss_chunks),  # type: ignore[no-untyped-call]
        )
