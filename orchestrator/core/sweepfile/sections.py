"""The sections of a sweep file with the checks of their keys: model, axes, measurement, search.

Rules that concern several sections are in `spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.problem.pipeline_schedule import ONE_F_ONE_B
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.spec_values import (
    Count,
    Duration,
    Flag,
    Name,
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
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.trial.protocol import Device, LimitName, MeasurementPlan

# A node reboots, or is replaced, within ten minutes. 64 nodes that wait so long cost 128 GPU-hours.
WAIT_FOR_NODES_SECONDS = 900.0
ANCHOR_EVERY = 8
# What `auto` asks of a GPU, whose power and clock settle within seconds: of the warm-up, of the
# timed steps, and of those that confirm the best.
GPU_WARMUP_SECONDS, GPU_SECONDS, GPU_CONFIRMING_SECONDS = 2.0, 5.0, 10.0
_COUNTS, _LIMIT, _FLAG = "`auto`, a number, a list", "`auto`, duration", "`true`, `false`"


class ModelSizes(Section):
    """A model by its sizes, or a preset with some sizes changed."""

    preset: Annotated[str | None, key("preset", "Take the sizes of this preset first")] = None
    name: Annotated[
        Name | None,
        key("text", "A label; generated if you give none. Two definitions need two names"),
    ] = None
    num_layers: Annotated[int | None, whole(1, 1024), key("number", "Transformer layers")] = None
    hidden_size: Annotated[
        int | None, whole(2, 1 << 20), key("number", "Width; a multiple of `num_attention_heads`")
    ] = None
    num_attention_heads: Annotated[
        int | None,
        whole(1, 1 << 14),
        key("number", "Query heads; a multiple of `num_key_value_heads`"),
    ] = None
    num_key_value_heads: Annotated[
        int | None, whole(1, 1 << 14), key("number", "Key and value heads")
    ] = None
    ffn_hidden_size: Annotated[
        int | None, whole(1, 1 << 22), key("number", "Width of the SwiGLU feed-forward")
    ] = None
    vocab_size: Annotated[
        int | None, whole(2, 1 << 24), key("number", "Size of the vocabulary")
    ] = None
    tied_embeddings: Annotated[
        Flag | None,
        key(_FLAG, "The output head is the input embedding. Default: the preset's, or `false`"),
    ] = None

    def shape(self) -> ModelShape:
        """Return the model. Raises ValueError if sizes are missing or do not fit each other."""
        given = self.model_dump(exclude={"preset", "name"}, exclude_none=True)
        start = {} if self.preset is None else asdict(_preset(self.preset))
        sizes = {**start, **given}
        optional = ("preset", "name", "tied_embeddings")
        missing = [name for name in type(self).model_fields if name not in (*sizes, *optional)]
        if missing:
            raise ValueError(
                f"model lacks {', '.join(missing)}; give every size, or start from a preset:"
                " {preset: llama-3.1-8b, num_layers: 4}"
            )
        generated = f"{self.preset or 'llama'}-{sizes['num_layers']}x{sizes['hidden_size']}"
        name = self.name or (self.preset if self.preset and not given else generated)
        shape = ModelShape(**{**sizes, "name": name})
        if name in PRESETS and PRESETS[name] != shape:
            raise ValueError(
                f"name {name!r} is a preset of other sizes; two definitions need two names"
            )
        return shape


def _preset(name: str) -> ModelShape:
    if name not in PRESETS:
        raise ValueError(
            f"no model preset is called {name[:80]!r}; presets: {', '.join(PRESETS)};"
            f" or give the sizes{did_you_mean(name, PRESETS, cutoff=0.5)}"
        )
    return PRESETS[name]


def _as_sizes(value: Any) -> Any:
    if isinstance(value, str):
        return {"preset": value}
    if isinstance(value, ModelShape):
        return asdict(value)
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{value!r} is no model; write a preset ({', '.join(PRESETS)}) or a mapping of sizes"
        )
    return value


def _model_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    sizes = core_schema.no_info_before_validator_function(
        _as_sizes, handler.generate_schema(ModelSizes)
    )
    return core_schema.no_info_after_validator_function(
        ModelSizes.shape,
        sizes,
        serialization=core_schema.plain_serializer_function_ser_schema(asdict),
    )


Model = Annotated[
    ModelShape,
    GetPydanticSchema(_model_schema),
    WithJsonSchema({"anyOf": [{"enum": list(PRESETS)}, ModelSizes.model_json_schema()]}),
]


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


class Limits(Section):
    """Seconds that a rank may spend in each phase; see core/trial/limits.py for `auto`."""

    start: Annotated[
        OrAuto[Duration],
        key(_LIMIT, "From the start of the process to the workload's `main`. `auto`: 120 s"),
    ] = "auto"
    rendezvous: Annotated[
        OrAuto[Duration],
        key(_LIMIT, "Process group, model and optimizer. `auto`: 120 s + 0.5 s per rank"),
    ] = "auto"
    first_step: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "The first optimizer step, with compilation."
            " `auto`: 300 s + 5 times the predicted step,"
            " and 300 s more if workload llama compiles its layers",
        ),
    ] = "auto"
    steady: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "Each later step. `auto`: the longest of 60 s, 5 times the predicted step,"
            " and 5 times the slowest step so far",
        ),
    ] = "auto"
    teardown: Annotated[
        OrAuto[Duration], key(_LIMIT, "After the result is written. `auto`: 20 s")
    ] = "auto"
    total: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "The whole attempt. `auto`: 1800 s, or if that is longer, the other phases plus"
            " twice the time of `warmup_steps` + `max_steps` steps",
        ),
    ] = "auto"

    @property
    def asked(self) -> dict[LimitName, float | None]:
        """The seconds that the file gives; None for `auto`."""
        given = {name: getattr(self, name) for name in LimitName}
        return {name: None if value == "auto" else value for name, value in given.items()}

    @property
    def numbers(self) -> dict[LimitName, float]:
        """Only the limits that the file gives."""
        return {name: value for name, value in self.asked.items() if value is not None}


class Exclusive(StrEnum):
    NONE = "none"  # small gangs may share a node
    # Gangs on one node share the host's memory bandwidth, its cores and its network cards.
    NODE = "node"


class Profiled(StrEnum):
    NONE = "none"
    WINNERS = "winners"


class Measuring(Section):
    """How steps are timed: warm-up first, then steps until their median is known well enough."""

    OMITTED_DEFAULTS = frozenset(
        {"exclusive", "min_seconds", "preflight", "wait_for_nodes", "profile"}
    )

    # A layout fits if two steps do: the first one creates the optimizer states.
    warmup_steps: Annotated[
        int, whole(2, 1000), key("number, at least 2", "First steps, which are not timed")
    ] = 3
    min_steps: Annotated[
        int,
        whole(2, 1000),
        key("number, at least 2", "Fewest timed steps. A confidence interval needs 6"),
    ] = 5
    max_steps: Annotated[
        int,
        whole(2, 10_000),
        key(
            "number",
            "Most timed steps; more if they took less than `min_seconds`. A program of workload"
            " `command` runs no more than this",
        ),
    ] = 50
    min_seconds: Annotated[
        OrAuto[Annotated[float, Field(strict=True, ge=0, le=3600)]],
        key(
            "`auto`, a number",
            "Seconds that the timed steps take together, at least. If more than 0, the steps must"
            " also show no [trend](measuring.md#a-device-that-settles). `auto`: on GPUs 5, and 10"
            " for repeats that confirm the best; on CPUs 0",
        ),
    ] = "auto"
    precision: Annotated[
        float,
        Field(strict=True, gt=0, lt=1),
        key(
            "fraction",
            "Stop when the 95 % confidence interval of the median step time is this narrow:"
            " half its width, divided by the median",
        ),
    ] = 0.02
    limits: Annotated[Limits, key("section", "Time limits: [limits](#limits)")] = Limits()
    exclusive: Annotated[
        Exclusive,
        key(
            "`none`, `node`",
            "`node`: a gang shares its nodes with no other gang, for less noise. `none`: gangs"
            " smaller than a node may share one; column `shared_nodes` of an attempt shows it",
        ),
    ] = Exclusive.NONE
    preflight: Annotated[
        Flag,
        key(_FLAG, "Check each node before its first trial; skip unfit nodes: [nodes](nodes.md)"),
    ] = True
    wait_for_nodes: Annotated[
        Duration,
        key(
            "duration",
            "If nodes are lost and the remaining ones are too few for a cell, how long that cell"
            " waits for nodes to come back or be replaced, counted from the last loss. Other"
            " cells continue. After that, the command ends with exit code 75. For nodes that are"
            " missing at the start, use `--wait-for-nodes`",
        ),
    ] = WAIT_FOR_NODES_SECONDS
    profile: Annotated[
        Profiled,
        key(
            "`none`, `winners`",
            "`winners`: when all cells have ended, profile the fastest layout of each once:"
            " [profile](profile.md). Its GPU time counts against the budgets",
        ),
    ] = Profiled.NONE

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is more than max_steps {self.max_steps}")
        return self

    def plan(self, device: Device, *, confirms: bool = False) -> MeasurementPlan:
        """Return the plan of one attempt; `confirms`: it repeats one of the fastest layouts."""
        return MeasurementPlan(
            warmup_steps=self.warmup_steps,
            min_steps=self.min_steps,
            max_steps=self.max_steps,
            relative_confidence=self.precision,
            warmup_seconds=GPU_WARMUP_SECONDS if self._asks_for_seconds(device) else 0.0,
            min_seconds=self._seconds(device, confirms=confirms),
        )

    def _asks_for_seconds(self, device: Device) -> bool:
        return device is Device.CUDA and self.min_seconds != 0

    def _seconds(self, device: Device, *, confirms: bool) -> float:
        if self.min_seconds != "auto":
            return self.min_seconds
        if device is Device.CPU:
            return 0.0
        return GPU_CONFIRMING_SECONDS if confirms else GPU_SECONDS


class Strategy(StrEnum):
    AUTO = "auto"  # largest expected gain per GPU-second
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    TPE = "tpe"
    GP = "gp"


class Plateau(Section):
    """Stop a cell when its last `trials` finished trials improved its best by less than `gain`."""

    trials: Annotated[
        int, Field(strict=True, ge=1), key("number", "How many of the last finished trials count")
    ] = 20
    gain: Annotated[
        float,
        Field(strict=True, ge=0, lt=1),
        key("fraction", "The cell stops if they improved its best by less than this"),
    ] = 0.01


class Confirm(Section):
    """Repeat the fastest layouts of a cell after its search, to separate speed from luck."""

    contenders: Annotated[
        int,
        whole(1, 64),
        key(
            "number",
            "How many layouts that could be the fastest are repeated; each further round keeps"
            " half of them. On a machine whose speed drifts, all of them are, at most 16",
        ),
    ] = 3
    repeats: Annotated[
        int,
        whole(0, 32),
        key(
            "number",
            "Most repeats of each layout, after its first run and not counted in `max_trials`."
            " 0: nothing is repeated, and layouts that one run cannot tell apart are tied",
        ),
    ] = 2


class Search(Section):
    """How the next layout is selected, and when to stop. Budgets include failed attempts."""

    OMITTED_DEFAULTS = frozenset({"max_cost", "anchor_every", "early_stop", "dominance"})

    strategy: Annotated[
        Strategy,
        key(
            "`auto`, `exhaustive`, `random`, `tpe`, `gp`",
            "`auto`: the layout with the largest expected gain per GPU-second, from physics and"
            " this cell's results: [search.md](search.md). `gp`: a Gaussian process for a cell's"
            " first 200 outcomes, then TPE; needs the extra `gp`",
        ),
    ] = Strategy.AUTO
    seed: Annotated[
        int,
        Field(strict=True, ge=0, lt=1 << 32),
        key("number", "Seed of the search, the weights and the tokens"),
    ] = 0
    max_trials: Annotated[
        int | None, Field(strict=True, ge=1), key("number", "Most trials launched per cell")
    ] = None
    max_gpu_hours: Annotated[
        float | None,
        Field(strict=True, gt=0),
        key(
            "number",
            "Most GPU-hours reserved by all calls together. Failed attempts and idle leases count",
        ),
    ] = None
    max_cost: Annotated[
        float | None,
        Field(strict=True, gt=0),
        key(
            "number",
            "The same in US dollars, by `price_per_gpu_hour` or the [list price](#devices);"
            " an error if neither is known",
        ),
    ] = None
    max_wall_time: Annotated[
        Duration | None, key("duration", "One `sweep run` starts nothing after this time")
    ] = None
    max_parallel_trials: Annotated[
        OrAuto[Annotated[int, whole(1, 4096)]],
        key("`auto`, a number", "Most trials at once. `auto`: as many as fit; without GPUs, one"),
    ] = "auto"
    plateau: Annotated[
        Plateau | None, key("section", "Stop a cell that no longer improves: [plateau](#plateau)")
    ] = None
    bound: Annotated[
        float | None,
        Field(strict=True, gt=0, lt=1),
        key(
            "fraction",
            "Stop a cell when no untried layout is expected to beat its best by this much:"
            " [search.md](search.md). Only with strategy `auto`",
        ),
    ] = None
    confirm: Annotated[
        Confirm, key("section", "Repeat the fastest layouts after the search: [confirm](#confirm)")
    ] = Confirm()
    anchor_every: Annotated[
        int,
        whole(0, 10_000),
        key(
            "number",
            "Repeat one layout after this many measured trials of a cell, after pauses, and before"
            " confirmations, to detect [drift](search.md#a-machine-that-drifts). The default 8"
            " grows to 16, 32 and 64 while the machine's speed stays the same. 0: never. If"
            " `confirm.repeats` is 0, there are no anchors and no confirmations, but results that"
            " contradict their neighbours are still repeated",
        ),
    ] = ANCHOR_EVERY
    early_stop: Annotated[
        OrAuto[Flag],
        key(
            "`auto`, `true`, `false`",
            "End a trial after a few steps if even the fastest of them is 25 % slower than those of"
            " the best layout: its numbers are bounds, and"
            " [never win](measuring.md#trials-that-cannot-win). `auto`: on GPUs, unless `strategy`"
            " is `exhaustive`",
        ),
    ] = "auto"
    dominance: Annotated[
        OrAuto[Dominance],
        key(
            "`auto`, `trusted`, `confirmed`, `off`",
            "Which layouts an out-of-memory excludes:"
            " [search.md](search.md#what-an-out-of-memory-rules-out)",
        ),
    ] = "auto"

    def stops_early(self, device: Device) -> bool:
        """Return whether trials that cannot win are ended early."""
        if self.early_stop != "auto":
            return self.early_stop
        return device is Device.CUDA and self.strategy is not Strategy.EXHAUSTIVE
