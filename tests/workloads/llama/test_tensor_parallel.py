"""The parts of cut weights; tests/workloads/llama/equivalence trains them."""

from __future__ import annotations

import torch

from workloads.llama.tensor_parallel import TensorParallel


def test_the_parts_of_all_ranks_are_the_weight() -> None:
    whole = torch.arange(24.0).view(6, 4)
    for dim in (0, 1):
        parts = [TensorParallel(size=2, rank=rank).own(whole, dim=dim) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim), whole)
    assert torch.equal(TensorParallel(size=2, rank=1).own(whole, dim=None), whole)


def test_each_rank_gets_its_heads_of_queries_keys_and_values() -> None:
    # 4 heads of queries, 2 of keys and 2 of values, a row each.
    whole = torch.arange(8.0)[:, None]
    parts = [
        TensorParallel(size=2, rank=rank).own(whole, dim=0, sections=(4, 2, 2)).flatten().tolist()
        for rank in range(2)
    ]
    assert parts == [[0, 1, 4, 6], [2, 3, 5, 7]]
