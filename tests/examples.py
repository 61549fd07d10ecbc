"""How many examples a test of Hypothesis draws."""

from __future__ import annotations

from hypothesis import settings

# Hypothesis draws 100 where nothing else is said.
_USUAL = 100


def examples(num: int) -> int:
    """Return the number for a test that asks for another one than is usual: `num`, or a share.

    The share is that of the profile of this run: `make test` draws fewer for all tests.
    """
    return max(1, num * settings().max_examples // _USUAL)
