"""The sections of a sweep file, as their keys are written and checked: model, axes, measurement, limits, search.

What they have to do with each other is checked in `spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.spec_values import (
    Count,
    Duration,
    Name,
    OptionName,
    OptionValues,
    OrAuto,
    RecomputeChoice,
    Section,
    Some,
    few_options,
    key,
)
from orchestrator.core.trial.limits import PredictedStep, resolve_limits
from orchestrator.core.trial.protocol import LimitName, MeasurementPlan, PhaseLimits

# A node that boots again, or another in its place, is there within ten minutes. 64 nodes that wait so long hold 128 GPU-hours.
WAIT_FOR_NODES_SECONDS = 900.0
_LIMIT, _COUNTS = "`auto`, duration", "`auto`, a number, a list"


class ModelSizes(Section):
    """A model by its sizes, or a preset with some of them changed. Two definitions need two names; one is made up where none is given."""

    preset: Annotated[str | None, key("preset", "Sizes to start from")] = None
    name: Annotated[
        Name | None,
        key("text", "A label; made up where none is given. Two definitions need two names"),
    ] = None
    num_layers: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=1024)] | None,
        key("number", "Transformer layers"),
    ] = None
    hidden_size: Annotated[
        Annotated[int, Field(strict=True, ge=2, le=1 << 20)] | None,
        key("number", "Width; a multiple of `num_attention_heads`"),
    ] = None
    num_attention_heads: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=1 << 14)] | None,
        key("number", "Query heads; a multiple of `num_key_value_heads`"),
    ] = None
    num_key_value_heads: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=1 << 14)] | None,
        key("number", "Key and value heads"),
    ] = None
    ffn_hidden_size: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=1 << 22)] | None,
        key("number", "Width of the SwiGLU feed-forward"),
    ] = None
    vocab_size: Annotated[
        Annotated[int, Field(strict=True, ge=2, le=1 << 24)] | None, key("number", "Token ids")
    ] = None
    tied_embeddings: Annotated[
        Annotated[bool, Field(strict=True)] | None,
        key(
            "`true`, `false`",
            "Whether the output head is the input embedding. `false` where neither preset nor file says",
        ),
    ] = None

    def shape(self) -> ModelShape:
        """The model meant. Raises ValueError for sizes that are missing or do not go together."""
        sizes = {
            key: value
            for key, value in self.model_dump(exclude={"preset", "name"}).items()
            if value is not None
        }
        made_up = self.preset if self.preset and not sizes else None
        if self.preset is not None:
            sizes = {**asdict(_preset(self.preset)), **sizes}
        missing = [
            key
            for key in type(self).model_fields
            if key not in (*sizes, "preset", "name", "tied_embeddings")
        ]
        if missing:
            raise ValueError(
                f"model lacks {', '.join(missing)}; give every size, or start from a preset: {{preset: llama-3.1-8b, num_layers: 4}}"
            )
        name = (
            self.name
            or made_up
            or f"{self.preset or 'llama'}-{sizes['num_layers']}x{sizes['hidden_size']}"
        )
        shape = ModelShape(**{**sizes, "name": name})
        # A preset's own name belongs to its own sizes.
        if name in PRESETS and PRESETS[name] != shape:
            raise ValueError(
                f"name {name!r} is a preset of other sizes; two definitions need two names"
            )
        return shape


def _preset(name: str) -> ModelShape:
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"no model preset is called {name[:80]!r}; presets: {', '.join(PRESETS)}; or give the sizes{hint}"
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
    """The values each part of a layout may take. `auto`: every value that the cell allows, which are divisors of its GPUs and its batch."""

    data_parallel_size: Annotated[
        OrAuto[Some[Count]], key(_COUNTS, "Replicas. `auto`: the divisors of the number of GPUs")
    ] = "auto"
    micro_batch_size: Annotated[
        OrAuto[Some[Count]],
        key(
            _COUNTS,
            "Sequences per replica and forward pass. `auto`: the divisors of the global batch",
        ),
    ] = "auto"
    grad_accum_steps: Annotated[
        OrAuto[Some[Count]],
        key(
            _COUNTS,
            "Micro-batches per replica and optimizer step. `auto`: the divisors of the global batch",
        ),
    ] = "auto"
    recompute: Annotated[
        OrAuto[Some[RecomputeChoice]],
        key(
            "`auto`, a mode, a list",
            "`none`, `full`, `selective_ops` (= `selective`), `selective_attention`; all but `none` with an "
            "optional `:LAYERS` (`full:8`: the first 8). `auto`: none, both selective ones, and full for a "
            "quarter, a half, three quarters and all of the layers",
        ),
    ] = "auto"
    zero_stage: Annotated[
        OrAuto[Some[Annotated[int, Field(strict=True, ge=0, le=3)]]],
        key(
            "`auto`, 0 to 3, a list",
            "ZeRO: 1 shards optimizer states, 2 gradients too, 3 weights too. `auto`: every stage that the workload can do",
        ),
    ] = (0,)
    tensor_parallel_size: Annotated[
        OrAuto[Some[Count]],
        key(_COUNTS, "Ranks that share each layer. `auto`: the divisors of the number of GPUs"),
    ] = (1,)
    pipeline_parallel_size: Annotated[
        OrAuto[Some[Count]], key(_COUNTS, "Stages of layers. `auto`: likewise")
    ] = (1,)
    context_parallel_size: Annotated[
        OrAuto[Some[Count]], key(_COUNTS, "Ranks that share a sequence. `auto`: likewise")
    ] = (1,)
    options: Annotated[
        Mapping[OptionName, OptionValues],
        BeforeValidator(few_options),
        key(
            "mapping of lists",
            "Options of the workload that vary: [options that vary](#options-that-vary)",
        ),
    ] = {}

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the options where there are none: a stored sweep reads as it did before there could be any."""
        return {name: value for name, value in write(self).items() if name != "options" or value}


class Limits(Section):
    """Seconds a rank may stay in each phase before it counts as hung. `auto` follows the time of a step: core/trial/limits.py."""

    start: Annotated[
        OrAuto[Duration], key(_LIMIT, "Process start to the workload's `main`. `auto`: 120 s")
    ] = "auto"
    rendezvous: Annotated[
        OrAuto[Duration],
        key(_LIMIT, "Process group, model and optimizer. `auto`: 120 s, and 0.5 s for each rank"),
    ] = "auto"
    first_step: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "The first optimizer step, compilation included. `auto`: 300 s, and 5 times the predicted step",
        ),
    ] = "auto"
    steady: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "From one later step to the next. `auto`: 60 s, 5 times the predicted step, or 5 times the "
            "slowest step so far: the longest of them",
        ),
    ] = "auto"
    teardown: Annotated[
        OrAuto[Duration], key(_LIMIT, "After the result was written. `auto`: 20 s")
    ] = "auto"
    total: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "The whole attempt. `auto`: 1800 s, or what is around its steps and twice the time of "
            "`warmup_steps` + `max_steps` steps, if that is longer",
        ),
    ] = "auto"

    @property
    def asked(self) -> dict[LimitName, float | None]:
        """Seconds, as the file says them; None: auto."""
        said = {name: getattr(self, name) for name in LimitName}
        return {name: None if value == "auto" else value for name, value in said.items()}

    @property
    def numbers(self) -> dict[LimitName, float]:
        """Those that the file sets."""
        return {name: value for name, value in self.asked.items() if value is not None}


class Exclusive(StrEnum):
    NONE = "none"  # gangs of less than a node share one
    NODE = "node"  # nobody else on its nodes: they would share the host's memory bandwidth, its cores and its network cards


class Measuring(Section):
    """Warm-up is dropped; then steps are timed until the median is known to `precision`, within the bounds."""

    warmup_steps: Annotated[
        int,
        Field(strict=True, ge=2, le=1000),
        key("number, at least 2", "First steps that are not timed"),
    ] = 3  # "it fits" needs two optimizer steps: the states appear in the first
    min_steps: Annotated[
        int,
        Field(strict=True, ge=2, le=1000),
        key("number, at least 2", "Timed steps at least. An interval needs 6"),
    ] = 5
    max_steps: Annotated[
        int, Field(strict=True, ge=2, le=10_000), key("number", "Timed steps at most")
    ] = 50
    precision: Annotated[
        float,
        Field(strict=True, gt=0, lt=1),
        key(
            "fraction",
            "Stop once the 95 % interval of the median step time is this narrow: half its width over the median",
        ),
    ] = 0.02
    limits: Annotated[Limits, key("section", "Time limits: [limits](#limits)")] = Limits()
    exclusive: Annotated[
        Exclusive,
        key(
            "`none`, `node`",
            "`node`: nobody else on a gang's nodes, for cleaner numbers. `none`: gangs of less than a node "
            "share one (column `shared_nodes` of an attempt says whether they did)",
        ),
    ] = Exclusive.NONE
    preflight: Annotated[
        bool,
        Field(strict=True),
        key(
            "`true`, `false`",
            "Look at a node before its first trial, and use none that is not fit: [nodes.md](nodes.md)",
        ),
    ] = True
    wait_for_nodes: Annotated[
        Duration,
        key(
            "duration",
            "How long a cell whose gangs the nodes that are left cannot hold waits for those that are gone, "
            "or for others in their place: from when the last of them went. Others go on meanwhile; then the "
            "call ends with exit code 75. (For nodes that are not there yet at its start: `--wait-for-nodes`)",
        ),
    ] = WAIT_FOR_NODES_SECONDS

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what nobody asked for: a stored sweep reads as it did before it could be asked for."""
        unasked = {
            "exclusive": Exclusive.NONE,
            "preflight": True,
            "wait_for_nodes": WAIT_FOR_NODES_SECONDS,
        }
        return {
            name: value
            for name, value in write(self).items()
            if name not in unasked or value != unasked[name]
        }

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is more than max_steps {self.max_steps}")
        return self

    @property
    def plan(self) -> MeasurementPlan:
        return MeasurementPlan(
            warmup_steps=self.warmup_steps,
            min_steps=self.min_steps,
            max_steps=self.max_steps,
            relative_confidence=self.precision,
        )

    def limits_of(self, *, num_ranks: int, predicted: PredictedStep | None) -> PhaseLimits:
        """The time limits of one attempt, of whose steps so much is predicted; None: nothing."""
        return resolve_limits(
            self.limits.asked, plan=self.plan, num_ranks=num_ranks, predicted=predicted
        )


class Strategy(StrEnum):
    AUTO = "auto"  # what should gain most per GPU-second, by physics and by what the cell has shown
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    TPE = "tpe"
    GP = "gp"


class Plateau(Section):
    """Stop a cell when its last `trials` finished trials brought less than `gain` over the best before them."""

    trials: Annotated[int, Field(strict=True, ge=1), key("number", "So many finished trials")] = 20
    gain: Annotated[
        float,
        Field(strict=True, ge=0, lt=1),
        key("fraction", "that brought less than this over the best before them"),
    ] = 0.01


ANCHOR_EVERY = 8


class Confirm(Section):
    """Measure the fastest layouts of a cell again once its search has ended: a winner is one whose interval stands apart."""

    contenders: Annotated[
        int,
        Field(strict=True, ge=1, le=64),
        key(
            "number",
            "How many of those that could be the fastest take part; half of them stay in each further round. "
            "Where the machine was seen to drift, all of them do, 16 at most",
        ),
    ] = 3
    repeats: Annotated[
        int,
        Field(strict=True, ge=0, le=32),
        key(
            "number",
            "Of each at most, beside its first run, on top of `max_trials`. 0: the fastest single run is believed",
        ),
    ] = 2


class Search(Section):
    """How the next layout is chosen, and when to stop. Budgets count what is spent, failures included."""

    strategy: Annotated[
        Strategy,
        key(
            "`auto`, `exhaustive`, `random`, `tpe`, `gp`",
            "`auto`: what is predicted, by physics and by what this cell has shown, to gain most per "
            "GPU-second: [search.md](search.md). `gp`: a Gaussian process for the first 200 outcomes of a "
            "cell, then TPE; needs the extra `gp`",
        ),
    ] = Strategy.AUTO
    seed: Annotated[
        int,
        Field(strict=True, ge=0, lt=1 << 32),
        key("number", "Of the search, of the weights and of the tokens"),
    ] = 0
    max_trials: Annotated[
        Annotated[int, Field(strict=True, ge=1)] | None, key("number", "Launched trials per cell")
    ] = None
    max_gpu_hours: Annotated[
        Annotated[float, Field(strict=True, gt=0)] | None,
        key(
            "number",
            "GPU-hours held for the sweep by all calls: attempts, failed ones included, and leases that stand idle",
        ),
    ] = None
    max_cost: Annotated[
        Annotated[float, Field(strict=True, gt=0)] | None,
        key(
            "number",
            "The same in US dollars, by `price_per_gpu_hour` or the [list price](#devices); refused where neither is known",
        ),
    ] = None
    max_wall_time: Annotated[
        Duration | None, key("duration", "Of one `sweep run`: nothing is started after it")
    ] = None
    max_parallel_trials: Annotated[
        OrAuto[Annotated[int, Field(strict=True, ge=1, le=4096)]],
        key(
            "`auto`, a number",
            "Trials under way at once. `auto`: as many as fit; without GPUs, one",
        ),
    ] = "auto"
    plateau: Annotated[
        Plateau | None, key("section", "Stop a cell that no longer gains: [plateau](#plateau)")
    ] = None
    bound: Annotated[
        Annotated[float, Field(strict=True, gt=0, lt=1)] | None,
        key(
            "fraction",
            "Stop a cell when no untried layout is expected to gain that much over its best ([search.md](search.md)); only `auto` can tell",
        ),
    ] = None
    confirm: Annotated[
        Confirm,
        key(
            "section",
            "Measure what stands at the top again, once the search has ended: [confirm](#confirm)",
        ),
    ] = Confirm()
    # Measured trials of a cell; 0: never.
    anchor_every: Annotated[
        int,
        Field(strict=True, ge=0, le=10_000),
        key(
            "number",
            "Measure one layout again after so many measured trials of a cell (by default 8; then 16, 32 and "
            "at most 64 while the machine stays as it was), after pauses, and before anything is confirmed: "
            "[drift](search.md#a-machine-that-drifts). 0: never. Where `confirm.repeats` is 0 there are "
            "neither anchors nor confirmations; results that neighbours contradict are still repeated.",
        ),
    ] = ANCHOR_EVERY
    dominance: Annotated[
        OrAuto[Dominance],
        key(
            "`auto`, `trusted`, `confirmed`, `off`",
            "What a layout that runs out of memory rules out: [search.md](search.md#what-an-out-of-memory-rules-out)",
        ),
    ] = "auto"

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what nobody asked for: a stored sweep reads as it did before it could be asked for."""
        unasked = {"max_cost": None, "anchor_every": ANCHOR_EVERY, "dominance": "auto"}
        return {
            name: value
            for name, value in write(self).items()
            if name not in unasked or value != unasked[name]
        }


class Objective(StrEnum):
    TOKENS_PER_SECOND_PER_GPU = "tokens_per_second_per_gpu"
    STEP_SECONDS = "step_seconds"
