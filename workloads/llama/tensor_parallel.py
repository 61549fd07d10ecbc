"""The ranks that share each layer: each has some of its heads and some of its width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This rank's place in its group. A group of one has no process group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Turn this rank's part of a sequence (b, s / size, h) into the whole."""
        assert self.group is None
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Turn the ranks' summands of a sequence (b, s, h) into this rank's part of the sum."""
        assert self.group is None
        return x

    def own(self, whole: Tensor, *, dim: int | None, sections: Sequence[int] = ()) -> Tensor:
        """Return this rank's part of a weight: of all of it, or of each of its sections.

        It is cut along `dim`; None: every rank has the whole.
        """
        if self.size == 1 or dim is None:
            return whole
        parts = torch.split(whole, list(sections) or [whole.shape[dim]], dim)
        return torch.cat([part.chunk(self.size, dim)[self.rank] for part in parts], dim)


ALONE = TensorParallel()
