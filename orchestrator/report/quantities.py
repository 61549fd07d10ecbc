"""Short texts of quantities, the same in every table. An unknown quantity is a dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from orchestrator.core.problem.memory_text import memory_of_limit_text, memory_text
from orchestrator.core.trial.gpu_hours_text import gpu_hours_text

UNKNOWN = "-"
# Ids that are listed; of more, only the number.
MAX_NUMBERED = 8
_PART_NAMES = {
    "warmup": "warm-up",
    "startup": "start-up",
    # What was measured and invalidated, too, or measured with earlier code.
    "failed": "failed or no longer counted",
}


def counted(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def numbered(noun: str, ids: Sequence[int]) -> str:
    """`trial 7`, `trials 7, 8 and 9`, `trials 1, 2, 3, 4, 5, 6, 7, 8 and 12 more`."""
    if len(ids) == 1:
        return f"{noun} {ids[0]}"
    if len(ids) > MAX_NUMBERED:
        listed = ", ".join(map(str, ids[:MAX_NUMBERED]))
        return f"{noun}s {listed} and {len(ids) - MAX_NUMBERED:,} more"
    return f"{noun}s {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def tokens_rate(value: float | None) -> str:
    """Tokens per second, with the digits that a measurement has."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def is_too_wide(relative: float) -> bool:
    """Return whether a 95 % interval of this relative half-width says nothing of its number."""
    return relative >= 1.0


def confidence(relative: float | None) -> str:
    """The relative half-width of the 95 % interval: `±1.3%`, `unknown` if it is 100 % or more."""
    if relative is None:
        return UNKNOWN
    return "unknown" if is_too_wide(relative) else f"±{relative:.1%}"


def with_confidence(number: str, relative: float | None) -> str:
    """A number and its interval in a sentence: `8,909 ±1.3%`, `8,909 (95 % interval unknown)`."""
    if relative is None or is_too_wide(relative):
        return f"{number} (95 % interval unknown)"
    return f"{number} {confidence(relative)}"


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{fraction:.1%}"


def variation(fraction: float) -> str:
    """How much numbers differ: `5.7%`, `less than 0.1%`."""
    return "less than 0.1%" if 0 < fraction < 0.001 else f"{fraction:.1%}"


def step_time(seconds: float | None) -> str:
    """The time of one step, in the unit that needs the fewest zeros."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def memory(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else memory_text(num_bytes)


def memory_of(num_bytes: float | None, limit_bytes: float | None) -> str:
    """Used memory and its limit: `61.2 of 79.1 GiB`."""
    if num_bytes is None or limit_bytes is None:
        return memory(num_bytes)
    return memory_of_limit_text(num_bytes, limit_bytes)


def gpu_hours(gpu_seconds: float | None) -> str:
    return UNKNOWN if gpu_seconds is None else gpu_hours_text(gpu_seconds)


def part_name(name: str) -> str:
    """Return the words for a part of the reserved GPU time."""
    return _PART_NAMES.get(name, name.replace("_", " "))


def shares(parts: Mapping[str, float]) -> str:
    """`useful 61.0%, start-up 39.0%`: the share of each part that is not zero."""
    total = sum(parts.values())
    return ", ".join(
        f"{part_name(name)} {percent(value / total)}" for name, value in parts.items() if value
    )


def duration(seconds: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def at(moment: datetime | None) -> str:
    """A time of the store, in UTC."""
    return UNKNOWN if moment is None else f"{_utc(moment):%Y-%m-%d %H:%M:%S}"


def age_seconds(moment: datetime, now: datetime) -> float:
    return (_utc(now) - _utc(moment)).total_seconds()


def short_digest(digest: str | None) -> str:
    return UNKNOWN if digest is None else digest[:8]


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
