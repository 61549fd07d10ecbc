"""Values as JSON, the same in every document of this program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import Path
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON: control characters are escaped, infinity and NaN become null."""
    return json.dumps(jsonable(value), indent=indent, allow_nan=False)


def jsonable(value: Any) -> Any:
    """A value in JSON's types: times as ISO 8601 in UTC, enums as their values, NaN as null."""
    # Most values of a report. Subclasses, such as enums, are for the cases below.
    if type(value) is str or type(value) is int:
        return value
    match value:
        case Enum():
            return value.value
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            moment = (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)
            return moment.isoformat().replace("+00:00", "Z")
        case date() | Path():
            return str(value)
        case Mapping():
            return {str(jsonable(key)): jsonable(item) for key, item in value.items()}
        case bytes():
            return value.hex()
        case list() | tuple() | set() | frozenset():
            return [jsonable(item) for item in value]
        case _:
            return str(value)
