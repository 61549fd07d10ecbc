"""The significant digits of a number, which show if somebody rounded it or made it up."""

from __future__ import annotations

# Two equal numbers with this many significant digits are no coincidence: nobody rounds to so many.
FINE_DIGITS = 5


def is_fine(seconds: float, tokens: int) -> bool:
    """Return whether a step time follows from no time, and no rate, of few digits."""
    return min(_digits(one) for one in (seconds, 1 / seconds, tokens / seconds)) >= FINE_DIGITS


def _digits(value: float) -> int:
    """Return the significant digits of a number, of twelve at most."""
    mantissa = f"{value:.11e}".partition("e")[0].replace(".", "").rstrip("0")
    return max(1, len(mantissa))


def decimals(value: float) -> int:
    """Return the digits after the point of a number; negative: it ends in zeros before it."""
    exponent = int(f"{value:.11e}".partition("e")[2])
    return _digits(value) - 1 - exponent
