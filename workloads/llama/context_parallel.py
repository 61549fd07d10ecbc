"""The ranks that share each sequence: each has one piece from the front and one from the back.

So every rank has the same work under causal attention. Queries stay where they are; keys and values
are gathered from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from workloads.llama.mesh import Line
from workloads.llama.tensor_parallel import Gather

# Queries, keys and values (b, s, heads, head_dim) in, (b, s, heads, head_dim) of the queries out.
# With a bias, the queries are those of the last tokens of the keys.
AttentionCore = Callable[[Tensor, Tensor, Tensor, CausalBias | None], Tensor]


class ContextParallel:
    """This rank's place in its group, for sequences of one length. One rank has whole sequences."""

    def __init__(self, sequence_length: int, line: Line | None = None) -> None:
        self._line = line or Line()
        size, index = self._line.size, self._line.index
        pieces = torch.arange(sequence_length).chunk(2 * size)
        # The positions of this rank's tokens in the whole sequence.
        self.positions = (
            torch.cat([pieces[index], pieces[-1 - index]]) if size > 1 else torch.cat(pieces)
        )
        piece = sequence_length // (2 * size)
        ends = (piece * (index + 1), piece * (2 * size - index))
        # Made here: selective recomputation can't make them. A trace of memory can't either, and
        # one rank needs none.
        self._biases = [causal_lower_right(piece, end) for end in ends] if size > 1 else []

    def gather(self, x: Tensor) -> Tensor:
        """Turn this rank's tokens (b, s / size, ...) into the whole sequence, in its order."""
        found: Tensor = Gather.apply(  # type: ignore[no-untyped-call]
            x, self._line.size, self._line.group
        )
        pieces = found.chunk(2 * self._line.size, dim=1)
        # Rank r has the pieces r and 2 size - 1 - r of the sequence.
        return torch.cat([*pieces[::2], *pieces[::-2]], dim=1)

    def attend(self, core: AttentionCore, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply causal attention to this rank's queries and the keys and values of all ranks."""
        if self._line.group is None:
            return core(q, k, v, None)
        k, v = self.gather(torch.cat([k, v], dim=2)).chunk(2, dim=2)
        return torch.cat(
            [
                core(part, k[:, : bias.seq_len_kv], v[:, : bias.seq_len_kv], bias)
                for part, bias in zip(q.chunk(2, dim=1), self._biases, strict=True)
            ],
            dim=1,
        )
