"""The legal layouts of one cell, and how many others each rule rejects.

The combinations of the axes' values, up to 10^9 and more, are never listed: what the exact products
(world size, global batch) exclude is counted by multiplication, and only the rest becomes rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.problem.arrays import Ints
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import CODED, PARALLEL_AXES, Layout, Options
from orchestrator.core.problem.layout_table import COLUMNS, LayoutTable
from orchestrator.core.problem.rule import Rule
from orchestrator.core.search.axis_values import (
    CHOICE_AXES,
    AxisValues,
    axis_values,
)
from orchestrator.core.search.legality import (
    GLOBAL_BATCH,
    WORLD_SIZE,
    Rules,
    constraint_rules,
    keep_legal,
    rules_of,
)
from orchestrator.core.sweepfile.spec import SweepSpec

# Legal layouts of one cell. More cannot be measured: more likely, a constraint is missing.
MAX_LAYOUTS = 1_000_000
# Rows with exact products, which the rules check in some ten seconds.
MAX_CANDIDATES = 1 << 25
CHUNK_ROWS = 1 << 17  # fit into the processor's cache
NOT_IN_TABLE = "not in the table"

Columns = Mapping[str, Ints]


class SpaceTooLarge(SpecInvalid):
    """A cell has more layouts than can be searched by measuring. Narrow an axis."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CellSpace:
    """The legal layouts of a cell in a stable order, and the number rejected for each reason."""

    cell: Cell
    values: AxisValues
    num_combinations: int
    legal: LayoutTable
    rejected: Mapping[str, int]  # by the first rule broken
    _rules: Rules

    def reason(self, layout: Layout) -> str | None:
        """Return why a layout is not legal; None if it is."""
        for name in COLUMNS:
            value, values = getattr(layout, name), getattr(self.values, name)
            if value not in values:
                if name == "options":
                    value, values = _text(value), [_text(each) for each in values]
                return f"{name} {value} is not among the axes' values: {_some(values)}"
        return _first_broken(self._rules, self.values, layout)


class CellSpaces:
    """The spaces of the cells of one sweep, each enumerated once.

    `among` gives the layouts of a replayed table; None: all that the axes name.
    """

    def __init__(
        self, spec: SweepSpec, among: Callable[[Cell], Collection[Layout] | None] = lambda _: None
    ) -> None:
        self._spec, self._among = spec, among
        self._known: dict[tuple[Cell, int], CellSpace] = {}

    def of(self, cell: Cell, *, gpus_per_node: int) -> CellSpace:
        """Return the space of a cell. Raises SpaceTooLarge."""
        # The part of a node beyond the cell's GPUs changes nothing but what constraints compute.
        size = gpus_per_node if self._spec.constraints else min(gpus_per_node, cell.num_gpus)
        if (cell, size) not in self._known:
            self._known[cell, size] = enumerate_cell(
                self._spec, cell, gpus_per_node=size, among=self._among(cell)
            )
        return self._known[cell, size]


def enumerate_cell(
    spec: SweepSpec,
    cell: Cell,
    *,
    gpus_per_node: int,
    unlimited: bool = False,
    among: Collection[Layout] | None = None,
) -> CellSpace:
    """Enumerate the legal layouts of a cell. Raises SpaceTooLarge unless `unlimited`.

    `among` is given for a replay: the layouts of the table. Those that the axes name and the
    constraints allow are then legal; other rules do not count, since the layouts did run.
    """
    values = axis_values(spec, cell)
    if among is not None:
        return _listed(spec, cell, values, gpus_per_node, among)
    sizes = values.sizes
    num_combinations = prod(sizes.values())
    rules = rules_of(spec, cell, values, gpus_per_node)
    rejected: Counter[str] = Counter()

    choices, broken = keep_legal(_choice_table(values), rules.choice)
    num_choices = prod(sizes[name] for name in CHOICE_AXES)
    rejected += {
        reason: count * (num_combinations // num_choices) for reason, count in broken.items()
    }

    placements, off_world = _placements(values, cell.num_gpus)
    num_batches = sizes["micro_batch_size"] * sizes["grad_accum_steps"]
    rejected[WORLD_SIZE] += off_world * num_batches * len(choices)
    placements, broken = keep_legal(placements, rules.placement)
    rejected += {reason: count * num_batches * len(choices) for reason, count in broken.items()}

    pairs = {
        int(dp): _batch_pairs(values, cell.global_batch_size, int(dp))
        for dp in np.unique(placements.data_parallel_size)
    }
    num_rows = sum(len(pairs[int(dp)][0]) for dp in placements.data_parallel_size)
    rejected[GLOBAL_BATCH] += (len(placements) * num_batches - num_rows) * len(choices)
    if num_rows * len(choices) > MAX_CANDIDATES and not unlimited:
        raise _too_large(cell, values, f"{num_rows * len(choices):,} layouts with exact products")
    batches, broken = keep_legal(_with_batches(placements, pairs), rules.batch)
    rejected += {reason: count * len(choices) for reason, count in broken.items()}

    legal, num_legal = [], 0
    for chunk in _crossed(batches, choices):
        kept, broken = keep_legal(chunk, rules.row)
        rejected += broken
        legal.append(kept)
        num_legal += len(kept)
        if num_legal > MAX_LAYOUTS and not unlimited:
            raise _too_large(cell, values, f"more than {MAX_LAYOUTS:,} legal layouts")
    return _space(cell, values, _concatenated(legal, choices), rejected, rules)


def _listed(
    spec: SweepSpec, cell: Cell, values: AxisValues, gpus_per_node: int, among: Collection[Layout]
) -> CellSpace:
    named = [
        layout
        for layout in among
        if all(getattr(layout, name) in getattr(values, name) for name in COLUMNS)
    ]
    known = frozenset(named)
    in_table = Rule(
        NOT_IN_TABLE,
        lambda t: np.array([layout not in known for layout in t.layouts()], dtype=np.bool_),
    )
    rules = Rules(
        choice=[in_table],
        placement=[],
        batch=[],
        row=constraint_rules(spec, cell, gpus_per_node),
        num_gpus=cell.num_gpus,
        global_batch_size=cell.global_batch_size,
    )
    table = LayoutTable.of(named) if named else _concatenated([], _choice_table(values))
    legal, rejected = keep_legal(table, rules.row)
    rejected[NOT_IN_TABLE] = prod(values.sizes.values()) - len(named)
    return _space(cell, values, legal, rejected, rules)


def _space(
    cell: Cell, values: AxisValues, legal: LayoutTable, rejected: Counter[str], rules: Rules
) -> CellSpace:
    reasons = [rule.reason for rule in rules.all if rejected[rule.reason]]
    return CellSpace(
        cell=cell,
        values=values,
        num_combinations=prod(values.sizes.values()),
        legal=legal,
        rejected={reason: rejected[reason] for reason in reasons},
        _rules=rules,
    )


def broken_rule(spec: SweepSpec, cell: Cell, layout: Layout, *, gpus_per_node: int) -> str | None:
    """Return the rule that a layout breaks if the axes had its values, too; None: it breaks none.

    For layouts beyond the axes' values: `CellSpace.reason` refuses these.
    """
    values = axis_values(spec, cell)
    more: dict[str, Any] = {
        name: (*getattr(values, name), getattr(layout, name))
        for name in CHOICE_AXES
        if getattr(layout, name) not in getattr(values, name)
    }
    asked = spec.axes.pipeline_schedule
    if asked != "auto" and layout.pipeline_schedule not in asked:
        schedules = {"pipeline_schedule": (*asked, layout.pipeline_schedule)}
        spec = spec.model_copy(update={"axes": spec.axes.model_copy(update=schedules)})
    values = replace(values, **more)
    return _first_broken(rules_of(spec, cell, values, gpus_per_node), values, layout)


def _first_broken(rules: Rules, values: AxisValues, layout: Layout) -> str | None:
    """Return the first rule that a layout breaks, whose named values are among the values."""
    codes = {name: getattr(values, name).index(getattr(layout, name)) for name in CODED}
    row = replace(
        LayoutTable.of([layout]),
        **{name: np.array([code]) for name, code in codes.items()},
        **_meanings(values),
    )
    return next((rule.reason for rule in rules.all if rule.broken(row)[0]), None)


# --- the combinations ---


def _choice_table(values: AxisValues) -> LayoutTable:
    """Every combination of the axes that are independent of the numbers of GPUs and sequences."""
    stages = np.array(values.zero_stage, dtype=np.int64)
    codes = (np.arange(len(getattr(values, name))) for name in CODED)
    grid = np.meshgrid(stages, *codes, indexing="ij")
    columns = dict(zip(CHOICE_AXES, (axis.ravel() for axis in grid), strict=True))
    return replace(_table(columns), **_meanings(values))


def _meanings(values: AxisValues) -> dict[str, Any]:
    """Return what the codes of a table mean."""
    return {axis.distinct: getattr(values, name) for name, axis in CODED.items()}


def _placements(values: AxisValues, num_gpus: int) -> tuple[LayoutTable, int]:
    """Return the parallel sizes whose product is the number of GPUs, and the number of others."""
    sizes = [getattr(values, name) for name in PARALLEL_AXES[1:]]
    grid = np.meshgrid(*(size[num_gpus % size == 0] for size in sizes), indexing="ij")
    tp, pp, cp = (axis.ravel() for axis in grid)
    replica = tp * pp * cp
    fits = (num_gpus % replica == 0) & np.isin(num_gpus // replica, values.data_parallel_size)
    columns = dict(
        zip(PARALLEL_AXES, (num_gpus // replica[fits], tp[fits], pp[fits], cp[fits]), strict=True)
    )
    return _table(columns), prod(values.sizes[name] for name in PARALLEL_AXES) - int(fits.sum())


def _batch_pairs(
    values: AxisValues, global_batch_size: int, data_parallel_size: int
) -> tuple[Ints, Ints]:
    """Return micro-batch sizes and accumulation steps with one replica's share as product."""
    share, rest = divmod(global_batch_size, data_parallel_size)
    if rest:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    micro = values.micro_batch_size[share % values.micro_batch_size == 0]
    micro = micro[np.isin(share // micro, values.grad_accum_steps)]
    return micro, share // micro


def _with_batches(placements: LayoutTable, pairs: Mapping[int, tuple[Ints, Ints]]) -> LayoutTable:
    per_placement = [pairs[int(dp)] for dp in placements.data_parallel_size]
    counts = np.array([len(micro) for micro, _ in per_placement], dtype=np.int64)
    rows = placements.take(np.repeat(np.arange(len(placements)), counts))
    empty = np.empty(0, dtype=np.int64)
    micro, accumulate = (
        np.concatenate([empty, *(pair[i] for pair in per_placement)]) for i in (0, 1)
    )
    return replace(rows, micro_batch_size=micro, grad_accum_steps=accumulate)


def _crossed(batches: LayoutTable, choices: LayoutTable) -> Iterator[LayoutTable]:
    """Yield every batch row with every choice row, in chunks."""
    for start in range(0, len(batches) * len(choices), CHUNK_ROWS):
        row = np.arange(start, min(start + CHUNK_ROWS, len(batches) * len(choices)))
        batch, choice = np.divmod(row, len(choices))
        columns = {
            name: getattr(choices, name)[choice]
            if name in CHOICE_AXES
            else getattr(batches, name)[batch]
            for name in COLUMNS
        }
        yield LayoutTable(**columns, **_meanings_of(choices))


def _table(columns: Columns) -> LayoutTable:
    """Return a table with the columns known so far, and ones elsewhere."""
    num_rows = len(next(iter(columns.values())))
    ones = np.ones(num_rows, dtype=np.int64)
    return LayoutTable(
        **{name: columns.get(name, ones) for name in COLUMNS},
        **{axis.distinct: () for axis in CODED.values()},
    )


def _concatenated(tables: Sequence[LayoutTable], like: LayoutTable) -> LayoutTable:
    if not tables:
        tables = [_table({"zero_stage": np.empty(0, dtype=np.int64)})]
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
    return LayoutTable(**columns, **_meanings_of(like))


def _meanings_of(table: LayoutTable) -> dict[str, Any]:
    return {axis.distinct: getattr(table, axis.distinct) for axis in CODED.values()}


def _too_large(cell: Cell, values: AxisValues, found: str) -> SpaceTooLarge:
    widest = sorted(values.sizes.items(), key=lambda item: -item[1])[:3]
    axes = ", ".join(f"{name} ({size} values)" for name, size in widest if size > 1)
    return SpaceTooLarge(
        f"cell {cell.key}: {found}; at most {MAX_LAYOUTS:,} are searched."
        f" Narrow the widest axes, {axes}, with shorter lists or constraints"
    )


def _text(options: Options) -> str:
    return Layout(options=options).option_text or "none"


def _some(values: Sequence[object] | Ints) -> str:
    shown = ", ".join(map(str, values[:12]))
    return shown if len(values) <= 12 else f"{shown} and {len(values) - 12} more"
