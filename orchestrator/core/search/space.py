"""Which layouts a sweep file means for one cell, and why the others of the lattice are not legal: each rejected one is counted under one reason.

The lattice is every combination of the axes' values, up to 10^9 and more. It is never built: what the exact products (world size, global
batch) rule out is counted by multiplication, and only the rest becomes rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt, prod

import numpy as np

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import (
    Layout,
    Options,
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.layout_table import COLUMNS, Ints, LayoutTable, Mask
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.constraint import Constraint, facts_of
from orchestrator.core.sweepfile.spec import SweepSpec

MAX_LAYOUTS = 1_000_000  # legal in one cell; more cannot be searched by measuring, and a forgotten constraint is likelier
MAX_CANDIDATES = (
    1 << 25
)  # rows that the products allow and the rules must look at: some ten seconds
CHUNK_ROWS = 1 << 17  # rows checked at once: their columns stay in the processor's cache

WORLD_SIZE = "data x tensor x pipeline x context parallel size is not the number of GPUs"
NOT_IN_TABLE = "not in the table"
GLOBAL_BATCH = "data_parallel_size x micro_batch_size x grad_accum_steps is not global_batch_size"

Columns = Mapping[str, Ints]


class SpaceTooLarge(SpecInvalid):
    """A cell means more layouts than can be searched by measuring. Narrow an axis, or say that you want them all."""


@dataclass(frozen=True, kw_only=True)
class AxisValues:
    """The values of each axis in one cell, `auto` spelled out. Their combinations are the lattice."""

    data_parallel_size: Ints
    tensor_parallel_size: Ints
    pipeline_parallel_size: Ints
    context_parallel_size: Ints
    micro_batch_size: Ints
    grad_accum_steps: Ints
    zero_stage: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    precision: tuple[Precision, ...]
    options: tuple[Options, ...]  # every combination of their values

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in COLUMNS}


@dataclass(frozen=True, kw_only=True, eq=False)
class CellSpace:
    """The legal layouts of a cell in a stable order, and how many of the lattice were rejected for each reason."""

    cell: Cell
    values: AxisValues
    lattice_size: int
    legal: LayoutTable
    rejected: Mapping[str, int]  # in the order of the rules; the first that fails counts
    _rules: _Rules

    def reason(self, layout: Layout) -> str | None:
        """Say why a layout is not among the legal ones; None when it is."""
        for name in COLUMNS:
            value, values = getattr(layout, name), getattr(self.values, name)
            if value not in values:
                said, among = (
                    (_text(value), [_text(each) for each in values])
                    if name == "options"
                    else (value, values)
                )
                return f"{name} {said} is not among the axes' values: {_some(among)}"
        row = replace(
            LayoutTable.of([layout]),
            recompute=np.array([self.values.recompute.index(layout.recompute)]),
        )
        row = replace(row, precision=np.array([self.values.precision.index(layout.precision)]))
        row = replace(row, options=np.array([self.values.options.index(layout.options)]))
        row = replace(
            row,
            recomputes=self.values.recompute,
            precisions=self.values.precision,
            option_sets=self.values.options,
        )
        return next((rule.reason for rule in self._rules.all if rule.broken(row)[0]), None)


def enumerate_cell(
    spec: SweepSpec,
    cell: Cell,
    *,
    gpus_per_node: int,
    unlimited: bool = False,
    among: Collection[Layout] | None = None,
) -> CellSpace:
    """Enumerate the legal layouts of a cell. Raises SpaceTooLarge beyond MAX_LAYOUTS unless `unlimited`.

    `among` is all that can be run, where that is known: of it, what the axes name and the constraints allow is legal, for it was run.
    """
    values = axis_values(spec, cell)
    if among is not None:
        return _listed(spec, cell, values, gpus_per_node, among)
    sizes = values.sizes
    lattice_size = prod(sizes.values())
    rules = _rules_of(spec, cell, values, gpus_per_node)
    rejected: Counter[str] = Counter()

    choices, broken = _filter(_choice_table(values), rules.choice)
    num_choices = prod(sizes[name] for name in _CHOICES)
    rejected += {reason: count * (lattice_size // num_choices) for reason, count in broken.items()}

    placements, off_world = _placements(values, cell.num_gpus)
    num_batches = sizes["micro_batch_size"] * sizes["grad_accum_steps"]
    rejected[WORLD_SIZE] += off_world * num_batches * len(choices)
    placements, broken = _filter(placements, rules.placement)
    rejected += {reason: count * num_batches * len(choices) for reason, count in broken.items()}

    pairs = {
        int(dp): _batch_pairs(values, cell.global_batch_size, int(dp))
        for dp in np.unique(placements.data_parallel_size)
    }
    num_rows = sum(len(pairs[int(dp)][0]) for dp in placements.data_parallel_size)
    rejected[GLOBAL_BATCH] += (len(placements) * num_batches - num_rows) * len(choices)
    if num_rows * len(choices) > MAX_CANDIDATES and not unlimited:
        raise _too_large(cell, values, f"{num_rows * len(choices):,} layouts with exact products")
    batches, broken = _filter(_with_batches(placements, pairs), rules.batch)
    rejected += {reason: count * len(choices) for reason, count in broken.items()}

    legal, num_legal = [], 0
    for chunk in _crossed(batches, choices):
        kept, broken = _filter(chunk, rules.row)
        rejected += broken
        legal.append(kept)
        num_legal += len(kept)
        if num_legal > MAX_LAYOUTS and not unlimited:
            raise _too_large(cell, values, f"more than {MAX_LAYOUTS:,} legal layouts")
    return CellSpace(
        cell=cell,
        values=values,
        lattice_size=lattice_size,
        legal=_concatenated(legal, choices),
        rejected={
            rule.reason: rejected[rule.reason] for rule in rules.all if rejected[rule.reason]
        },
        _rules=rules,
    )


def _listed(
    spec: SweepSpec, cell: Cell, values: AxisValues, gpus_per_node: int, among: Collection[Layout]
) -> CellSpace:
    named = [
        layout
        for layout in among
        if all(getattr(layout, name) in getattr(values, name) for name in COLUMNS)
    ]
    lattice_size, known = prod(values.sizes.values()), frozenset(named)
    rules = _Rules(
        choice=[
            _LegalityRule(
                reason=NOT_IN_TABLE,
                broken=lambda t: np.array(
                    [t.layout(i) not in known for i in range(len(t))], dtype=np.bool_
                ),
            )
        ],
        placement=[],
        batch=[],
        row=_constraint_rules(spec, cell, gpus_per_node),
        num_gpus=cell.num_gpus,
        global_batch_size=cell.global_batch_size,
    )
    table = LayoutTable.of(named) if named else _concatenated([], _choice_table(values))
    legal, broken = _filter(table, rules.row)
    absent = lattice_size - len(named)
    rejected = ({NOT_IN_TABLE: absent} if absent else {}) | {
        rule.reason: broken[rule.reason] for rule in rules.row if broken[rule.reason]
    }
    return CellSpace(
        cell=cell,
        values=values,
        lattice_size=lattice_size,
        legal=legal,
        rejected=rejected,
        _rules=rules,
    )


# --- the lattice ----------------------------------------------------------------------------------------------------------------

_PLACEMENT = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)
_BATCH = ("micro_batch_size", "grad_accum_steps")
_CHOICES = ("zero_stage", "recompute", "precision", "options")


def axis_values(spec: SweepSpec, cell: Cell) -> AxisValues:
    """Spell out `auto`: sizes are the divisors of the number of GPUs; micro-batch and accumulation those of the global batch."""
    axes = spec.axes
    gpus, batch = _divisors(cell.num_gpus), _divisors(cell.global_batch_size)
    stages = tuple(sorted(CAPABILITIES[spec.workload.name].zero_stages))
    return AxisValues(
        **{
            name: gpus
            if getattr(axes, name) == "auto"
            else np.array(getattr(axes, name), dtype=np.int64)
            for name in _PLACEMENT
        },
        **{
            name: batch
            if getattr(axes, name) == "auto"
            else np.array(getattr(axes, name), dtype=np.int64)
            for name in _BATCH
        },
        zero_stage=stages if axes.zero_stage == "auto" else axes.zero_stage,
        recompute=_every_recompute(cell.model.num_layers)
        if axes.recompute == "auto"
        else axes.recompute,
        precision=spec.precision,
        options=tuple(
            tuple(zip(sorted(axes.options), values, strict=True))
            for values in product(*(axes.options[name] for name in sorted(axes.options)))
        ),
    )


def _every_recompute(num_layers: int) -> tuple[Recompute, ...]:
    """Nothing, both selective policies, and full for a quarter, a half, three quarters and all of the layers."""
    full = RecomputeMode.FULL
    some = sorted({k for quarter in (1, 2, 3) if 0 < (k := num_layers * quarter // 4) < num_layers})
    selective = (
        Recompute(mode=RecomputeMode.SELECTIVE, policy=policy) for policy in SelectivePolicy
    )
    return (
        Recompute(),
        *selective,
        *(Recompute(mode=full, num_layers=k) for k in some),
        Recompute(mode=full),
    )


def _divisors(number: int) -> Ints:
    small = np.arange(1, isqrt(number) + 1, dtype=np.int64)
    small = small[number % small == 0]
    return np.unique(np.concatenate([small, number // small]))


def _choice_table(values: AxisValues) -> LayoutTable:
    """Every combination of ZeRO stage, recomputation, precision and the workload's options."""
    stages = np.array(values.zero_stage, dtype=np.int64)
    codes = (
        np.arange(len(coded)) for coded in (values.recompute, values.precision, values.options)
    )
    grid = np.meshgrid(stages, *codes, indexing="ij")
    return replace(
        _table(dict(zip(_CHOICES, (axis.ravel() for axis in grid), strict=True))),
        recomputes=values.recompute,
        precisions=values.precision,
        option_sets=values.options,
    )


def _placements(values: AxisValues, num_gpus: int) -> tuple[LayoutTable, int]:
    """The placements that use exactly the GPUs, and how many do not. Sizes that do not divide the GPUs are never crossed."""
    sizes = [getattr(values, name) for name in _PLACEMENT[1:]]
    grid = np.meshgrid(*(size[num_gpus % size == 0] for size in sizes), indexing="ij")
    tp, pp, cp = (axis.ravel() for axis in grid)
    replica = tp * pp * cp
    fits = (num_gpus % replica == 0) & np.isin(num_gpus // replica, values.data_parallel_size)
    columns = dict(
        zip(_PLACEMENT, (num_gpus // replica[fits], tp[fits], pp[fits], cp[fits]), strict=True)
    )
    return _table(columns), prod(values.sizes[name] for name in _PLACEMENT) - int(fits.sum())


def _batch_pairs(
    values: AxisValues, global_batch_size: int, data_parallel_size: int
) -> tuple[Ints, Ints]:
    """Micro-batch sizes and accumulation steps whose product is exactly one replica's share of the batch."""
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
    """Every row of the one with every row of the other, in chunks."""
    for start in range(0, len(batches) * len(choices), CHUNK_ROWS):
        row = np.arange(start, min(start + CHUNK_ROWS, len(batches) * len(choices)))
        rows = batches.take(row // len(choices))
        chosen = {name: getattr(choices, name)[row % len(choices)] for name in _CHOICES}
        yield replace(
            rows,
            **chosen,
            recomputes=choices.recomputes,
            precisions=choices.precisions,
            option_sets=choices.option_sets,
        )


def _table(columns: Columns) -> LayoutTable:
    """A table with the columns that are known at this stage, ones elsewhere."""
    num_rows = len(next(iter(columns.values())))
    ones = np.ones(num_rows, dtype=np.int64)
    return LayoutTable(
        **{name: columns.get(name, ones) for name in COLUMNS},
        recomputes=(),
        precisions=(),
        option_sets=(),
    )


def _concatenated(tables: Sequence[LayoutTable], like: LayoutTable) -> LayoutTable:
    if not tables:
        tables = [_table({"zero_stage": np.empty(0, dtype=np.int64)})]
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
    return LayoutTable(
        **columns,
        recomputes=like.recomputes,
        precisions=like.precisions,
        option_sets=like.option_sets,
    )


# --- the rules ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _LegalityRule:
    reason: str
    broken: Callable[[LayoutTable], Mask]


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """In the order they are asked. Those of a stage look only at the columns known by then, so one answer counts for many layouts."""

    choice: Sequence[_LegalityRule]  # ZeRO stage, recomputation, precision
    placement: Sequence[_LegalityRule]  # parallel sizes, which already multiply to the GPUs
    batch: Sequence[_LegalityRule]
    row: Sequence[_LegalityRule]
    num_gpus: int
    global_batch_size: int

    @property
    def all(self) -> tuple[_LegalityRule, ...]:
        world = _LegalityRule(reason=WORLD_SIZE, broken=lambda t: t.world_size != self.num_gpus)
        batch = _LegalityRule(
            reason=GLOBAL_BATCH,
            broken=lambda t: (
                t.data_parallel_size * t.micro_batch_size * t.grad_accum_steps
                != self.global_batch_size
            ),
        )
        return (*self.choice, world, *self.placement, batch, *self.batch, *self.row)


def _filter(table: LayoutTable, rules: Sequence[_LegalityRule]) -> tuple[LayoutTable, Counter[str]]:
    """The rows that break no rule, and how many broke each first."""
    standing = np.ones(len(table), dtype=np.bool_)
    rejected: Counter[str] = Counter()
    for rule in rules:
        broken = rule.broken(table) & standing
        if count := int(np.count_nonzero(broken)):
            rejected[rule.reason] += count
            standing &= ~broken
    return (table.take(standing) if rejected else table), rejected


def _rules_of(spec: SweepSpec, cell: Cell, values: AxisValues, gpus_per_node: int) -> _Rules:
    return _Rules(
        choice=_choice_rules(spec, cell, values),
        placement=_placement_rules(spec, cell, gpus_per_node),
        batch=_batch_rules(),
        row=_row_rules(spec, cell, values, gpus_per_node),
        num_gpus=cell.num_gpus,
        global_batch_size=cell.global_batch_size,
    )


def _choice_rules(spec: SweepSpec, cell: Cell, values: AxisValues) -> list[_LegalityRule]:
    name, layers = spec.workload.name, cell.model.num_layers
    able = CAPABILITIES[name]
    device = DEVICES.get(spec.device)
    too_many = _codes(values.recompute, lambda r: (r.num_layers or 0) > layers)
    full_twice = _codes(
        values.recompute,
        lambda r: r.num_layers == layers and replace(r, num_layers=None) in values.recompute,
    )
    refused = _codes(values.precision, lambda p: p not in able.precisions)
    unknown = _codes(values.precision, lambda p: device is not None and p not in device.peak_flops)
    return [
        _LegalityRule(
            reason=f"zero_stage is none that workload {name} can do ({', '.join(map(str, sorted(able.zero_stages)))})",
            broken=lambda t: ~np.isin(t.zero_stage, sorted(able.zero_stages)),
        ),
        _LegalityRule(
            reason=f"precision is none that workload {name} can do ({', '.join(sorted(able.precisions))})",
            broken=lambda t: refused[t.precision],
        ),
        _LegalityRule(
            reason=f"precision is none that device {spec.device} has",
            broken=lambda t: unknown[t.precision],
        ),
        _LegalityRule(
            reason=f"recomputes more than the model's {layers} layers",
            broken=lambda t: too_many[t.recompute],
        ),
        _LegalityRule(
            reason=f"same as recomputing all layers: the model has {layers}",
            broken=lambda t: full_twice[t.recompute],
        ),
    ]


def _codes(options: Sequence[Recompute] | Sequence[Precision], test: Callable[..., bool]) -> Mask:
    return np.array([test(option) for option in options], dtype=np.bool_)


def _placement_rules(spec: SweepSpec, cell: Cell, gpus_per_node: int) -> list[_LegalityRule]:
    model, workload = cell.model, spec.workload.name
    able = CAPABILITIES[workload]
    part_of_a_node = cell.num_gpus > gpus_per_node and cell.num_gpus % gpus_per_node != 0
    rules = [
        _LegalityRule(
            reason=f"{cell.num_gpus} GPUs are not whole nodes of {gpus_per_node}",
            broken=lambda t: np.full(len(t), part_of_a_node),
        ),
        *_at_most(
            "tensor_parallel_size",
            able.max_tensor_parallel_size,
            f"the most that workload {workload} can do",
        ),
        *_at_most(
            "pipeline_parallel_size",
            able.max_pipeline_parallel_size,
            f"the most that workload {workload} can do",
        ),
        *_at_most(
            "context_parallel_size",
            able.max_context_parallel_size,
            f"the most that workload {workload} can do",
        ),
    ]
    if not spec.tensor_parallel_across_nodes:
        # Tensor parallelism exchanges activations in every layer: over the network between nodes it is not worth a trial.
        rules += _at_most(
            "tensor_parallel_size",
            gpus_per_node,
            "the GPUs of a node (tensor_parallel_across_nodes allows it)",
        )
    return [
        *rules,
        _tensor_parallel_divides("num_attention_heads", model.num_attention_heads),
        _tensor_parallel_divides("num_key_value_heads", model.num_key_value_heads),
        _tensor_parallel_divides("ffn_hidden_size", model.ffn_hidden_size),
        # Stages of unequal depth are legal: nanotron and torchtitan build them, and 28 or 126 layers leave no choice.
        *_at_most("pipeline_parallel_size", model.num_layers, "the layers of the model"),
        # Each rank takes one piece from the front and one from the back, so that causal attention is balanced.
        _LegalityRule(
            reason=f"2 x context_parallel_size does not divide sequence_length {cell.sequence_length}",
            broken=lambda t: (
                (t.context_parallel_size > 1)
                & (cell.sequence_length % (2 * t.context_parallel_size) != 0)
            ),
        ),
    ]


def _at_most(column: str, most: int | None, whose: str) -> list[_LegalityRule]:
    if most is None:
        return []
    return [
        _LegalityRule(
            reason=f"{column} is more than {most}, {whose}",
            broken=lambda t: getattr(t, column) > most,
        )
    ]


def _tensor_parallel_divides(name: str, size: int) -> _LegalityRule:
    return _LegalityRule(
        reason=f"tensor_parallel_size does not divide {name} {size}",
        broken=lambda t: size % t.tensor_parallel_size != 0,
    )


def _batch_rules() -> list[_LegalityRule]:
    # With fewer micro-batches in flight no stage is ever busy together with all the others. In the published data of the Ultra-Scale
    # Playbook all 105 runs with fewer ended in an error, and of the 88 with exactly pp - 1 only 4 did.
    return [
        _LegalityRule(
            reason="grad_accum_steps is less than pipeline_parallel_size - 1: the pipeline never fills",
            broken=lambda t: t.grad_accum_steps < t.pipeline_parallel_size - 1,
        )
    ]


def _row_rules(
    spec: SweepSpec, cell: Cell, values: AxisValues, gpus_per_node: int
) -> list[_LegalityRule]:
    lowest = min(
        CAPABILITIES[spec.workload.name].zero_stages.intersection(values.zero_stage), default=0
    )
    rules = [
        _LegalityRule(
            reason=f"same as zero_stage {lowest}: the optimizer states of one rank cannot be shared out",
            broken=lambda t: (
                (t.zero_stage > lowest) & (t.data_parallel_size * t.context_parallel_size == 1)
            ),
        )
    ]
    return [*rules, *_constraint_rules(spec, cell, gpus_per_node)]


def _constraint_rules(spec: SweepSpec, cell: Cell, gpus_per_node: int) -> list[_LegalityRule]:
    return [
        rule
        for constraint in spec.constraints
        for rule in _of_constraint(constraint, cell, gpus_per_node)
    ]


def _of_constraint(constraint: Constraint, cell: Cell, gpus_per_node: int) -> list[_LegalityRule]:
    def check(table: LayoutTable) -> tuple[Mask, Mask]:
        return constraint.check(facts_of(table, cell=cell, gpus_per_node=gpus_per_node), len(table))

    broken = _LegalityRule(reason=constraint.reason, broken=lambda t: ~check(t)[0])
    return (
        [_LegalityRule(reason=constraint.undefined_reason, broken=lambda t: check(t)[1]), broken]
        if constraint.divides
        else [broken]
    )


def _too_large(cell: Cell, values: AxisValues, found: str) -> SpaceTooLarge:
    widest = sorted(values.sizes.items(), key=lambda item: -item[1])[:3]
    axes = ", ".join(f"{name} ({size} values)" for name, size in widest if size > 1)
    return SpaceTooLarge(
        f"cell {cell.key}: {found}; at most {MAX_LAYOUTS:,} are searched. Narrow the widest axes, {axes}, with shorter lists or constraints"
    )


def _text(options: Options) -> str:
    return Layout(options=options).option_text or "none"


def _some(values: Sequence[object] | Ints) -> str:
    shown = ", ".join(map(str, values[:12]))
    return shown if len(values) <= 12 else f"{shown} and {len(values) - 12} more"
