"""Memory of a model without a closed form, by traces: bytes by recompute mode, linear in tokens.

`sweep trace` measures the numbers, a sweep file holds them under `trainer.activations`, and
core/physics/memory.py uses them in place of its closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.layout import Recompute

NO_RECOMPUTE = str(Recompute())


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBytes:
    """Bytes of one micro-batch on one GPU, without parallel sizes."""

    per_token: float = 0.0
    # Times the sequence length, if attention keeps its scores.
    per_token_and_position: float = 0.0
    # Whatever the tokens: copies of weights, gradients of weights before they are added.
    fixed: float = 0.0

    def of(self, *, tokens: int, sequence_length: int) -> float:
        """Return the bytes of so many tokens."""
        per_token = self.per_token + self.per_token_and_position * sequence_length
        return tokens * per_token + self.fixed

    def at(self, tokens: Ints, sequence_length: int) -> Floats:
        """Return the bytes of each number of tokens."""
        per_token = self.per_token + self.per_token_and_position * sequence_length
        return tokens.astype(np.float64) * per_token + self.fixed


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMode:
    """The memory of one recompute mode: what each layer keeps, and what the peak adds to it."""

    # By one layer, for its backward pass.
    kept: TracedBytes
    # While the last layer's backward pass is at its fullest.
    backward: TracedBytes
    # While the head and the loss are.
    head: TracedBytes
    # Above the states, when the backward pass of all layers is over.
    end: TracedBytes = TracedBytes()

    def peak_bytes(self, *, num_layers: int, tokens: int, sequence_length: int) -> float:
        """Return the peak above the states, of one micro-batch through a whole model."""
        kept, backward, head, end = (
            term.of(tokens=tokens, sequence_length=sequence_length)
            for term in (self.kept, self.backward, self.head, self.end)
        )
        return max(num_layers * kept + max(backward, head), end)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMemory:
    """Modes by their words, as in a layout: `none`, always, and `selective_ops`, `full`.

    Raises ValueError if `none` is missing.
    """

    modes: tuple[tuple[str, TracedMode], ...]

    def __post_init__(self) -> None:
        if NO_RECOMPUTE not in dict(self.modes):
            traced = ", ".join(dict(self.modes)) or "empty"
            raise ValueError(
                f"traced modes {traced}: {NO_RECOMPUTE} is missing, what others are compared with"
            )

    def has(self, recompute: Recompute) -> bool:
        """True if the mode was traced."""
        return _word(recompute) in dict(self.modes)

    def of(self, recompute: Recompute) -> TracedMode:
        """Return the mode of a layer so recomputed.

        One that was not traced counts as not recomputed: the most it can need.
        """
        known = dict(self.modes)
        return known.get(_word(recompute), known[NO_RECOMPUTE])


def _word(recompute: Recompute) -> str:
    return str(Recompute(mode=recompute.mode, policy=recompute.policy))
