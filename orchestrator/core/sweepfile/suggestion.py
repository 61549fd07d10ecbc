"""The hint at the end of an error message: the allowed word that a mistyped one is nearest to."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: object, allowed: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `; did you mean llama?`, or nothing if no allowed word is near."""
    close = get_close_matches(str(word)[:80], list(allowed), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
