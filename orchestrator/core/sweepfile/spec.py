"""The experiment, as the sweep file says it: validated once, at the door; inside, its types are trusted.

Only values live here. Reading YAML with its places is `spec_yaml`; which layouts a spec means is `space`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from enum import StrEnum
from itertools import product
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES, from_driver_name
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.constraint import Constraint, Unread
from orchestrator.core.sweepfile.option_mistakes import option_mistakes
from orchestrator.core.sweepfile.spec_values import (
    Count,
    Duration,
    Length,
    Name,
    OneWithoutItsList,
    OptionName,
    OptionValues,
    OrAuto,
    RecomputeChoice,
    Section,
    Some,
    Tokens,
    as_list,
    few,
    few_options,
)
from orchestrator.core.sweepfile.trainer_section import TrainerChoice
from orchestrator.core.sweepfile.workload_options import LlamaWorkload, WorkloadChoice, workload_mistake
from orchestrator.core.trial.limits import PredictedStep, resolve_limits
from orchestrator.core.trial.protocol import LimitName, MeasurementPlan, PhaseLimits

MAX_GPUS = 16_384
# A node that boots again, or another in its place, is there within ten minutes. 64 nodes that wait so long hold 128 GPU-hours.
WAIT_FOR_NODES_SECONDS = 900.0
MAX_CELLS = 1024
OUR_OWN = frozenset({"llama", "synthetic"})  # workloads whose memory is a formula of this program


class ModelSizes(Section):
    """A model by its sizes, or a preset with some of them changed. Two definitions need two names; one is made up where none is given."""

    preset: str | None = None
    name: Name | None = None
    num_layers: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    hidden_size: Annotated[int, Field(strict=True, ge=2, le=1 << 20)] | None = None
    num_attention_heads: Annotated[int, Field(strict=True, ge=1, le=1 << 14)] | None = None
    num_key_value_heads: Annotated[int, Field(strict=True, ge=1, le=1 << 14)] | None = None
    ffn_hidden_size: Annotated[int, Field(strict=True, ge=1, le=1 << 22)] | None = None
    vocab_size: Annotated[int, Field(strict=True, ge=2, le=1 << 24)] | None = None
    tied_embeddings: Annotated[bool, Field(strict=True)] | None = None

    def shape(self) -> ModelShape:
        """The model meant. Raises ValueError for sizes that are missing or do not go together."""
        sizes = {key: value for key, value in self.model_dump(exclude={"preset", "name"}).items() if value is not None}
        made_up = self.preset if self.preset and not sizes else None
        if self.preset is not None:
            sizes = {**asdict(_preset(self.preset)), **sizes}
        missing = [key for key in type(self).model_fields if key not in (*sizes, "preset", "name", "tied_embeddings")]
        if missing:
            raise ValueError(
                f"model lacks {', '.join(missing)}; give every size, or start from a preset: {{preset: llama-3.1-8b, num_layers: 4}}"
            )
        name = self.name or made_up or f"{self.preset or 'llama'}-{sizes['num_layers']}x{sizes['hidden_size']}"
        shape = ModelShape(**{**sizes, "name": name})
        # A preset's own name belongs to its own sizes.
        if name in PRESETS and PRESETS[name] != shape:
            raise ValueError(f"name {name!r} is a preset of other sizes; two definitions need two names")
        return shape


def _preset(name: str) -> ModelShape:
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"no model preset is called {name[:80]!r}; presets: {', '.join(PRESETS)}; or give the sizes{hint}")
    return PRESETS[name]


def _as_sizes(value: Any) -> Any:
    if isinstance(value, str):
        return {"preset": value}
    if isinstance(value, ModelShape):
        return asdict(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is no model; write a preset ({', '.join(PRESETS)}) or a mapping of sizes")
    return value


def _model_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    sizes = core_schema.no_info_before_validator_function(_as_sizes, handler.generate_schema(ModelSizes))
    return core_schema.no_info_after_validator_function(
        ModelSizes.shape, sizes, serialization=core_schema.plain_serializer_function_ser_schema(asdict)
    )


Model = Annotated[
    ModelShape, GetPydanticSchema(_model_schema), WithJsonSchema({"anyOf": [{"enum": list(PRESETS)}, ModelSizes.model_json_schema()]})
]


class Axes(Section):
    """The values each part of a layout may take. `auto`: every value that the cell allows, which are divisors of its GPUs and its batch."""

    data_parallel_size: OrAuto[Some[Count]] = "auto"
    micro_batch_size: OrAuto[Some[Count]] = "auto"
    grad_accum_steps: OrAuto[Some[Count]] = "auto"
    recompute: OrAuto[Some[RecomputeChoice]] = "auto"
    zero_stage: OrAuto[Some[Annotated[int, Field(strict=True, ge=0, le=3)]]] = (0,)
    tensor_parallel_size: OrAuto[Some[Count]] = (1,)
    pipeline_parallel_size: OrAuto[Some[Count]] = (1,)
    context_parallel_size: OrAuto[Some[Count]] = (1,)
    options: Annotated[Mapping[OptionName, OptionValues], BeforeValidator(few_options)] = {}  # of the workload

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the options where there are none: a stored sweep reads as it did before there could be any."""
        return {name: value for name, value in write(self).items() if name != "options" or value}


class Limits(Section):
    """Seconds a rank may stay in each phase before it counts as hung. `auto` follows the time of a step: core/trial/limits.py."""

    start: OrAuto[Duration] = "auto"
    rendezvous: OrAuto[Duration] = "auto"
    first_step: OrAuto[Duration] = "auto"
    steady: OrAuto[Duration] = "auto"  # from one step to the next
    teardown: OrAuto[Duration] = "auto"
    total: OrAuto[Duration] = "auto"

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

    warmup_steps: Annotated[int, Field(strict=True, ge=2, le=1000)] = (
        3  # "it fits" needs two optimizer steps: the states appear in the first
    )
    min_steps: Annotated[int, Field(strict=True, ge=2, le=1000)] = 5
    max_steps: Annotated[int, Field(strict=True, ge=2, le=10_000)] = 50
    precision: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.02  # relative half-width of the median's 95 % interval
    limits: Limits = Limits()
    exclusive: Exclusive = Exclusive.NONE
    preflight: Annotated[bool, Field(strict=True)] = True  # look at a node before its first trial
    wait_for_nodes: Duration = WAIT_FOR_NODES_SECONDS  # that are gone, so that too few are left

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what nobody asked for: a stored sweep reads as it did before it could be asked for."""
        unasked = {"exclusive": Exclusive.NONE, "preflight": True, "wait_for_nodes": WAIT_FOR_NODES_SECONDS}
        return {name: value for name, value in write(self).items() if name not in unasked or value != unasked[name]}

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is more than max_steps {self.max_steps}")
        return self

    @property
    def plan(self) -> MeasurementPlan:
        return MeasurementPlan(
            warmup_steps=self.warmup_steps, min_steps=self.min_steps, max_steps=self.max_steps, relative_confidence=self.precision
        )

    def limits_of(self, *, num_ranks: int, predicted: PredictedStep | None) -> PhaseLimits:
        """The time limits of one attempt, of whose steps so much is predicted; None: nothing."""
        return resolve_limits(self.limits.asked, plan=self.plan, num_ranks=num_ranks, predicted=predicted)


class Strategy(StrEnum):
    AUTO = "auto"  # what should gain most per GPU-second, by physics and by what the cell has shown
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    TPE = "tpe"
    GP = "gp"


class Plateau(Section):
    """Stop a cell when its last `trials` finished trials brought less than `gain` over the best before them."""

    trials: Annotated[int, Field(strict=True, ge=1)] = 20
    gain: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.01


ANCHOR_EVERY = 8


class Confirm(Section):
    """Measure the fastest layouts of a cell again once its search has ended: a winner is one whose interval stands apart."""

    contenders: Annotated[int, Field(strict=True, ge=1, le=64)] = 3  # that take part, as far as they cannot be told apart
    repeats: Annotated[int, Field(strict=True, ge=0, le=32)] = 2  # of each at most, beside its first run; 0: none


class Search(Section):
    """How the next layout is chosen, and when to stop. Budgets count what is spent, failures included."""

    strategy: Strategy = Strategy.AUTO
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 32)] = 0
    max_trials: Annotated[int, Field(strict=True, ge=1)] | None = None  # launches per cell
    max_gpu_hours: Annotated[float, Field(strict=True, gt=0)] | None = None  # of the sweep
    max_cost: Annotated[float, Field(strict=True, gt=0)] | None = None  # of the sweep, in US dollars
    max_wall_time: Duration | None = None  # of one `sweep run`
    max_parallel_trials: OrAuto[Annotated[int, Field(strict=True, ge=1, le=4096)]] = "auto"  # auto: as many as fit; on a CPU machine, one
    plateau: Plateau | None = None
    bound: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None  # expected gain below which a cell is done; with strategy auto
    confirm: Confirm = Confirm()
    # Measured trials of a cell; 0: never.
    anchor_every: Annotated[int, Field(strict=True, ge=0, le=10_000)] = ANCHOR_EVERY
    dominance: OrAuto[Dominance] = (
        "auto"  # what out-of-memories rule out; auto: trusted where the trainer's memory is known, else confirmed
    )

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what nobody asked for: a stored sweep reads as it did before it could be asked for."""
        unasked = {"max_cost": None, "anchor_every": ANCHOR_EVERY, "dominance": "auto"}
        return {name: value for name, value in write(self).items() if name not in unasked or value != unasked[name]}


class Objective(StrEnum):
    TOKENS_PER_SECOND_PER_GPU = "tokens_per_second_per_gpu"
    STEP_SECONDS = "step_seconds"


def batch_mistake(sequences_given: bool, tokens_given: bool) -> str | None:
    """The global batch is said once, in one of two units."""
    if sequences_given and tokens_given:
        return "global_batch_tokens stands beside global_batch_size: give one of them"
    if not sequences_given and not tokens_given:
        return "the global batch is required: give global_batch_size (sequences) or global_batch_tokens (tokens, 4M)"
    return None


def _device(value: str) -> str:
    if value not in ("auto", "cpu", *DEVICES):
        asked = value.strip().lower()
        known = from_driver_name(value)
        names = ("auto", "cpu", *DEVICES)
        begun = [name for name in names if asked and name.startswith(asked)]
        close = [known.name] if known is not None else begun or get_close_matches(asked, DEVICES, n=1)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"{value!r} is not one of {', '.join(names)}{hint}")
    return value


class SweepSpec(Section):
    """One sweep file. Model, GPUs, sequence length and global batch may be lists: each combination is a cell with a best of its own."""

    name: Name
    model: Annotated[tuple[Model, ...], BeforeValidator(as_list), BeforeValidator(few), Field(min_length=1), OneWithoutItsList()]
    sequence_length: Some[Length]
    global_batch_size: Some[Count] | None = None  # in sequences
    global_batch_tokens: Some[Tokens] | None = None
    precision: Some[Precision] = (Precision.BF16,)
    gpus: Some[Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]]
    gpus_per_node: OrAuto[Annotated[int, Field(strict=True, ge=1, le=1024)]] = "auto"
    device: Annotated[str, AfterValidator(_device), WithJsonSchema({"enum": ["auto", "cpu", *DEVICES]})] = "auto"
    device_memory_gib: Annotated[float, Field(strict=True, gt=0, le=4096)] | None = None  # None: the device's own
    price_per_gpu_hour: Annotated[float, Field(strict=True, gt=0, le=10_000)] | None = None  # US dollars; None: the device's list price
    axes: Axes = Axes()
    tensor_parallel_across_nodes: Annotated[bool, Field(strict=True)] = False
    constraints: Annotated[tuple[Constraint, ...], BeforeValidator(as_list), BeforeValidator(few), OneWithoutItsList()] = ()
    measurement: Measuring = Measuring()
    search: Search = Search()
    objective: Objective = Objective.TOKENS_PER_SECOND_PER_GPU
    workload: WorkloadChoice = LlamaWorkload()
    trainer: TrainerChoice | None = None

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the trainer where none is named: a stored sweep reads as it did before there could be one."""
        return {name: value for name, value in write(self).items() if name != "trainer" or value is not None}

    @model_validator(mode="after")
    def _traced_in_its_precision(self) -> Self:
        if self.trainer is not None and self.trainer.activations is not None and len(self.precision) > 1:
            raise ValueError(
                f"trainer.activations are of one precision, and precision has {len(self.precision)}: keep one, or leave activations out"
            )
        return self

    @model_validator(mode="after")
    def _cells_exist(self) -> Self:
        if mistake := batch_mistake(self.global_batch_size is not None, self.global_batch_tokens is not None):
            raise ValueError(mistake)
        batches = len(self.global_batch_size or self.global_batch_tokens or ())
        num_cells = len(self.model) * len(self.gpus) * len(self.sequence_length) * batches
        if num_cells > MAX_CELLS:
            raise ValueError(f"model x gpus x sequence_length x global batch make {num_cells:,} cells; at most {MAX_CELLS:,}")
        for tokens, length in product(self.global_batch_tokens or (), self.sequence_length):
            if tokens % length:
                raise ValueError(
                    f"global_batch_tokens {tokens} is not a multiple of sequence_length {length}: the batch is exact, never rounded"
                )
        names = [m.name for m in self.model]
        if len(set(names)) != len(names):
            raise ValueError(f"model names {', '.join(names)}: one stands twice; two definitions need two names")
        if isinstance(self.gpus_per_node, int):
            for gpus in self.gpus:
                if gpus > self.gpus_per_node and gpus % self.gpus_per_node:
                    raise ValueError(f"gpus {gpus} are not whole nodes of {self.gpus_per_node} (gpus_per_node)")
        return self

    @field_validator("constraints", mode="before")
    @classmethod
    def _naming_options(cls, value: Any, info: ValidationInfo) -> Any:
        """Constraints may name the options that are axes."""
        axes = info.data.get("axes")
        if axes is None or not axes.options:
            return value
        varying = tuple(axes.options.items())
        return [Unread(each, varying) for each in (value if isinstance(value, (list, tuple)) else [value])]

    @model_validator(mode="after")
    def _options_mean_something(self) -> Self:
        if mistakes := option_mistakes(self.workload, self.axes.options):
            raise ValidationError.from_exception_data(
                type(self).__name__,
                [
                    InitErrorDetails(type=PydanticCustomError("value_error", "{error}", {"error": said}), loc=place, input=None)
                    for place, said in mistakes
                ],
            )
        return self

    @model_validator(mode="after")
    def _bound_has_a_model(self) -> Self:
        if self.search.bound is not None and self.search.strategy is not Strategy.AUTO:
            raise ValueError(
                f"search.bound: strategy {self.search.strategy} expects nothing of a layout; only auto can tell what is to gain"
            )
        return self

    @model_validator(mode="after")
    def _cost_has_a_price(self) -> Self:
        """Refuse `max_cost` where no price is known; the price of device `auto` is known on the machine."""
        known = (
            self.price_per_gpu_hour is not None
            or self.device == "auto"
            or (self.device in DEVICES and DEVICES[self.device].price_per_hour is not None)
        )
        if self.search.max_cost is not None and not known:
            raise ValueError(f"search.max_cost: device {self.device} has no list price; give price_per_gpu_hour, in US dollars")
        return self

    @model_validator(mode="after")
    def _workload_can(self) -> Self:
        if mistake := workload_mistake(self.workload, precisions=self.precision, device=self.device):
            raise ValueError(mistake)
        return self

    def cells(self) -> tuple[Cell, ...]:
        """Every model x GPU count x sequence length x global batch, in the file's order."""
        return tuple(
            Cell(model=model, num_gpus=gpus, sequence_length=length, global_batch_size=batch)
            for model, gpus, length in product(self.model, self.gpus, self.sequence_length)
            for batch in (self.global_batch_size or [tokens // length for tokens in self.global_batch_tokens or ()])
        )

    def remarks(self) -> tuple[str, ...]:
        """Settings of the file that the sweep ignores, a sentence each."""
        if self.search.plateau is not None and self.search.strategy is Strategy.EXHAUSTIVE:
            return ("search.plateau is ignored: strategy exhaustive measures every layout; leave one of the two out",)
        return ()

    @property
    def dominance(self) -> Dominance:
        """The proof that an out-of-memory needs: as the file says, else by whether the memory of the trainer is known."""
        asked = self.search.dominance
        if isinstance(asked, Dominance):
            return asked
        return Dominance.TRUSTED if self.knows_memory is not None else Dominance.CONFIRMED

    @property
    def knows_memory(self) -> str | None:
        """Why layouts are known to need more memory than others; None: the program is somebody else's, and nothing is declared of it."""
        if self.trainer is not None:
            return "the file declares its trainer"
        return f"workload {self.workload.name} is our own" if self.workload.name in OUR_OWN else None

    def conditions(self) -> dict[str, Any]:
        """What makes numbers incomparable when it changes. Axes, budgets, cells and limits are not among it."""
        return {
            "workload": self.workload.name,
            **{f"workload.options.{name}": value for name, value in self.workload.options.conditions().items()},
            "warmup_steps": self.measurement.warmup_steps,
            "objective": str(self.objective),
            "device": self.device,
            "gpus_per_node": self.gpus_per_node,
            "device_memory_gib": self.device_memory_gib,
        }
