"""Decides which measurements may be compared: plausible numbers that were timed to their end."""

from __future__ import annotations

from typing import Protocol


class Doubts(Protocol):
    """Reasons against a comparison, as a measurement and a row of the store have them."""

    @property
    def implausible(self) -> str | None: ...

    @property
    def step_seconds_bound(self) -> float | None: ...


def is_comparable(measured: Doubts) -> bool:
    """Return whether numbers may be compared with others that were taken with equal software."""
    return measured.implausible is None and measured.step_seconds_bound is None
