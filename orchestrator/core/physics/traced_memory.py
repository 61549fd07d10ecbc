"""Memory of a model that nobody has a closed form for, as traces of it say: bytes by recompute mode, straight lines in tokens.

`sweep trace` finds the numbers, a sweep file holds them under `trainer.activations`, and core/physics/memory.py puts them in its closed forms' place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.layout import Recompute
from orchestrator.core.problem.layout_table import Ints

Floats = NDArray[np.float64]

NO_RECOMPUTE = str(Recompute())


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBytes:
    """Bytes of one micro-batch on one GPU, without parallel sizes."""

    per_token: float = 0.0
    per_token_and_position: float = (
        0.0  # of attention that keeps its scores: times the sequence length
    )
    fixed: float = (
        0.0  # whatever the tokens: copies of weights, gradients of weights before they are added
    )

    def of(self, *, tokens: int, sequence_length: int) -> float:
        return (
            tokens * (self.per_token + self.per_token_and_position * sequence_length) + self.fixed
        )

    def at(self, tokens: Ints, sequence_length: int) -> Floats:
        return (
            tokens.astype(np.float64)
            * (self.per_token + self.per_token_and_position * sequence_length)
            + self.fixed
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMode:
    """The memory of one recompute mode: what each layer keeps, and what the peak adds to what all layers keep, at each of its moments."""

    kept: TracedBytes  # by one layer, for its backward pass
    backward: TracedBytes  # while the last layer's backward pass is at its fullest
    head: TracedBytes  # while the head and the loss are
    end: TracedBytes = (
        TracedBytes()
    )  # above the states, when the backward pass of all layers is over

    def peak_bytes(self, *, num_layers: int, tokens: int, sequence_length: int) -> float:
        """Above the states, of one micro-batch through a whole model."""
        kept, backward, head, end = (
            term.of(tokens=tokens, sequence_length=sequence_length) for term in self._terms()
        )
        return max(num_layers * kept + max(backward, head), end)

    def _terms(self) -> tuple[TracedBytes, ...]:
        return self.kept, self.backward, self.head, self.end


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMemory:
    """Modes by their words, as in a layout (`none`, `selective_ops`, `full`). `none` is always among them."""

    modes: tuple[tuple[str, TracedMode], ...]

    def __post_init__(self) -> None:
        if NO_RECOMPUTE not in dict(self.modes):
            raise ValueError(
                f"traced modes {', '.join(dict(self.modes)) or 'empty'}: {NO_RECOMPUTE} is missing, what others are compared with"
            )

    def has(self, recompute: Recompute) -> bool:
        """Whether the mode was traced."""
        return _word(recompute) in dict(self.modes)

    def of(self, recompute: Recompute) -> TracedMode:
        """The mode of a layer that is recomputed so. One that was not traced counts as not recomputed: as the most it can be."""
        known = dict(self.modes)
        return known.get(_word(recompute), known[NO_RECOMPUTE])


def _word(recompute: Recompute) -> str:
    return str(Recompute(mode=recompute.mode, policy=recompute.policy))
