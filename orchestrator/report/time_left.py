"""The time that a sweep may still take, as a short text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.sweep.progress import TimeLeft


SPENT = ", a budget is spent and nothing more is started"
# A duration has no more digits than this.
_FEWEST_SECONDS = 10


def left_text(left: TimeLeft | None) -> str:
    """`, about 4 min left`, `, likely 1 min to 4 min left`, `, likely done within 4 min`.

    Empty if unknown. A machine that changes from now on needs more repeats than are counted here,
    so the text says only what is likely.
    """
    if left is not None and left.is_spent:
        return SPENT
    if left is None or left.most < 1:
        return ""
    if left.most < _FEWEST_SECONDS:
        return f", less than {_FEWEST_SECONDS} s left"
    most, least = _roughly(left.most), _roughly(left.least)
    if most == least:
        return f", about {most} left"
    if left.least < left.most / 10:
        return f", likely done within {most}"
    return f", likely {least} to {most} left"


def _roughly(seconds: float) -> str:
    """A duration with few digits: `20 s`, `4 min`, `2 h 10 min`, `3 d`."""
    if seconds < 55:
        return f"{max(10 * round(seconds / 10), _FEWEST_SECONDS)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60 // 10 * 10:02d} min"
    return f"{round(minutes / 1440)} d"
