"""The versions of a framework's package that its rules were tried with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedVersions:
    """The oldest and the newest version: `0.19` is every 0.19.x."""

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        last = f" to {self.newest}" if self.newest != self.oldest else ""
        return f"{self.package} {self.oldest}{last}"

    def other_than_tried(self, packages: Mapping[str, str]) -> str | None:
        """Return the installed version if it is older or newer; None also if it is not known."""
        installed = packages.get(self.package, "")
        found, oldest, newest = map(_numbers, (installed, self.oldest, self.newest))
        is_tried = found[: len(oldest)] >= oldest and found[: len(newest)] <= newest
        return installed if found and not is_tried else None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (5, 24, 0) of 5.24.0.dev0."""
    match = _NUMBERS.match(version)
    return tuple(map(int, match[0].split("."))) if match is not None else ()
