"""One check of a machine: its status, what it found, and what to do about it."""

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
