"""Numbers that trainers print, as people write them: `7,282`, `11.5K`, `9.46GiB`, `1.2e-3`, `nan`.

What a number measures is said by its unit. Which text is a number is up to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from math import inf
from types import MappingProxyType


class PaceUnit(StrEnum):
    """The meaning of a printed number for the time of an optimizer step."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    MICROSECONDS = "us"
    STEPS_PER_SECOND = "steps_per_second"
    TOKENS_PER_SECOND = "tokens_per_second"  # of the whole gang
    TOKENS_PER_SECOND_PER_GPU = "tokens_per_second_per_gpu"


BYTES_OF: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
        "kB": 1000,
        **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    }
)
# As nanotron and others write large numbers; G and B are both 10^9.
_MAGNITUDES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(
    r"\s*([+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"\s*([kKMGTB]?i?B?)\s*",
    re.ASCII,
)
_NOT_FINITE = re.compile(r"\s*([+-]?)(nan|inf(?:inity)?)\s*", re.IGNORECASE)
MAX_TEXT = 100  # characters of a number


def number_of(text: str) -> float | None:
    """Return the number that a text is, in bytes if it ends in GiB or alike; None: it is none.

    NaN and infinity are numbers: they tell that a training diverged.
    """
    if len(text) > MAX_TEXT:
        return None
    if (match := _NOT_FINITE.fullmatch(text)) is not None:
        return float(match[1] + match[2])
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    factor = _MAGNITUDES.get(match[2], BYTES_OF.get(match[2]))
    return float(match[1].replace(",", "")) * factor if factor is not None else None


def step_seconds_of(
    number: float, unit: PaceUnit, *, tokens_per_step: int, world_size: int
) -> float | None:
    """Return the seconds of an optimizer step; None for a number that no step can have."""
    if not 0 < number < inf:
        return None
    match unit:
        case PaceUnit.SECONDS:
            return number
        case PaceUnit.MILLISECONDS:
            return number / 1e3
        case PaceUnit.MICROSECONDS:
            return number / 1e6
        case PaceUnit.STEPS_PER_SECOND:
            return 1 / number
        case PaceUnit.TOKENS_PER_SECOND:
            return tokens_per_step / number
        case PaceUnit.TOKENS_PER_SECOND_PER_GPU:
            return tokens_per_step / world_size / number
