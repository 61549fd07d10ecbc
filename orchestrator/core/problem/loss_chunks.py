"""The chunks of tokens for which a head and its loss are computed in turn.

The trainer and the memory formulas use the same rule.
"""

from __future__ import annotations

import numpy as np

from orchestrator.core.problem.arrays import Ints

# Each chunk adds its product to the gradient of the vocabulary's weights, which is moved as a
# whole. On a CPU, chunks of 64 tokens cost 6 % of a small step, chunks of 128 nothing
# (benchmarks/README.md, trainers).
LEAST_CHUNK_TOKENS = 128


def chunk_tokens(tokens: Ints, most_chunks: int) -> Ints:
    """Return the tokens in a chunk of each micro-batch; the last chunk may have fewer.

    An equal share of the tokens, but at least `LEAST_CHUNK_TOKENS`. More tokens never have smaller
    chunks: a larger micro-batch needs no less memory, which proofs of misfits rely on.
    """
    share = -(-tokens // most_chunks)
    return np.minimum(np.maximum(share, LEAST_CHUNK_TOKENS), tokens)
