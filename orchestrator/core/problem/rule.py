"""One rule that layouts have to keep, checked over whole tables of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.problem.arrays import Mask
from orchestrator.core.problem.layout_table import LayoutTable


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with the mask of rows that break it."""

    reason: str
    broken: Callable[[LayoutTable], Mask]
