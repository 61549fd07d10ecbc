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


def ok(name: str, found: str, advice: str = "") -> Check:
    return Check(name=name, status=Status.OK, found=found, advice=advice)


def warn(name: str, found: str, advice: str = "") -> Check:
    return Check(name=name, status=Status.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str = "") -> Check:
    return Check(name=name, status=Status.FAIL, found=found, advice=advice)
