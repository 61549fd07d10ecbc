"""Many layouts at once, as columns (numpy). A whole lattice of a cell is enumerated, checked and ranked in this form.

`recompute`, `precision` and `options` are small codes into tuples that the table carries; every other column holds the sizes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.layout import Layout, Options, Precision, Recompute

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutTable:
    """Columns of equal length n, one row per layout."""

    data_parallel_size: Ints
    tensor_parallel_size: Ints
    pipeline_parallel_size: Ints
    context_parallel_size: Ints
    micro_batch_size: Ints
    grad_accum_steps: Ints
    zero_stage: Ints
    recompute: Ints  # index into `recomputes`
    precision: Ints  # index into `precisions`
    options: Ints  # index into `option_sets`
    recomputes: tuple[Recompute, ...]
    precisions: tuple[Precision, ...]
    option_sets: tuple[Options, ...]

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
        return Layout(
            data_parallel_size=int(self.data_parallel_size[row]),
            tensor_parallel_size=int(self.tensor_parallel_size[row]),
            pipeline_parallel_size=int(self.pipeline_parallel_size[row]),
            context_parallel_size=int(self.context_parallel_size[row]),
            micro_batch_size=int(self.micro_batch_size[row]),
            grad_accum_steps=int(self.grad_accum_steps[row]),
            recompute=self.recomputes[int(self.recompute[row])],
            zero_stage=int(self.zero_stage[row]),
            precision=self.precisions[int(self.precision[row])],
            options=self.option_sets[int(self.options[row])],
        )

    def layouts(self) -> list[Layout]:
        """All rows as values, in their order."""
        columns = [getattr(self, name).tolist() for name in COLUMNS]
        return [
            Layout(
                data_parallel_size=data,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                context_parallel_size=context,
                micro_batch_size=micro_batch,
                grad_accum_steps=grad_accum,
                zero_stage=zero_stage,
                recompute=self.recomputes[recompute],
                precision=self.precisions[precision],
                options=self.option_sets[options],
            )
            for data, tensor, pipeline, context, micro_batch, grad_accum, zero_stage, recompute, precision, options in zip(
                *columns, strict=True
            )
        ]

    def take(self, rows: Ints | Mask) -> LayoutTable:
        """The rows of an index array or mask, in its order."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        return LayoutTable(
            **columns,
            recomputes=self.recomputes,
            precisions=self.precisions,
            option_sets=self.option_sets,
        )

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> LayoutTable:
        """The table of some layouts, in their order."""
        rows = list(layouts)
        recomputes = tuple(dict.fromkeys(row.recompute for row in rows))
        precisions = tuple(dict.fromkeys(row.precision for row in rows))
        columns = {
            name: np.array([getattr(row, name) for row in rows], dtype=np.int64)
            for name in COLUMNS
            if name not in CODED
        }
        columns["recompute"] = np.array(
            [recomputes.index(row.recompute) for row in rows], dtype=np.int64
        )
        columns["precision"] = np.array(
            [precisions.index(row.precision) for row in rows], dtype=np.int64
        )
        option_sets = {
            options: code for code, options in enumerate(dict.fromkeys(row.options for row in rows))
        }
        columns["options"] = np.array([option_sets[row.options] for row in rows], dtype=np.int64)
        return cls(
            **columns, recomputes=recomputes, precisions=precisions, option_sets=tuple(option_sets)
        )


CODED = ("recompute", "precision", "options")
COLUMNS = tuple(
    f.name for f in fields(LayoutTable) if f.name not in ("recomputes", "precisions", "option_sets")
)
