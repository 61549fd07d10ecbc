"""AdamW over the weights themselves, or over fp32 master copies of bf16 weights. The kernel is torch's fused one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
# Elements stepped at once under master weights: bf16 gradients are widened to fp32 only for so many at a time (256 MiB), not for all.
CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    adamw: torch.optim.AdamW
    weights: list[Tensor]  # flat views of the model's weights
    masters: list[Tensor]  # the fp32 copies, which are what AdamW steps
    gradients: list[Tensor]  # flat views of the gradients


class AdamW:
    """Fused AdamW over weights and the gradients that belong to them. Both stay where they are in memory from step to step."""

    def __init__(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], *, learning_rate: float, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        pairs = [(w.detach().view(-1), g.detach().view(-1)) for w, g in zip(weights, gradients, strict=True)]
        self._chunks = [
            _chunk(part, learning_rate=learning_rate)
            for part in _parts([(w, g) for w, g in pairs], chunk_elements if weights[0].dtype != torch.float32 else None)
        ]

    @torch.no_grad()
    def step(self) -> None:
        for chunk in self._chunks:
            for master, gradient in zip(chunk.masters, chunk.gradients, strict=True):
                master.grad = gradient.to(master.dtype)  # the gradient itself where it is fp32 already
            chunk.adamw.step()
            for master in chunk.masters:
                master.grad = None
            if chunk.weights is not chunk.masters:
                torch._foreach_copy_(chunk.weights, chunk.masters)

    def tensors(self) -> tuple[Tensor, ...]:
        """Master weights and AdamW's state: all that an optimizer holds from step to step."""
        masters = [m for chunk in self._chunks if chunk.weights is not chunk.masters for m in chunk.masters]
        states = [t for chunk in self._chunks for state in chunk.adamw.state.values() for t in state.values() if isinstance(t, Tensor)]
        return (*masters, *states)


def _parts(pairs: list[tuple[Tensor, Tensor]], chunk_elements: int | None) -> list[list[tuple[Tensor, Tensor]]]:
    """Cut flat weights and gradients into parts of at most so many elements; None: one part, nothing cut."""
    if chunk_elements is None:
        return [pairs]
    parts: list[list[tuple[Tensor, Tensor]]] = [[]]
    room = chunk_elements
    for weight, gradient in pairs:
        start = 0
        while start < weight.numel():
            if room == 0:
                parts.append([])
                room = chunk_elements
            size = min(room, weight.numel() - start)
            parts[-1].append((weight[start : start + size], gradient[start : start + size]))
            start, room = start + size, room - size
    return parts


def _chunk(pairs: list[tuple[Tensor, Tensor]], *, learning_rate: float) -> _Chunk:
    weights = [w for w, _ in pairs]
    masters = weights if weights[0].dtype == torch.float32 else [w.float() for w in weights]
    adamw = torch.optim.AdamW(masters, lr=learning_rate, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True)
    for master in masters:  # as AdamW does in its first step, but now: then the first step needs as much memory as every other
        adamw.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
    return _Chunk(adamw=adamw, weights=weights, masters=masters, gradients=[g for _, g in pairs])
