"""The end of a model: the final norm, the product with the vocabulary, and the loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.problem.model_shape import ModelShape
from workloads.llama.rms_norm import RMSNorm
from workloads.llama.tensor_parallel import TensorParallel


class Head(nn.Module):
    """Hidden states (b, s, h) and target ids (b, s) in; mean cross entropy times a scale out."""

    def __init__(self, shape: ModelShape, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.norm = RMSNorm(shape.hidden_size)
        self.output = nn.Linear(
            shape.hidden_size, shape.vocab_size // tensor_parallel.size, bias=False
        )

    def forward(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        # Loss in fp32, as in every recipe; only the log-softmax of the logits outlives this line.
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * scale
