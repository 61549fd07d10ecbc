"""What the store knows of a layout: its outcome, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.search.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Asked for, and neither told nor forgotten yet."""


@dataclass(frozen=True, kw_only=True)
class Condemned:
    """Needs at least the memory of layouts that ran out of it; never launched."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A trial that told us nothing: it is not proposed again."""


Known = Outcome | UnderWay | Condemned | SetAside
