"""The rules for legal layouts: exact products, the workload's abilities, and constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import translate
from orchestrator.core.problem.arrays import Mask
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import NAMED_AXES, PARALLEL_AXES, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_rules import placement_rules, schedule_rule
from orchestrator.core.problem.pipeline_schedule import ONE_F_ONE_B, PipelineSchedule
from orchestrator.core.problem.rule import Rule
from orchestrator.core.search.axis_values import AxisValues
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.constraint import Constraint, facts_of
from orchestrator.core.sweepfile.llama_rules import llama_placement_rules, llama_row_rules
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.sweepfile.workload_section import (
    CommandWorkload,
    LlamaWorkload,
    varied,
)

# The columns that decide whether a framework can express a layout.
_EXPRESSED = (*PARALLEL_AXES, "pipeline_schedule", "recompute", "zero_stage", "precision")
WORLD_SIZE = "data x tensor x pipeline x context parallel size is not the number of GPUs"
GLOBAL_BATCH = "data_parallel_size x micro_batch_size x grad_accum_steps is not global_batch_size"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules in the order of their checks.

    Those of a stage only need the columns known by then, so one check covers many layouts.
    """

    choice: Sequence[Rule]  # ZeRO stage, schedule, recomputation, precision
    placement: Sequence[Rule]  # parallel sizes
    batch: Sequence[Rule]
    row: Sequence[Rule]
    num_gpus: int
    global_batch_size: int

    @property
    def all(self) -> tuple[Rule, ...]:
        """All rules, in the order of their checks."""
        world = Rule(WORLD_SIZE, lambda t: t.world_size != self.num_gpus)
        batch = Rule(
            GLOBAL_BATCH,
            lambda t: (
                t.data_parallel_size * t.micro_batch_size * t.grad_accum_steps
                != self.global_batch_size
            ),
        )
        return (*self.choice, world, *self.placement, batch, *self.batch, *self.row)


def keep_legal(table: LayoutTable, rules: Sequence[Rule]) -> tuple[LayoutTable, Counter[str]]:
    """Return the rows that break no rule, and how many rows each rule is the first to reject."""
    legal = np.ones(len(table), dtype=np.bool_)
    rejected: Counter[str] = Counter()
    for rule in rules:
        broken = rule.broken(table) & legal
        if count := int(np.count_nonzero(broken)):
            rejected[rule.reason] += count
            legal &= ~broken
    return (table.take(legal) if rejected else table), rejected


def rules_of(spec: SweepSpec, cell: Cell, values: AxisValues, gpus_per_node: int) -> Rules:
    """Return the rules for a cell: exact products, the workload's abilities, and constraints."""
    return Rules(
        choice=_choice_rules(spec, cell, values),
        placement=_placement_rules(spec, cell, gpus_per_node),
        # With fewer micro-batches, no stage is ever busy together with all the others. In the
        # published data of the Ultra-Scale Playbook, all 105 runs with fewer ended in an error, and
        # of the 88 with exactly pp - 1 only 4 did.
        batch=[
            Rule(
                "grad_accum_steps is less than pipeline_parallel_size - 1:"
                " the pipeline never fills",
                lambda t: t.grad_accum_steps < t.pipeline_parallel_size - 1,
            )
        ],
        row=[
            _zero_rule(spec, values),
            *_schedule_rules(spec, cell, values),
            *_llama_rules(spec, cell, values),
            *_framework_rules(spec, cell, gpus_per_node),
            *constraint_rules(spec, cell, gpus_per_node),
        ],
        num_gpus=cell.num_gpus,
        global_batch_size=cell.global_batch_size,
    )


def _choice_rules(spec: SweepSpec, cell: Cell, values: AxisValues) -> list[Rule]:
    name, layers = spec.workload.name, cell.model.num_layers
    able, device = CAPABILITIES[name], DEVICES.get(spec.device)
    stages, precisions = sorted(able.zero_stages), ", ".join(sorted(able.precisions))
    schedules = ", ".join(sorted(able.pipeline_schedules))
    too_many = _codes(values.recompute, lambda r: (r.num_layers or 0) > layers)
    full_twice = _codes(
        values.recompute,
        lambda r: r.num_layers == layers and replace(r, num_layers=None) in values.recompute,
    )
    unscheduled = _codes(values.pipeline_schedule, lambda s: s.kind not in able.pipeline_schedules)
    refused = _codes(values.precision, lambda p: p not in able.precisions)
    # A file that says `auto` has the same layouts on every machine: a trial whose device lacks the
    # precision fails there.
    unknown = _codes(values.precision, lambda p: device is not None and p not in device.peak_flops)
    return [
        Rule(
            f"zero_stage is none that workload {name} can do ({', '.join(map(str, stages))})",
            lambda t: ~np.isin(t.zero_stage, stages),
        ),
        Rule(
            f"pipeline_schedule is none that workload {name} can do ({schedules})",
            lambda t: unscheduled[t.pipeline_schedule],
        ),
        Rule(
            f"precision is none that workload {name} can do ({precisions})",
            lambda t: refused[t.precision],
        ),
        Rule(f"precision is none that device {spec.device} has", lambda t: unknown[t.precision]),
        Rule(f"recomputes more than the model's {layers} layers", lambda t: too_many[t.recompute]),
        Rule(
            f"same as recomputing all layers: the model has {layers}",
            lambda t: full_twice[t.recompute],
        ),
    ]


def _codes(
    options: Sequence[Recompute] | Sequence[Precision] | Sequence[PipelineSchedule],
    test: Callable[..., bool],
) -> Mask:
    return np.array([test(option) for option in options], dtype=np.bool_)


def _placement_rules(spec: SweepSpec, cell: Cell, gpus_per_node: int) -> list[Rule]:
    model, workload = cell.model, spec.workload.name
    able = CAPABILITIES[workload]
    part_of_a_node = cell.num_gpus > gpus_per_node and cell.num_gpus % gpus_per_node != 0
    rules = [
        Rule(
            f"{cell.num_gpus} GPUs are not whole nodes of {gpus_per_node}",
            lambda t: np.full(len(t), part_of_a_node),
        )
    ]
    for column in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        most = getattr(able, f"max_{column}")
        rules += _at_most(column, most, f"the most that workload {workload} can do")
    if not spec.tensor_parallel_across_nodes:
        # Tensor parallelism exchanges activations in every layer, which is slow between nodes.
        rules += _at_most(
            "tensor_parallel_size",
            gpus_per_node,
            "the GPUs of a node (tensor_parallel_across_nodes allows it)",
        )
    rules += placement_rules(model, cell.sequence_length)
    if isinstance(spec.workload, LlamaWorkload):
        rules += llama_placement_rules(model, cell.sequence_length)
    return rules


def _at_most(column: str, most: int | None, whose: str) -> list[Rule]:
    if most is None:
        return []
    return [Rule(f"{column} is more than {most}, {whose}", lambda t: getattr(t, column) > most)]


def _zero_rule(spec: SweepSpec, values: AxisValues) -> Rule:
    able = CAPABILITIES[spec.workload.name].zero_stages
    lowest = min(able.intersection(values.zero_stage), default=0)
    return Rule(
        f"same as zero_stage {lowest}: the optimizer states of one rank cannot be sharded",
        lambda t: (t.zero_stage > lowest) & (t.data_parallel_size * t.context_parallel_size == 1),
    )


def _llama_rules(spec: SweepSpec, cell: Cell, values: AxisValues) -> list[Rule]:
    options = [varied(spec.workload.options, varying) for varying in values.options]
    llama = [each for each in options if isinstance(each, LlamaOptions)]
    return llama_row_rules(cell.model, llama) if llama else []


def _schedule_rules(spec: SweepSpec, cell: Cell, values: AxisValues) -> list[Rule]:
    """One stage has no order, so 1f1b represents all schedules."""
    plain = values.pipeline_schedule == (ONE_F_ONE_B,)
    if plain:
        return []
    others = _codes(values.pipeline_schedule, lambda s: s != ONE_F_ONE_B)
    asked = spec.axes.pipeline_schedule
    rules = [
        Rule(
            f"same as pipeline_schedule {ONE_F_ONE_B}: a pipeline of one stage",
            lambda t: (t.pipeline_parallel_size == 1) & others[t.pipeline_schedule],
        ),
        schedule_rule(cell.model),
    ]
    if asked != "auto" and ONE_F_ONE_B not in asked:
        rules.append(
            Rule(
                f"pipeline_schedule {ONE_F_ONE_B} is not among the axes' values",
                lambda t: (t.pipeline_parallel_size > 1) & ~others[t.pipeline_schedule],
            )
        )
    return rules


def _framework_rules(spec: SweepSpec, cell: Cell, gpus_per_node: int) -> list[Rule]:
    """Layouts that the workload's framework cannot express: it would run another in their place."""
    if not isinstance(spec.workload, CommandWorkload) or spec.workload.options.framework is None:
        return []
    framework = spec.workload.options.framework
    on_node = min(gpus_per_node, cell.num_gpus)

    def lacks(table: LayoutTable, name: str) -> Mask:
        # Other rules reject the rest, which is no job of this cell.
        (rows,) = np.nonzero(_is_of_cell(table, cell) & (cell.num_gpus % on_node == 0))
        columns = np.stack([getattr(table, column)[rows] for column in _EXPRESSED], axis=1)
        _, firsts, which = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        jobs = (
            Job(cell=cell, layout=table.layout(int(rows[first])), gpus_per_node=on_node)
            for first in firsts
        )
        lacking = [name in translate(job, framework).impossible for job in jobs]
        found = np.zeros(len(table), dtype=np.bool_)
        found[rows] = np.array(lacking, dtype=np.bool_)[which.reshape(-1)]
        return found

    return [
        Rule(f"{name} is none that {framework} can express", partial(lacks, name=name))
        for name in NAMED_AXES
    ]


def _is_of_cell(table: LayoutTable, cell: Cell) -> Mask:
    per_replica = table.micro_batch_size * table.grad_accum_steps
    has_batch = table.data_parallel_size * per_replica == cell.global_batch_size
    found: Mask = (table.world_size == cell.num_gpus) & has_batch
    return found


def constraint_rules(spec: SweepSpec, cell: Cell, gpus_per_node: int) -> list[Rule]:
    """Return the constraints of the sweep file as rules, in their order."""
    rules = (_of_constraint(constraint, cell, gpus_per_node) for constraint in spec.constraints)
    return [rule for of_one in rules for rule in of_one]


def _of_constraint(constraint: Constraint, cell: Cell, gpus_per_node: int) -> list[Rule]:
    def check(table: LayoutTable) -> tuple[Mask, Mask]:
        return constraint.check(facts_of(table, cell=cell, gpus_per_node=gpus_per_node), len(table))

    broken = Rule(constraint.reason, lambda t: ~check(t)[0])
    undefined = Rule(constraint.undefined_reason, lambda t: check(t)[1])
    return [undefined, broken] if constraint.divides else [broken]
