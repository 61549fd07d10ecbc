"""Splits many values into portions for one statement each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

# Values in one IN (...): SQLite takes 32,766 in all, and caches short statements.
MOST = 512

_T = TypeVar("_T")


def portions(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The portions in order; none is empty."""
    return (values[start : start + MOST] for start in range(0, len(values), MOST))
