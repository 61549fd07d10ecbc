"""AdamW over weights, or over fp32 copies of bf16 weights; all, or this rank's share (ZeRO stage
1).

The kernel is torch's fused one. It steps the weights in chunks, so that the temporary memory of a
step stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
# Elements stepped at once: so many bf16 gradients become fp32, and so many shares are gathered.
CHUNK_ELEMENTS = 1 << 26

# torch 2.13 renamed it and nothing else.
_all_gather = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)

# Flat views of a weight, or of a part of it, and of its gradient.
_Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    adamw: torch.optim.AdamW
    pairs: list[_Pair]
    own_weights: list[Tensor]  # this rank's, or parts
    masters: list[Tensor]  # own weights, or their fp32 copies
    gradients: list[Tensor]  # of the own weights


class AdamW:
    """Fused AdamW over weights and their gradients, which keep their memory from step to step.

    With `num_shards` above 1 each rank of the default process group steps an equal share of each
    chunk, and has states for that share alone. Then the ranks gather the new weights in their own
    dtype: one collective a chunk.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        *,
        learning_rate: float,
        num_shards: int = 1,
        shard: int = 0,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self._num_shards, self._shard = num_shards, shard
        pairs = [
            (w.detach().view(-1), g.detach().view(-1))
            for w, g in zip(weights, gradients, strict=True)
        ]
        # Such a step needs no temporary memory.
        at_once = weights[0].dtype == torch.float32 and num_shards == 1
        chunks = [pairs] if at_once else _cut(pairs, chunk_elements)
        self._chunks = [self._chunk(chunk, learning_rate=learning_rate) for chunk in chunks]

    @torch.no_grad()
    def step(self) -> None:
        buffer = self._gather_buffer() if self._num_shards > 1 else None
        for chunk in self._chunks:
            for master, gradient in zip(chunk.masters, chunk.gradients, strict=True):
                master.grad = gradient.to(master.dtype)  # no copy in fp32
            chunk.adamw.step()
            for master in chunk.masters:
                master.grad = None
            if buffer is not None:
                self._gather(chunk, buffer)
            elif chunk.own_weights is not chunk.masters:
                torch._foreach_copy_(chunk.own_weights, chunk.masters)

    def tensors(self) -> tuple[Tensor, ...]:
        """Master weights and AdamW's state: all that an optimizer keeps from step to step."""
        found: list[Tensor] = []
        for chunk in self._chunks:
            found += chunk.masters if chunk.own_weights is not chunk.masters else ()
            for state in chunk.adamw.state.values():
                found += (value for value in state.values() if isinstance(value, Tensor))
        return tuple(found)

    def _chunk(self, pairs: list[_Pair], *, learning_rate: float) -> _Chunk:
        shards = _cut(pairs, _shard_elements(pairs, self._num_shards))
        # A chunk with fewer elements than shards leaves nothing for the last ranks.
        own = (
            shards[self._shard]
            if self._shard < len(shards)
            else [(w[:0], g[:0]) for w, g in pairs[:1]]
        )
        own_weights = [w for w, _ in own]
        masters = (
            own_weights
            if own_weights[0].dtype == torch.float32
            else [w.float() for w in own_weights]
        )
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
        return _Chunk(
            adamw=adamw,
            pairs=pairs,
            own_weights=own_weights,
            masters=masters,
            gradients=[g for _, g in own],
        )

    def _gather_buffer(self) -> Tensor:
        """Memory for the largest chunk, used for all: a backend may keep what it gathered."""
        largest = self._chunks[0].pairs
        share = _shard_elements(largest, self._num_shards)
        return largest[0][0].new_empty(share * self._num_shards)

    def _gather(self, chunk: _Chunk, buffer: Tensor) -> None:
        """Bring every rank's share of a chunk's new weights to all."""
        weights = [w for w, _ in chunk.pairs]
        share = _shard_elements(chunk.pairs, self._num_shards)
        own = buffer[share * self._shard :][:share]
        torch._foreach_copy_(_laid_out(own, chunk.masters), chunk.masters)
        gathered = buffer[: share * self._num_shards]
        # NCCL does not copy a share that lies at its place already.
        _all_gather(gathered, own)
        torch._foreach_copy_(weights, _laid_out(gathered, weights))


def _cut(pairs: list[_Pair], num_elements: int) -> list[list[_Pair]]:
    """Cut flat weights and their gradients into parts of so many elements; the last is shorter."""
    parts: list[list[_Pair]] = [[]]
    free = num_elements
    for weight, gradient in pairs:
        start = 0
        while start < weight.numel():
            if free == 0:
                parts.append([])
                free = num_elements
            size = min(free, weight.numel() - start)
            parts[-1].append((weight[start : start + size], gradient[start : start + size]))
            start, free = start + size, free - size
    return parts


def _shard_elements(pairs: list[_Pair], num_shards: int) -> int:
    return -(-sum(weight.numel() for weight, _ in pairs) // num_shards)


def _laid_out(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of the beginning of a flat tensor, one after another, as long as those given."""
    sizes = [tensor.numel() for tensor in like]
    return list(torch.split(flat[: sum(sizes)], sizes))
