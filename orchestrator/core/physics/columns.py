"""Values whose fields are columns: arrays with one entry for each layout or group of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

Columns = TypeVar("Columns")


def joined(parts: Sequence[Columns]) -> Columns:
    """Return one value with the rows of several. A field may itself be a value of columns."""
    columns: dict[str, Any] = {}
    first: Any = parts[0]
    for name in (field.name for field in fields(first)):
        some = [getattr(part, name) for part in parts]
        columns[name] = joined(some) if is_dataclass(some[0]) else np.concatenate(some)
    found: Columns = type(first)(**columns)
    return found
