"""The weights that training begins with: they depend on seed and name, never on the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from orchestrator.core.problem.model_shape import ModelShape

INITIAL_STANDARD_DEVIATION = 0.02

# Products whose results are added to the residual stream.
_INTO_RESIDUAL = ("wo.weight", "w2.weight")


def whole_weight(
    name: str, size: tuple[int, ...], *, shape: ModelShape, seed: int, device: torch.device
) -> Tensor:
    """Draw a whole weight of a model in fp32, by its name in the whole model."""
    if len(size) == 1:
        return torch.ones(size, device=device)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7]))
    deviation = INITIAL_STANDARD_DEVIATION
    if name.endswith(_INTO_RESIDUAL):
        deviation /= math.sqrt(2 * shape.num_layers)
    # Some versions of torch draw another sequence in bf16.
    return torch.empty(size, device=device).normal_(0.0, deviation, generator=generator)
