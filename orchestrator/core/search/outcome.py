"""How a layout ended, as a search learns it: its step time, that it did not fit, or that it failed.

A layout, or a row of a lattice: both are told in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log, nan
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Measured:
    # The logarithm of the seconds of a step, or of what takes their place; less is better.
    # Infinite or NaN: it teaches nothing, and is not tried again.
    score: float
    # As the prediction counts it; None: not read.
    peak_memory_bytes: float | None = None
    joules_per_token: float | None = None  # None: not read

    @classmethod
    def of_step(
        cls,
        seconds: float,
        *,
        peak_memory_bytes: float | None = None,
        joules_per_token: float | None = None,
    ) -> Self:
        """Return the outcome of a layout whose steps take so many seconds.

        A time of 0 or less, infinity or NaN, from a wrong clock, gives a useless outcome.
        """
        return cls(
            score=log(seconds) if 0 < seconds < inf else nan,
            peak_memory_bytes=peak_memory_bytes,
            joules_per_token=joules_per_token,
        )

    @property
    def is_useless(self) -> bool:
        """True if its score is infinite or NaN."""
        return not isfinite(self.score)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    # Over the limit, relative to it; None: unknown.
    excess: float | None = None
    # Attempts whose failure proves that the layout does not fit. 0: the cause may be another.
    num_proofs: int = 1


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The layout or the code is at fault. After a fault of the machine there is no outcome."""


Outcome = Measured | OutOfMemory | Failed
