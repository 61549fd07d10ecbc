"""One thing that was looked at: whether it is well, what was found, and what to do where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""
