"""Says how a program reports its steps, and finds steps that it printed where nothing is read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_FILE = "the file that SWEEP_METRICS_FILE names"
# Short, since it follows other text in the message of a failure.
TELL_STEPS = (
    f'append {{"step_seconds": 0.52}} to {_FILE}, or set metrics: {{log: PATTERN}}, which'
    " finds the number in what the program prints"
)
# Characters of a line that are quoted, and that are searched.
_MOST_QUOTED, _MOST_SEARCHED = 120, 4096
# A single JSON line may be the program's configuration.
_FEWEST_LINES = 2
_STEP = re.compile(r"step_seconds\W{1,4}\d")
_PATTERNS = (
    r'"step_seconds": (-?\d[\d.eE+-]*)',
    r"step_seconds\W+?(-?\d*\.?\d+(?:[eE][-+]?\d+)?)",
)


def why_unread(lines: Sequence[str]) -> str | None:
    """Return what a program printed that belongs in its metrics file, with the fix.

    None: no line looks like a step. `lines`: of its output, without what its rank wrote there.
    """
    if steps := [line for line in lines if _STEP.search(line[:_MOST_SEARCHED])]:
        pattern = next(one for one in _PATTERNS if re.search(one, steps[-1]))
        return (
            f"its steps are in what it prints, which is not read: append such lines to {_FILE}, or"
            f" set metrics: {{log: '{pattern}', unit: s}}; the last: {_quoted(steps[-1])}"
        )
    objects = [line for line in lines if _has_number(line)]
    if len(objects) < _FEWEST_LINES:
        return None
    return (
        "it prints JSON lines, which are not read: if these are its steps, append them to"
        f" {_FILE}, with the time of a step as step_seconds, or set"
        f" metrics: {{log: PATTERN, unit: UNIT}}; the last: {_quoted(objects[-1])}"
    )


def _quoted(line: str) -> str:
    return line.strip()[:_MOST_QUOTED]


def _has_number(line: str) -> bool:
    """Return whether a line is a JSON object with a number."""
    text = line.strip()
    if not text.startswith("{") or len(text) > _MOST_SEARCHED:
        return False
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return any(
        isinstance(value, int | float) and not isinstance(value, bool) for value in told.values()
    )
