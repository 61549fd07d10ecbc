"""The values of each axis in one cell, with `auto` replaced. Their product is all combinations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import isqrt
from typing import Literal

import numpy as np

from orchestrator.core.problem.arrays import Ints
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import (
    BATCH_AXES,
    PARALLEL_AXES,
    Options,
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.layout_table import COLUMNS
from orchestrator.core.problem.pipeline_schedule import (
    ONE_F_ONE_B,
    PipelineSchedule,
    ScheduleKind,
)
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.spec import SweepSpec

# The axes that are independent of the numbers of GPUs and of sequences.
CHOICE_AXES = tuple(name for name in COLUMNS if name not in (*PARALLEL_AXES, *BATCH_AXES))


@dataclass(frozen=True, kw_only=True)
class AxisValues:
    """The values of each axis in one cell."""

    data_parallel_size: Ints
    tensor_parallel_size: Ints
    pipeline_parallel_size: Ints
    context_parallel_size: Ints
    micro_batch_size: Ints
    grad_accum_steps: Ints
    zero_stage: tuple[int, ...]
    pipeline_schedule: tuple[PipelineSchedule, ...]
    recompute: tuple[Recompute, ...]
    precision: tuple[Precision, ...]
    options: tuple[Options, ...]  # every combination of their values

    @property
    def sizes(self) -> dict[str, int]:
        """The number of values of each axis, by its name."""
        return {name: len(getattr(self, name)) for name in COLUMNS}


def axis_values(spec: SweepSpec, cell: Cell) -> AxisValues:
    """Return the values of each axis.

    `auto` sizes are divisors: of the number of GPUs, or for the batch axes of the global batch.
    """
    axes = spec.axes
    divided = dict.fromkeys(PARALLEL_AXES, cell.num_gpus)
    divided |= dict.fromkeys(BATCH_AXES, cell.global_batch_size)
    given = {name: getattr(axes, name) for name in divided}
    stages = tuple(sorted(CAPABILITIES[spec.workload.name].zero_stages))
    names = sorted(axes.options)
    sizes = {
        name: _divisors(divided[name]) if values == "auto" else np.array(values, dtype=np.int64)
        for name, values in given.items()
    }
    return AxisValues(
        **sizes,
        pipeline_schedule=_schedules(
            axes.pipeline_schedule, has_one_stage=1 in sizes["pipeline_parallel_size"]
        ),
        zero_stage=stages if axes.zero_stage == "auto" else axes.zero_stage,
        recompute=_every_recompute(cell.model.num_layers)
        if axes.recompute == "auto"
        else axes.recompute,
        precision=spec.precision,
        options=tuple(
            tuple(zip(names, values, strict=True))
            for values in product(*(axes.options[name] for name in names))
        ),
    )


def unsplit_batch(spec: SweepSpec, cell: Cell) -> str | None:
    """Return why the global batch cannot be split: no number of replicas divides it.

    None: a number that the axes allow does, or the axes allow no replicas at all.
    """
    values, num_gpus = axis_values(spec, cell), cell.num_gpus
    models = {
        int(tensor * pipeline * context)
        for tensor in values.tensor_parallel_size
        for pipeline in values.pipeline_parallel_size
        for context in values.context_parallel_size
    }
    sizes = {num_gpus // size for size in models if num_gpus % size == 0}
    replicas = sorted(sizes & set(values.data_parallel_size.tolist()))
    if not replicas or any(cell.global_batch_size % num == 0 for num in replicas):
        return None
    named = " or ".join(map(str, replicas))
    return (
        f"a global batch of {cell.global_batch_size} cannot be split over {named} replicas"
        f" (gpus: {num_gpus}): data_parallel_size has to divide it"
    )


def _schedules(
    asked: tuple[PipelineSchedule, ...] | Literal["auto"], *, has_one_stage: bool
) -> tuple[PipelineSchedule, ...]:
    """The schedules asked for, and 1f1b for layouts without a pipeline: see `legality`."""
    if asked == "auto":
        interleaved = PipelineSchedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=2)
        return (PipelineSchedule(kind=ScheduleKind.GPIPE), ONE_F_ONE_B, interleaved)
    return asked if ONE_F_ONE_B in asked or not has_one_stage else (*asked, ONE_F_ONE_B)


def _every_recompute(num_layers: int) -> tuple[Recompute, ...]:
    """None, both selective policies, and full for 1/4, 1/2, 3/4 and all of the layers."""
    quarters = {num_layers * quarter // 4 for quarter in (1, 2, 3)} - {0, num_layers}
    return (
        Recompute(),
        *(Recompute(mode=RecomputeMode.SELECTIVE, policy=policy) for policy in SelectivePolicy),
        *(Recompute(mode=RecomputeMode.FULL, num_layers=num) for num in sorted(quarters)),
        Recompute(mode=RecomputeMode.FULL),
    )


def _divisors(number: int) -> Ints:
    small = np.arange(1, isqrt(number) + 1, dtype=np.int64)
    small = small[number % small == 0]
    return np.unique(np.concatenate([small, number // small]))
