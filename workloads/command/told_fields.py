"""Reads fields that a program reports in addition to step times: memory, loss, fields of its own.

The last value of a field counts; of memory the highest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from layout_sweep.regular_file import read_regular
from orchestrator.core.trial.extra import MAX_FIELDS, bounded_extra
from orchestrator.core.trial.protocol import MAX_RESULT_BYTES, RankResult

# The highest value of each of these counts.
_HIGHEST = frozenset(
    {
        "peak_memory_allocated_bytes",
        "peak_memory_reserved_bytes",
        "peak_memory_resident_bytes",
        "peak_memory_active_bytes",
        "inactive_split_bytes",
        "device_used_bytes",
        "allocator_retries",
    }
)
# Fields that only a document may have, or that others read from a line.
_NOT_FIELDS = frozenset(
    {
        "step_seconds",
        "step",
        "iteration",
        "warmup_seconds",
        "phase_seconds",
        "collectives",
        "seen",
        "step_seconds_bound",
        "profile",
    }
)
_MAX_NAMES = 4 * MAX_FIELDS
_MAX_BYTES = 64 * MAX_RESULT_BYTES


class ToldFields:
    """The fields of a program's lines so far."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    @classmethod
    def of_file(cls, path: Path) -> ToldFields:
        """The fields of a whole file of lines; none if there is no such file."""
        fields = cls()
        with suppress(OSError):
            for line in read_regular(path, num_bytes=_MAX_BYTES).content.splitlines():
                with suppress(ValueError, RecursionError):
                    told = json.loads(line)
                    if isinstance(told, dict):
                        fields.take(told)
        return fields

    def take_memory_beside(self, path: Path) -> None:
        """Take the memory in `PATH.1`, `PATH.2`, ...: of other ranks that one process started."""
        for other in path.parent.glob(f"{path.name}.*"):
            told = ToldFields.of_file(other)._told
            self.take({name: told[name] for name in _HIGHEST & told.keys()})

    def take(self, told: Mapping[str, Any]) -> None:
        """Take the fields of one line."""
        for name, value in told.items():
            if name == "extra" and isinstance(value, Mapping):
                self.take(value)
            elif name == "loss":
                if _is_finite(value):
                    self._told.setdefault("loss_first", value)
                    self._told["loss_last"] = value
            elif name in ("grad_norm", "gradient_norm"):
                if _is_finite(value):
                    self._told["gradient_norm"] = value
            elif name in _HIGHEST:
                if _is_finite(value):
                    self._told[name] = max(round(value), self._told.get(name, 0))
            elif name not in _NOT_FIELDS and (name in self._told or len(self._told) < _MAX_NAMES):
                self._told[name] = value

    def values(self) -> dict[str, Any]:
        """The fields of a result, each valid, with the program's own in `extra`."""
        known: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, value in self._told.items():
            if name not in RankResult.model_fields:
                own[name] = value
            elif _is_valid(name, value):
                known[name] = value
        return {**known, "extra": bounded_extra(own)} if own else known

    def completed(self, result: RankResult) -> RankResult:
        """Return a result with the fields that it lacks; those that it has count."""
        told = self.values()
        extra = bounded_extra({**told.pop("extra", {}), **result.extra})
        lacks = {name for name in told if getattr(result, name) in (None, {})}
        missing = {
            name: told[name]
            for name in told
            if name in lacks or name not in result.model_fields_set
        }
        if not missing and extra == result.extra:
            return result
        document = {**result.model_dump(exclude_unset=True), **missing, "extra": extra}
        return RankResult.model_validate(document)


def _is_valid(name: str, value: Any) -> bool:
    try:
        RankResult.model_validate({"step_seconds": [], name: value})
    except ValidationError:
        return False
    return True


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
