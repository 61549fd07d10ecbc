"""The outcomes of a layout: those that a search is told, and those that the store knows."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True)
class Measured:
    # The sweep's objective. 0, infinity and NaN teach nothing, and the layout is not asked for
    # again.
    value: float
    # As the prediction counts it; None: not read.
    peak_memory_bytes: float | None = None
    joules_per_token: float | None = None  # None: not read

    @property
    def is_useless(self) -> bool:
        """True for a value that is none: from a clock that stood still, 0 or infinite."""
        return not 0 < self.value < inf


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    # Over the limit, relative to it; None: unknown.
    excess: float | None = None
    # Attempts whose failure proves that the layout does not fit. 0: the cause may be another.
    num_proofs: int = 1


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The layout or the code is at fault. For the machine's fault, call `Searcher.forget`."""


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Asked for, and neither told nor forgotten yet."""


@dataclass(frozen=True, kw_only=True)
class Condemned:
    """Needs at least the memory of layouts that ran out of it; never launched."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A trial that told us nothing: it is not proposed again."""


Outcome = Measured | OutOfMemory | Failed
Known = Outcome | UnderWay | Condemned | SetAside
