"""Section `axes` of a sweep file: the values that each part of a layout may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

from orchestrator.core.problem.pipeline_schedule import ONE_F_ONE_B
from orchestrator.core.sweepfile.spec_values import (
    Count,
    OptionName,
    OptionValues,
    OrAuto,
    RecomputeChoice,
    ScheduleChoice,
    Section,
    Some,
    few_options,
    key,
    whole,
)

_COUNTS = "`auto`, a number, a list"


class Axes(Section):
    """The values that each part of a layout may take."""

    OMITTED_DEFAULTS = frozenset({"options", "pipeline_schedule"})

    data_parallel_size: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Replicas of the model. `auto`: the divisors of the number of GPUs"),
    ] = "auto"
    micro_batch_size: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Sequences per replica and forward pass. `auto`: divisors of the batch"),
    ] = "auto"
    grad_accum_steps: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Micro-batches per replica and step. `auto`: divisors of the batch"),
    ] = "auto"
    recompute: Annotated[
        OrAuto[Some[RecomputeChoice]],
        key(
            "`auto`, a mode, a list",
            "Modes: `none`, `full`, `selective_ops` (also `selective`), `selective_attention`."
            " `:LAYERS` after a mode limits it to the first layers: `full:8`. `auto`: none, both"
            " selective modes, and full for 1/4, 1/2, 3/4 and all of the layers",
        ),
    ] = "auto"
    zero_stage: Annotated[
        OrAuto[Some[Annotated[int, whole(0, 3)]]],
        key(
            "`auto`, 0 to 3, a list",
            "ZeRO: 1 shards optimizer states, 2 also gradients, 3 also weights."
            " `auto`: every stage that the workload supports",
        ),
    ] = (0,)
    tensor_parallel_size: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Ranks that share each layer. `auto`: the divisors of the number of GPUs"),
    ] = (1,)
    pipeline_parallel_size: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Stages of layers. `auto`: the divisors of the number of GPUs"),
    ] = (1,)
    pipeline_schedule: Annotated[
        OrAuto[Some[ScheduleChoice]],
        key(
            "`auto`, a schedule, a list",
            "The order of micro-batches in a pipeline: `gpipe` (all forward passes first), `1f1b`,"
            " `interleaved:2` (1f1b with 2 stages on each rank). `auto`: these three."
            " Layouts without a pipeline have `1f1b`",
        ),
    ] = (ONE_F_ONE_B,)
    context_parallel_size: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Ranks that share a sequence. `auto`: the divisors of the number of GPUs"),
    ] = (1,)
    options: Annotated[
        Mapping[OptionName, OptionValues],
        BeforeValidator(few_options),
        key("mapping of lists", "Workload options that vary: see [there](#options-that-vary)"),
    ] = {}
