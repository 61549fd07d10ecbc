"""The experiment that a sweep file describes, with the rules that concern several sections.

It holds values only. `spec_yaml` reads the text, `space` lists the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES, from_driver_name
from orchestrator.core.problem.layout import NAMED_AXES, Precision
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.axes_section import Axes
from orchestrator.core.sweepfile.constraint import Constraint, UnparsedConstraint
from orchestrator.core.sweepfile.measurement_section import Measuring
from orchestrator.core.sweepfile.mirror_section import MirrorSection
from orchestrator.core.sweepfile.model_section import Model
from orchestrator.core.sweepfile.notify_section import NotifyTargets
from orchestrator.core.sweepfile.objective import Objective, ranked_by
from orchestrator.core.sweepfile.objective_mistakes import objective_mistake
from orchestrator.core.sweepfile.option_mistakes import Mistake, option_mistakes
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.core.sweepfile.spec_values import (
    AlsoSingleValue,
    Count,
    Flag,
    Length,
    Name,
    OneOrMore,
    OrAuto,
    Section,
    Some,
    Tokens,
    as_list,
    few,
    key,
    whole,
)
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.sweepfile.template import text_of
from orchestrator.core.sweepfile.trainer_section import TrainerChoice
from orchestrator.core.sweepfile.workload_section import (
    LlamaWorkload,
    WorkloadChoice,
    workload_mistake,
)
from orchestrator.core.trial.merit import Merit

MAX_GPUS = 16_384
MAX_CELLS = 1024
OUR_OWN = frozenset({"llama", "synthetic"})  # workloads with known memory
_DEVICE_NAMES = ("auto", "cpu", *DEVICES)


def batch_mistake(sequences_given: bool, tokens_given: bool) -> str | None:
    """Return what is wrong if the global batch is not given exactly once, in one of two units."""
    if sequences_given and tokens_given:
        return "global_batch_tokens and global_batch_size are both given: keep one of them"
    if not sequences_given and not tokens_given:
        return (
            "the global batch is required: give global_batch_size (sequences)"
            " or global_batch_tokens (tokens, 4M)"
        )
    return None


# What people write for the GPUs of the machine that they are on.
_WORDS_FOR_THIS_MACHINE = frozenset({"cuda", "gpu", "nvidia"})


def _device(value: str) -> str:
    if value not in _DEVICE_NAMES:
        asked = value.strip().lower()
        known = from_driver_name(value)
        begun = [name for name in _DEVICE_NAMES if asked and name.startswith(asked)]
        of_here = ["auto"] if asked in _WORDS_FOR_THIS_MACHINE else []
        close = [known.name] if known is not None else begun or of_here
        hint = f"; did you mean {' or '.join(close)}?" if close else did_you_mean(asked, DEVICES)
        raise ValueError(f"{value!r} is not one of {', '.join(_DEVICE_NAMES)}{hint}")
    return value


class SweepSpec(Section):
    """One sweep file.

    Each combination of model, GPUs, sequence length and global batch is a cell with its own best
    layout.
    """

    OMITTED_DEFAULTS = frozenset({"trainer", "notify", "mirror"})

    name: Annotated[
        Name,
        key(
            "text",
            "Names the sweep in the store, and its folder: 1 to 63 of `a-z 0-9 . _ -`."
            " The same name continues the same sweep",
        ),
    ]
    model: Annotated[
        tuple[Model, ...],
        BeforeValidator(as_list),
        BeforeValidator(few),
        Field(min_length=1),
        AlsoSingleValue(),
        key("preset, sizes, or a list", "The model to train: [Models](#models)"),
    ]
    sequence_length: Annotated[
        Some[Length], key("number or list, `8K`", "Tokens per sequence. `8K` = 8 x 1024")
    ]
    global_batch_size: Annotated[
        Some[Count] | None,
        key(
            "number or list",
            "Sequences per optimizer step, over all GPUs; the same for every layout",
        ),
    ] = None
    global_batch_tokens: Annotated[
        Some[Tokens] | None,
        key(
            "number or list, `4M`",
            "The same in tokens, in place of `global_batch_size`; a multiple of"
            " `sequence_length`. `4M` = 4 x 2^20",
        ),
    ] = None
    precision: Annotated[
        Some[Precision],
        key(
            "`fp32`, `bf16`, `fp16`, `fp8`, or a list",
            "Precision of weights and matrix products. A list makes it an axis",
        ),
    ] = (Precision.BF16,)
    gpus: Annotated[
        Some[Annotated[int, whole(1, MAX_GPUS)]],
        key(
            "number or list",
            "GPUs per gang; on a machine without GPUs, cores. More than one node: whole nodes only",
        ),
    ]
    gpus_per_node: Annotated[
        OrAuto[Annotated[int, whole(1, 1024)]],
        key(
            "`auto`, a number",
            "`auto`: those of the cluster's largest node; `sweep plan` without a GPU assumes 8",
        ),
    ] = "auto"
    device: Annotated[
        str,
        AfterValidator(_device),
        WithJsonSchema({"enum": list(_DEVICE_NAMES)}),
        key(
            "`auto`, `cpu`, or a device",
            "Where to run, and whose data sheet the predictions use: [Devices](#devices)."
            " `auto`: GPUs if there are any",
        ),
    ] = "auto"
    device_memory_gib: Annotated[
        float | None,
        Field(strict=True, gt=0, le=4096),
        key("number", "Memory of one GPU for predictions, in place of the data sheet's"),
    ] = None
    price_per_gpu_hour: Annotated[
        float | None,
        Field(strict=True, gt=0, le=10_000),
        key(
            "number",
            "Your price in US dollars, for the costs in `sweep plan` and for `search.max_cost`."
            " Default: the [list price](#devices)",
        ),
    ] = None
    axes: Annotated[Axes, key("section", "What may vary: [axes](#axes)")] = Axes()
    tensor_parallel_across_nodes: Annotated[
        Flag, key("`true`, `false`", "Allow tensor-parallel groups larger than a node")
    ] = False
    constraints: Annotated[
        tuple[Constraint, ...],
        BeforeValidator(as_list),
        BeforeValidator(few),
        AlsoSingleValue(),
        key("expression or list", "Conditions on legal layouts: [constraints](#constraints)"),
    ] = ()
    measurement: Annotated[
        Measuring, key("section", "How steps are timed: [measurement](#measurement)")
    ] = Measuring()
    search: Annotated[
        Search, key("section", "What to try next, and when to stop: [search](#search)")
    ] = Search()
    objective: Annotated[
        OneOrMore[Objective],
        key(
            "`tokens_per_second_per_gpu`, `step_seconds`, `memory_headroom`,"
            " `dollars_per_billion_tokens`, `joules_per_token`, or a list",
            "What to optimise: `tokens_per_second_per_gpu` and `memory_headroom` are maximised, the"
            " others minimised. Of a list, the search looks for the"
            " [front](search.md#several-objectives)",
        ),
    ] = (Objective.TOKENS_PER_SECOND_PER_GPU,)
    workload: Annotated[
        WorkloadChoice,
        key(
            "`llama`, `synthetic`, `command`, `replay`, or a section",
            "The program that ranks run: [workloads.md](workloads.md)",
        ),
    ] = LlamaWorkload()
    trainer: Annotated[
        TrainerChoice | None,
        key("a name, or a section", "Facts about the program's memory: [trainer](#trainer)"),
    ] = None
    notify: Annotated[
        NotifyTargets,
        AlsoSingleValue(),
        key("section or list", "Who gets messages about the sweep: [notify](#notify)"),
    ] = ()
    mirror: Annotated[
        MirrorSection | None,
        key("section", "Trackers that get a copy of each result: [mirror](#mirror)"),
    ] = None

    @field_validator("constraints", mode="before")
    @classmethod
    def _naming_options(cls, value: Any, info: ValidationInfo) -> Any:
        """Let constraints name the options that are axes."""
        axes = info.data.get("axes")
        if axes is None or not axes.options:
            return value
        varying = tuple(axes.options.items())
        given = value if isinstance(value, (list, tuple)) else [value]
        return [UnparsedConstraint(each, varying) for each in given]

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        """Check the rules that concern several sections, and tell every mistake at once."""
        mistakes = [
            *self._trace_mistakes(),
            *self._cell_mistakes(),
            *option_mistakes(self.workload, self.axes.options),
            *self._bound_mistakes(),
            *self._cost_mistakes(),
            *self._objective_mistakes(),
            *self._ability_mistakes(),
        ]
        if not mistakes:
            return self
        details = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{error}", {"error": message}),
                loc=place,
                input=None,
            )
            for place, message in mistakes
        ]
        raise ValidationError.from_exception_data(type(self).__name__, details)

    def _trace_mistakes(self) -> Iterator[Mistake]:
        traced = self.trainer is not None and self.trainer.activations is not None
        if traced and len(self.precision) > 1:
            yield (
                (),
                "trainer.activations are of one precision, and precision has"
                f" {len(self.precision)}: keep one, or leave activations out",
            )

    def _cell_mistakes(self) -> Iterator[Mistake]:
        if mistake := batch_mistake(
            self.global_batch_size is not None, self.global_batch_tokens is not None
        ):
            yield (), mistake
        batches = len(self.global_batch_size or self.global_batch_tokens or ())
        num_cells = len(self.model) * len(self.gpus) * len(self.sequence_length) * batches
        if num_cells > MAX_CELLS:
            yield (
                (),
                f"model x gpus x sequence_length x global batch make {num_cells:,} cells;"
                f" at most {MAX_CELLS:,}",
            )
        for tokens, length in product(self.global_batch_tokens or (), self.sequence_length):
            if tokens % length:
                yield (
                    (),
                    f"global_batch_tokens {tokens} is not a multiple of sequence_length {length}:"
                    " the batch is exact, never rounded",
                )
        names = [m.name for m in self.model]
        if len(set(names)) != len(names):
            yield (
                (),
                f"model names {', '.join(names)}: one appears twice; two definitions need two"
                " names",
            )
        if isinstance(self.gpus_per_node, int):
            for gpus in self.gpus:
                if gpus > self.gpus_per_node and gpus % self.gpus_per_node:
                    yield (
                        (),
                        f"gpus {gpus} are not whole nodes of {self.gpus_per_node} (gpus_per_node)",
                    )

    def _bound_mistakes(self) -> Iterator[Mistake]:
        if self.search.bound is not None and self.search.strategy is not Strategy.AUTO:
            yield (
                ("search", "bound"),
                f"strategy {self.search.strategy} predicts no gain of a layout;"
                " use strategy auto, or leave search.bound out",
            )

    def _cost_mistakes(self) -> Iterator[Mistake]:
        """Refuse `max_cost` if no price is known."""
        if self.search.max_cost is not None and not self._may_have_a_price:
            yield (
                ("search", "max_cost"),
                f"device {self.device} has no list price; give price_per_gpu_hour, in US dollars",
            )

    def _objective_mistakes(self) -> Iterator[Mistake]:
        if mistake := objective_mistake(
            self.objective, self.search, workload=self.workload.name, device=self.device
        ):
            yield ("objective",), mistake
        if Objective.DOLLARS_PER_BILLION_TOKENS in self.objective and not self._may_have_a_price:
            yield (
                ("objective",),
                f"{Objective.DOLLARS_PER_BILLION_TOKENS}: device {self.device} has no list price;"
                " give price_per_gpu_hour, in US dollars",
            )

    def _ability_mistakes(self) -> Iterator[Mistake]:
        if mistake := workload_mistake(
            self.workload, precisions=self.precision, device=self.device
        ):
            yield (), mistake

    def cells(self) -> tuple[Cell, ...]:
        """Every model x GPU count x sequence length x global batch, in the file's order."""
        tokens = self.global_batch_tokens or ()
        return tuple(
            Cell(model=model, num_gpus=gpus, sequence_length=length, global_batch_size=batch)
            for model, gpus, length in product(self.model, self.gpus, self.sequence_length)
            for batch in self.global_batch_size or [number // length for number in tokens]
        )

    def template_values(self) -> dict[str, tuple[str, ...]]:
        """The values that the file gives to names in a command's templates.

        Empty for those that follow from the layout, or that only a rank knows.
        """
        axes = self.axes
        given: dict[str, Any] = {name: getattr(axes, name, "auto") for name in NAMED_AXES}
        given |= {
            "precision": self.precision,
            "world_size": self.gpus,
            "sequence_length": self.sequence_length,
            "global_batch_size": self.global_batch_size or (),
            "seed": (self.search.seed,),
            **axes.options,
        }
        return {
            name: () if values == "auto" else tuple(map(text_of, values))
            for name, values in given.items()
        }

    def remarks(self) -> tuple[str, ...]:
        """Settings of the file that the sweep ignores, a sentence each."""
        if self.search.plateau is not None and self.search.strategy is Strategy.EXHAUSTIVE:
            return (
                "search.plateau is ignored: strategy exhaustive measures every layout;"
                " leave one of the two out",
            )
        return ()

    @property
    def _may_have_a_price(self) -> bool:
        """False if no price is known. That of device `auto` is known at run time."""
        return (
            self.price_per_gpu_hour is not None
            or self.device == "auto"
            or (self.device in DEVICES and DEVICES[self.device].price_per_hour is not None)
        )

    @property
    def ranked_by(self) -> Objective:
        """The objective by which `sweep best` ranks, one of speed."""
        return ranked_by(self.objective)

    @property
    def merits(self) -> tuple[Merit, ...]:
        """The merits by which the layouts of a cell are compared, each once."""
        return tuple(dict.fromkeys(one.merit for one in self.objective))

    @property
    def dominance(self) -> Dominance:
        """The proof that an out-of-memory needs before it excludes other layouts."""
        asked = self.search.dominance
        if isinstance(asked, Dominance):
            return asked
        return Dominance.TRUSTED if self.knows_memory is not None else Dominance.CONFIRMED

    @property
    def sums_shards(self) -> bool:
        """True if replicas may sum up what ZeRO shards: option `replicas` of workload llama."""
        given = [
            self.workload.options.conditions().get("replicas"),
            *self.axes.options.get("replicas", ()),
        ]
        return self.workload.name == "llama" and any(value not in (None, 1) for value in given)

    @property
    def knows_memory(self) -> str | None:
        """Why the program's memory is known; None for a foreign program without a `trainer`."""
        if self.trainer is not None:
            return "the file declares its trainer"
        name = self.workload.name
        return f"workload {name} is our own" if name in OUR_OWN else None

    def conditions(self) -> dict[str, Any]:
        """The conditions of numbers: they cannot be compared if one of these changes."""
        options = self.workload.options.conditions()
        return {
            "workload": self.workload.name,
            **{f"workload.options.{name}": value for name, value in options.items()},
            "warmup_steps": self.measurement.warmup_steps,
            "objective": ", ".join(self.objective),
            "device": self.device,
            "gpus_per_node": self.gpus_per_node,
            "device_memory_gib": self.device_memory_gib,
        }
