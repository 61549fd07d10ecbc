from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.problem.loss_chunks import chunk_tokens

TOKENS, CHUNKS = st.integers(1, 1 << 20), st.integers(1, 9999)


def of(tokens: int, most_chunks: int) -> int:
    return int(chunk_tokens(np.array([tokens]), most_chunks)[0])


def test_a_chunk_has_an_equal_share_of_the_tokens_but_at_least_128() -> None:
    assert of(8192, 8) == 1024
    assert of(8193, 8) == 1025
    assert of(1024, 8) == 128
    assert of(512, 8) == 128
    assert of(300, 8) == 128
    assert of(127, 8) == 127
    assert of(4096, 1) == 4096


@given(TOKENS, CHUNKS)
def test_chunks_are_no_more_than_asked(tokens: int, most_chunks: int) -> None:
    size = of(tokens, most_chunks)
    assert 1 <= size <= tokens
    assert -(-tokens // size) <= most_chunks


@given(TOKENS, TOKENS, CHUNKS)
def test_more_tokens_never_have_smaller_chunks(one: int, other: int, most_chunks: int) -> None:
    few, many = sorted([one, other])
    assert of(few, most_chunks) <= of(many, most_chunks)


def test_micro_batches_are_computed_together() -> None:
    assert chunk_tokens(np.array([64, 512, 4096]), 8).tolist() == [64, 128, 512]
