"""Many values as portions for one statement each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

MOST = 512  # values in one IN (...): SQLite takes 32,766 in all, and short statements are cached

_T = TypeVar("_T")


def portions(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """None of them empty, in the order of the values."""
    return (values[start : start + MOST] for start in range(0, len(values), MOST))
