"""Layouts that differ in nothing but their recomputation, and follow each other in a table.

Most formulas do not depend on recomputation: they are computed once for all layouts of a group.
Knows nothing of these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.arrays import Ints, Mask
from orchestrator.core.problem.layout_table import COLUMNS, LayoutTable

Scalar = TypeVar("Scalar", bound=np.generic)

# Options are not shared: what they change is in the constants of the trainer.
_SHARED = tuple(name for name in COLUMNS if name not in ("recompute", "options"))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutGroups:
    """The groups of a table's layouts."""

    # One layout of each group.
    table: LayoutTable
    # For every layout: the code of its recomputation, and its group. None: each is a group.
    recompute: Ints
    group: Ints | None

    @classmethod
    def of(cls, table: LayoutTable) -> LayoutGroups:
        """Group the neighbours of a table that differ in nothing but recomputation and options.

        What options change is in the constants of the trainer.
        """
        starts = _starts(table)
        if starts.all():
            return cls.alone(table)
        return cls(
            table=table.take(np.flatnonzero(starts)),
            recompute=table.recompute,
            group=np.cumsum(starts) - 1,
        )

    @classmethod
    def alone(cls, table: LayoutTable) -> LayoutGroups:
        """Make each layout of a table a group of its own."""
        return cls(table=table, recompute=table.recompute, group=None)

    def __len__(self) -> int:
        return len(self.recompute)

    def spread(self, of_groups: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return for each layout the entry of its group."""
        return of_groups if self.group is None else of_groups.take(self.group)


def _starts(table: LayoutTable) -> Mask:
    """Mark the rows that differ from the row before in a column that a group shares."""
    starts = np.zeros(len(table), dtype=np.bool_)
    starts[:1] = True
    for name in _SHARED:
        column = getattr(table, name)
        starts[1:] |= column[1:] != column[:-1]
    return starts
