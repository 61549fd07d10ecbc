"""The end of a model: the final norm, the product with the vocabulary, and the loss."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from orchestrator.core.problem.model_shape import ModelShape
from workloads.llama.chunked_loss import ChunkedLoss
from workloads.llama.rms_norm import RMSNorm
from workloads.llama.tensor_parallel import TensorParallel
from workloads.llama.vocabulary_parallel import cross_entropy


class Head(nn.Module):
    """Hidden states (b, s, h) and target ids (b, s) in; mean cross entropy times a scale out.

    `loss_chunk_tokens`: compute it in turn for so many tokens; None: as a whole. In chunks, the
    gradients are computed at once, so the scale has to contain all that the loss is scaled by.
    """

    def __init__(
        self, shape: ModelShape, *, tensor_parallel: TensorParallel, loss_chunk_tokens: int | None
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.loss_chunk_tokens = tensor_parallel, loss_chunk_tokens
        self.norm = RMSNorm(shape.hidden_size)
        self.output = nn.Linear(
            shape.hidden_size, shape.vocab_size // tensor_parallel.size, bias=False
        )

    def forward(self, x: Tensor, targets: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        x, targets = self.tensor_parallel.gather(self.norm(x)).flatten(0, 1), targets.flatten()
        factor = scale / len(targets)
        if self.loss_chunk_tokens is None:
            # Loss in fp32, as in every recipe; only the log-softmax of the logits outlives this.
            return cross_entropy(self.output(x).float(), targets, self.tensor_parallel) * factor
        return cast(
            Tensor,
            ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                x,
                self.output.weight,
                targets,
                factor,
                self.loss_chunk_tokens,
                self.tensor_parallel,
            ),
        )
