"""The outcome of a row of a lattice, as a search receives it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, kw_only=True)
class Told:
    """The outcome of a row. Scores are logarithms, and lower is better.

    Raises ValueError for a number that is not finite.
    """

    row: int
    score: float | None = None  # None: it did not run
    peak_memory_bytes: float | None = None  # None: not read
    out_of_memory: bool = False  # else, without a score, it failed
    # Bytes over the limit, as a share of it, if it ran out of memory.
    excess: float | None = None
    joules_per_token: float | None = None  # None: not read

    def __post_init__(self) -> None:
        if self.score is not None and not isfinite(self.score):
            raise ValueError(
                f"score {self.score} of row {self.row}: a logarithm is needed;"
                " the score of a row without one is None"
            )
