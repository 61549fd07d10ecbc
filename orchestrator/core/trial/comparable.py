"""Which measurements may be compared with others: numbers that may be true, timed to their end."""

from __future__ import annotations

from typing import Protocol


class Doubts(Protocol):
    """What speaks against a measurement, as it and a row of the store have it."""

    @property
    def implausible(self) -> str | None: ...

    @property
    def step_seconds_bound(self) -> float | None: ...


def is_comparable(measured: Doubts) -> bool:
    """Return whether numbers may be compared with others that were taken with equal software."""
    return measured.implausible is None and measured.step_seconds_bound is None
