"""The tokens of context-parallel ranks; tests/workloads/llama/equivalence trains them."""

from __future__ import annotations

import pytest
import torch

from workloads.llama.context_parallel import ContextParallel
from workloads.llama.mesh import Line

LENGTH = 32


def of_rank(rank: int, size: int) -> ContextParallel:
    return ContextParallel(LENGTH, Line(ranks=tuple(range(size)), index=rank))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_tokens_of_all_ranks_are_the_sequence(size: int) -> None:
    positions = torch.cat([of_rank(rank, size).positions for rank in range(size)])
    assert positions.sort().values.tolist() == list(range(LENGTH))


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_looks_at_equally_many_keys(size: int) -> None:
    # A query sees itself and all tokens before it.
    seen = {int((of_rank(rank, size).positions + 1).sum()) for rank in range(size)}
    assert seen == {LENGTH * (LENGTH + 1) // 2 // size}
