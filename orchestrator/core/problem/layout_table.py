"""Many layouts at once, as numpy columns: so a cell's layouts are enumerated, checked and ranked.

A column holds sizes, or for a coded axis small indices into a tuple of distinct values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, make_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from orchestrator.core.problem.arrays import Ints, Mask
from orchestrator.core.problem.layout import (
    CODED,
    SIZES,
    Layout,
    Options,
    Precision,
    Recompute,
    sizes_of,
)
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule

COLUMNS = (*SIZES, *CODED)
# So many rows that some columns of them stay in a processor's cache.
BLOCK_ROWS = 1 << 14
_DISTINCT = {name: axis.distinct for name, axis in CODED.items()}

if TYPE_CHECKING:

    class _Columns:
        """The fields as mypy sees them; they follow from the axes of `Layout`."""

        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
        pipeline_schedules: tuple[PipelineSchedule, ...]
        recomputes: tuple[Recompute, ...]
        precisions: tuple[Precision, ...]
        option_sets: tuple[Options, ...]

        def __init__(self, **columns: Ints | tuple[Any, ...]) -> None: ...
        def __getattr__(self, axis: str) -> Ints: ...

else:
    _Columns = make_dataclass(
        "_Columns",
        [*((name, Ints) for name in COLUMNS), *((name, tuple) for name in _DISTINCT.values())],
        frozen=True,
        kw_only=True,
        eq=False,
    )


class LayoutTable(_Columns):
    """Columns of equal length, one for each axis of `Layout`, and a row for each layout.

    `pipeline_schedule`, `recompute`, `precision` and `options` are indices into
    `pipeline_schedules`, `recomputes`, `precisions` and `option_sets`.
    """

    def __len__(self) -> int:
        return len(self.data_parallel_size)

    @property
    def option_names(self) -> tuple[str, ...]:
        """The workload's options that some row sets."""
        return tuple(sorted({name for options in self.option_sets for name, _ in options}))

    @property
    def world_size(self) -> Ints:
        return (
            self.data_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
        )

    def layout(self, row: int) -> Layout:
        """The layout of one row, as a value."""
        values: dict[str, Any] = {name: getattr(self, name).item(row) for name in COLUMNS}
        for name, distinct in _DISTINCT.items():
            values[name] = getattr(self, distinct)[values[name]]
        return Layout(**values)

    def layouts(self) -> list[Layout]:
        """All rows as values, in their order."""
        columns: dict[str, list[Any]] = {name: getattr(self, name).tolist() for name in COLUMNS}
        for name, distinct in _DISTINCT.items():
            of_code = getattr(self, distinct)
            columns[name] = [of_code[code] for code in columns[name]]
        rows = zip(*columns.values(), strict=True)
        return [Layout(**dict(zip(COLUMNS, row))) for row in rows]  # noqa: B905  as the columns

    @cached_property
    def row_of(self) -> RowOfLayout:
        """The row of each layout. Made once for a cell, which is ranked again as it is measured."""
        return RowOfLayout(self)

    def take(self, rows: Ints | Mask | slice) -> LayoutTable:
        """The rows of an index array, mask or slice, in its order."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        return LayoutTable(**columns, **{name: getattr(self, name) for name in _DISTINCT.values()})

    def blocks(self) -> list[LayoutTable]:
        """All rows, in parts for formulas that make many columns."""
        starts = range(0, len(self), BLOCK_ROWS)
        return [self.take(slice(start, start + BLOCK_ROWS)) for start in starts]

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> LayoutTable:
        """The table of some layouts, in their order."""
        rows = list(layouts)
        columns: dict[str, list[Any]] = {
            name: [getattr(row, name) for row in rows] for name in COLUMNS
        }
        distinct: dict[str, tuple[Any, ...]] = {}
        for name, of_codes in _DISTINCT.items():
            codes = {value: code for code, value in enumerate(dict.fromkeys(columns[name]))}
            columns[name] = [codes[value] for value in columns[name]]
            distinct[of_codes] = tuple(codes)
        arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
        return cls(**arrays, **distinct)


class RowOfLayout:
    """The row of each layout of a table, by the numbers of its columns: no layout is made."""

    def __init__(self, table: LayoutTable) -> None:
        columns = [getattr(table, name).tolist() for name in COLUMNS]
        self._rows = {key: row for row, key in enumerate(zip(*columns, strict=True))}
        self._codes = [
            (name, {value: code for code, value in enumerate(getattr(table, distinct))})
            for name, distinct in _DISTINCT.items()
        ]

    def get(self, layout: Layout) -> int | None:
        """The row, or None if the table has no such layout."""
        codes = [code_of.get(getattr(layout, name)) for name, code_of in self._codes]
        return self._rows.get((*sizes_of(layout), *codes))

    def __contains__(self, layout: Layout) -> bool:
        return self.get(layout) is not None

    def __getitem__(self, layout: Layout) -> int:
        """Raises KeyError."""
        row = self.get(layout)
        if row is None:
            raise KeyError(layout)
        return row
