"""AdamW over this rank's weights, or over fp32 copies of them if they are in half precision.

The kernel is torch's fused one. It also divides the gradients by one number, by which clipping and
the loss scale need no pass over them, and skips a step whose gradients overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
# Elements stepped at once: this many half-precision gradients become fp32.
CHUNK_ELEMENTS = 1 << 28


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    adamw: torch.optim.AdamW
    weights: list[Tensor]  # flat, or flat parts
    masters: list[Tensor]  # the weights, or their fp32 copies


class AdamW:
    """Fused AdamW. With fp32 weights, a step needs no temporary memory."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        *,
        learning_rate: float,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self._is_mixed = weights[0].dtype != torch.float32
        self._chunk_elements = chunk_elements
        flat = [weight.detach().view(-1) for weight in weights]
        self._chunks = [self._chunk(chunk, learning_rate) for chunk in self._cut(flat)]

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        divisor: Tensor | None = None,
        overflows: Tensor | None = None,
    ) -> None:
        """Step with the gradients over `divisor`; not at all if `overflows` is 1."""
        parts = self._cut([gradient.view(-1) for gradient in gradients])
        for chunk, own in zip(self._chunks, parts, strict=True):
            for master, gradient in zip(chunk.masters, own, strict=True):
                master.grad = gradient.to(master.dtype)  # no copy in fp32
            # As torch.amp.GradScaler hands them to a fused optimizer.
            chunk.adamw.grad_scale = divisor  # type: ignore[attr-defined]
            chunk.adamw.found_inf = overflows  # type: ignore[attr-defined]
            chunk.adamw.step()
            for master in chunk.masters:
                master.grad = None
            if self._is_mixed:
                torch._foreach_copy_(chunk.weights, chunk.masters)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return master weights and AdamW's state: all that it keeps from step to step."""
        found: list[Tensor] = []
        for chunk in self._chunks:
            found += chunk.masters if self._is_mixed else ()
            for state in chunk.adamw.state.values():
                found += (value for value in state.values() if isinstance(value, Tensor))
        return tuple(found)

    def _chunk(self, weights: list[Tensor], learning_rate: float) -> _Chunk:
        masters = [weight.float() for weight in weights]  # no copy in fp32
        adamw = torch.optim.AdamW(
            masters,
            lr=learning_rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        # AdamW would make these in its first step, which then would need more memory.
        for master in masters:
            adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return _Chunk(adamw=adamw, weights=weights, masters=masters)

    def _cut(self, flat: list[Tensor]) -> list[list[Tensor]]:
        """Cut flat tensors into chunks; fp32 weights are one chunk."""
        if not self._is_mixed:
            return [flat]
        chunks: list[list[Tensor]] = [[]]
        free = self._chunk_elements
        for tensor in flat:
            start = 0
            while start < tensor.numel():
                if free == 0:
                    chunks.append([])
                    free = self._chunk_elements
                part = tensor[start : start + free]
                chunks[-1].append(part)
                start, free = start + part.numel(), free - part.numel()
        return chunks
