"""The sentences about the prediction of one layout: legal or not, its memory, its step, changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from orchestrator.core.search.explanation import Explanation, LayoutChange

NOTHING_FITS = "No layout of this cell is predicted to fit."
NOTHING_LEGAL = "No layout of this cell is legal."
NOTHING_FASTER = "No single change that fits is predicted to be faster."


def memory_sentence(found: Explanation) -> str:
    """`Memory: 61.2 of 79.1 GiB (56.2 GiB to 73.1 GiB in four of five cases) predicted: fits`."""
    limit, total = found.memory_limit_bytes, found.memory_bytes
    probability = found.probability_of_fitting
    band = _band_text(memory_band(found), show_as.memory)
    text = f"Memory: {show_as.memory_of(total, limit)}{band} predicted"
    if limit is None:
        text += "; no limit is known (name a device: device=h100-sxm)"
    elif found.fits and probability is not None and probability < 0.5:
        left = show_as.memory(limit - total)
        text += f": {left} below the limit, and yet more likely not to fit"
    elif found.fits:
        text += f": fits with {show_as.memory(limit - total)} to spare"
    else:
        text += f": {show_as.memory(total - limit)} too much"
    if limit is not None and probability is not None:
        text += f" (probability of fitting {probability:.0%})"
    return text


def fitting_sentence(found: Explanation, change: LayoutChange) -> str:
    """`To fit: mbs 8 -> 4, ga 4 -> 8, 61.2 of 79.1 GiB, 3.1% faster.`."""
    memory = show_as.memory_of(change.memory_bytes, found.memory_limit_bytes)
    return f"To fit: {differences(change)}, {memory}{speed(found, change)}."


def step_sentence(found: Explanation, *, why_no_times: str) -> str:
    """`Step: 4.1 s (3.0 s to 5.6 s in four of five cases) predicted, 9,900 tokens/s/GPU`."""
    if found.step_seconds is None:
        return f"Step: no time is predicted: {why_no_times}"
    band = _band_text(step_band(found), show_as.step_time)
    text = f"Step: {show_as.step_time(found.step_seconds)}{band}"
    return f"{text} predicted, {show_as.tokens_rate(found.tokens_per_second_per_gpu)} tokens/s/GPU"


def against_band(found: Explanation, step_seconds: float) -> str:
    """`, 39 times the prediction`, or nothing if the measured step lies in the band."""
    band = step_band(found)
    if band is None or found.step_seconds is None or band[0] <= step_seconds <= band[1]:
        return ""
    ratio = step_seconds / found.step_seconds
    number = f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}"
    return f", {number} times the prediction"


def _band_text(band: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    """` (3.0 s to 5.6 s in four of five cases)`; empty without a band."""
    if band is None:
        return ""
    low, high = map(text, band)
    return f" ({low} to {high} in four of five cases)"


def faster_sentence(found: Explanation, change: LayoutChange) -> str:
    """`mbs 2 -> 4, ga 8 -> 4: 3.9 s, 5.1% faster`."""
    return f"{differences(change)}: {show_as.step_time(change.step_seconds)}{speed(found, change)}"


def step_band(found: Explanation) -> tuple[float, float] | None:
    """Return the seconds between which four of five measurements should lie."""
    if found.step_band is None or found.step_seconds is None:
        return None
    low, high = found.step_band
    return found.step_seconds * low, found.step_seconds * high


def memory_band(found: Explanation) -> tuple[float, float] | None:
    """Return the bytes between which four of five peaks should lie."""
    if found.memory_band is None:
        return None
    low, high = found.memory_band
    return found.memory_bytes * low, found.memory_bytes * high


def differences(change: LayoutChange) -> str:
    """`mbs 8 -> 4, ga 4 -> 8`."""
    from orchestrator.core.problem.layout import SHORT_NAMES

    def text(value: object) -> str:
        if not isinstance(value, tuple):
            return str(value)
        return " ".join(f"{name}={option}" for name, option in value) or "none"

    short = {name: short for short, name in SHORT_NAMES.items()} | {"zero_stage": "zero"}
    return ", ".join(
        f"{short.get(name, name)} {text(here)} -> {text(there)}"
        for name, (here, there) in change.differs.items()
    )


def speed(found: Explanation, change: LayoutChange) -> str:
    """`, 5.1% faster`, or nothing if no times are known."""
    if found.step_seconds is None or change.step_seconds is None:
        return ""
    gain = found.step_seconds / change.step_seconds - 1
    return f", {gain:.1%} faster" if gain >= 0 else f", {-gain:.1%} slower"
