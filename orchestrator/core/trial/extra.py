"""Fields of a program's own in its result: any JSON, bounded, so that every store takes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_FIELDS = 64
MAX_NAME = 100  # characters
MAX_TEXT = 1000  # characters of one text
MAX_BYTES = 16 << 10  # of all fields, as JSON
MAX_DEPTH = 6
# How many fields did not fit.
DROPPED = "dropped_fields"


def bounded_extra(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that fit, in their order, and the number of the others in `dropped_fields`.

    NaN and infinity become None, which every database can store as JSON. A measurement is not lost
    because too much was told with it.
    """
    kept: dict[str, Any] = {}
    num_dropped = int(value.get(DROPPED, 0)) if isinstance(value.get(DROPPED), int) else 0
    size = 2
    for name, told in value.items():
        if name == DROPPED:
            continue
        clean = _clean(told, MAX_DEPTH)
        more = len(json.dumps({_text(name, MAX_NAME): clean}).encode())
        if len(kept) >= MAX_FIELDS or size + more > MAX_BYTES:
            num_dropped += 1
            continue
        kept[_text(name, MAX_NAME)] = clean
        size += more
    return {**kept, DROPPED: num_dropped} if num_dropped else kept


def _clean(value: Any, depth: int) -> Any:
    match value:
        case bool() | None:
            return value
        case int():
            return value if abs(value) < 1 << 63 else float(value) if abs(value) < 1e300 else None
        case float():
            return value if math.isfinite(value) else None
        case str():
            return _text(value, MAX_TEXT)
        case Mapping() if depth:
            return {
                _text(str(key), MAX_NAME): _clean(item, depth - 1) for key, item in value.items()
            }
        case list() | tuple() if depth:
            return [_clean(item, depth - 1) for item in value]
        case _:
            return _text(str(value), MAX_TEXT)


def _text(text: str, most: int) -> str:
    """Return the text without NUL and lone surrogates, which no database stores."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")[:most]
