"""What each workload takes besides the layout, as a sweep file says it under `workload.options`.

The sweep file is checked by these models, a rank reads its request by them, and the documents are made of them. What the options
bring about is the workload's affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import SHORT_NAMES, Layout, Options, Precision
from orchestrator.core.sweepfile.spec_values import key
from orchestrator.core.sweepfile.template import well_formed
from orchestrator.core.trial.rank_environment import LAUNCHERS_OWN, is_secret_name

MAX_ENTRIES = 512  # of one list or mapping


class WorkloadOptions(BaseModel):
    """Written out again as it was written: a default that nobody wrote is not stored, so it may change its words without being a change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    MAY_VARY: ClassVar[frozenset[str] | None] = frozenset()
    """The options that may be axes (`axes.options`): what trains the same model in another way. None: the names are the user's own."""

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}

    def as_written(self) -> dict[str, Any]:
        """What the file said, in JSON's types."""
        return self.model_dump(mode="json")

    def conditions(self) -> dict[str, Any]:
        """What of it numbers depend on."""
        return self.as_written()


def _few(value: Any) -> Any:
    """Far too many are refused before any of them is looked at."""
    if isinstance(value, (list, tuple, Mapping)) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value):,} entries; at most {MAX_ENTRIES}")
    return value


PositiveInt = Annotated[int, Field(strict=True, gt=0, le=1 << 50)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, le=1e9)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]


# --- llama ----------------------------------------------------------------------------------------------------------------------


class AttentionKind(StrEnum):
    SDPA = "sdpa"  # scaled_dot_product_attention: flash where the device has it
    EAGER = "eager"  # the score matrix is written out, as before FlashAttention


class GradientDtype(StrEnum):
    BF16 = "bf16"  # 16 bytes a parameter in all
    FP32 = "fp32"  # 20 bytes a parameter in all


class TokenDtype(StrEnum):
    UINT16 = "uint16"
    UINT32 = "uint32"


class LlamaOptions(WorkloadOptions):
    """Options of workload llama."""

    MAY_VARY = frozenset({"attention", "gradient_dtype", "num_threads"})

    attention: Annotated[
        AttentionKind,
        key(
            "`sdpa`, `eager`",
            "torch's scaled_dot_product_attention (flash where the device has it), or the scores written out",
        ),
    ] = AttentionKind.SDPA
    gradient_dtype: Annotated[
        GradientDtype,
        key(
            "`bf16`, `fp32`",
            "With bf16 training: gradients kept in bf16, or accumulated in fp32 (16 or 20 bytes per parameter in all)",
        ),
    ] = GradientDtype.BF16
    learning_rate: Annotated[PositiveFloat, key("number", "Of AdamW, constant")] = 3e-4
    token_file: Annotated[
        str | None,
        Field(min_length=1),
        key("path", "A flat file of token ids; without it, synthetic tokens"),
    ] = None
    token_dtype: Annotated[TokenDtype, key("`uint16`, `uint32`", "Of that file")] = (
        TokenDtype.UINT16
    )
    num_threads: Annotated[
        PositiveInt, key("number", "Of one rank, on a machine without GPUs, where a slot is a core")
    ] = 1
    memory_limit_bytes: Annotated[
        PositiveInt | None,
        key("number", "On a CPU: run out of memory as a device of this size would"),
    ] = None


# --- synthetic ------------------------------------------------------------------------------------------------------------------


class FaultKind(StrEnum):
    OOM = "oom"
    HOST_OOM = "host_oom"
    CONFIG_REJECTED = "config_rejected"
    CRASH = "crash"
    EXIT = "exit"
    SEGFAULT = "segfault"
    ABORT = "abort"
    NAN_LOSS = "nan_loss"
    PREEMPTED = "preempted"
    XID = "xid"
    LOST_RANK = "lost_rank"
    HANG = "hang"
    HANG_IN_C = "hang_in_c"
    HANG_IGNORING_SIGNALS = "hang_ignoring_signals"
    STOP = "stop"
    NCCL_NOISE = "nccl_noise"
    NCCL_ERROR = "nccl_error"
    PORT_CLASH = "port_clash"
    RUBBISH_RESULT = "rubbish_result"
    NO_RESULT = "no_result"
    LEAK_CHILDREN = "leak_children"
    LEAK_UNMARKED_CHILD = "leak_unmarked_child"
    LOG_FLOOD = "log_flood"


FAULTS: Mapping[FaultKind, str] = {
    FaultKind.OOM: "torch's out-of-memory error",
    FaultKind.HOST_OOM: "MemoryError",
    FaultKind.CONFIG_REJECTED: "the workload refuses the layout",
    FaultKind.CRASH: "an exception",
    FaultKind.EXIT: "exit code 1, no word said",
    FaultKind.SEGFAULT: "SIGSEGV",
    FaultKind.ABORT: "SIGABRT",
    FaultKind.NAN_LOSS: "the loss is NaN",
    FaultKind.PREEMPTED: "SIGTERM",
    FaultKind.XID: "the driver's Xid 79 in the log, and a CUDA error",
    FaultKind.LOST_RANK: "SIGKILL",
    FaultKind.HANG: "sleeps for ever",
    FaultKind.HANG_IN_C: "hangs without giving the interpreter back",
    FaultKind.HANG_IGNORING_SIGNALS: "hangs, and ignores every signal that can be ignored",
    FaultKind.STOP: "SIGSTOP",
    FaultKind.NCCL_NOISE: "harmless NCCL words in the log",
    FaultKind.NCCL_ERROR: "an NCCL error",
    FaultKind.PORT_CLASH: "an address already in use",
    FaultKind.RUBBISH_RESULT: "a result that is none",
    FaultKind.NO_RESULT: "ends well, without a result",
    FaultKind.LEAK_CHILDREN: "leaves a child, a grandchild, daemons and loader workers behind",
    FaultKind.LEAK_UNMARKED_CHILD: "leaves a child in a session of its own, with an empty environment",
    FaultKind.LOG_FLOOD: "prints 30 MB",
}


_FAULT_AT = re.compile(r"init|forward|teardown|step_[1-9]\d{0,8}")
LAYOUT_NAMES = (*(field.name for field in fields(Layout)), "world_size", "global_batch_size")


def _at(value: str) -> str:
    if not _FAULT_AT.fullmatch(value):
        close = get_close_matches(value[:80], ("init", "forward", "step_1", "teardown"), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"{value[:80]!r} is not one of init, forward, step_N (step_3), teardown{hint}"
        )
    return value


def _only_if(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(
            "only_if takes fields of a layout with their values: {micro_batch_size: 8, recompute: none}"
        )
    for name, wanted in value.items():
        if name not in LAYOUT_NAMES:
            close = (
                [SHORT_NAMES[name]]
                if name in SHORT_NAMES
                else get_close_matches(str(name)[:80], LAYOUT_NAMES, n=1)
            )
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"{str(name)[:80]!r} is no field of a layout; those are {', '.join(LAYOUT_NAMES)}{hint}"
            )
        if isinstance(wanted, bool) or not isinstance(wanted, (int, str)):
            raise ValueError(f"{name} takes one number or word, not {str(wanted)[:80]!r}")
    return value


class SyntheticFault(WorkloadOptions):
    """One fault of a run. `at` is init, forward, step_N or teardown; it strikes on `rank`, or on every rank."""

    fault: FaultKind
    at: Annotated[
        str,
        AfterValidator(_at),
        WithJsonSchema({"type": "string", "pattern": f"^({_FAULT_AT.pattern})$"}),
    ] = "forward"
    rank: Annotated[int, Field(strict=True, ge=0)] | None = None
    only_if: Annotated[
        Mapping[str, int | str], BeforeValidator(_only_if)
    ] = {}  # fields of the layout, with their values
    probability: Fraction = 1.0  # drawn once per attempt, from the seed
    first_attempt_only: Flag = False


class DriftKind(StrEnum):
    SLOW_START = "slow_start"
    STEP = "step"
    WAVE = "wave"
    SLOW_NODE = "slow_node"


DRIFTS: Mapping[DriftKind, str] = {
    DriftKind.SLOW_START: "steps take `1 + size` times as long until `seconds` have passed",
    DriftKind.STEP: "the same from `seconds` on; a negative `size` is faster",
    DriftKind.WAVE: "slower and back again within every `seconds`, by `size` at most",
    DriftKind.SLOW_NODE: "gangs with this `node` take `1 + size` times as long, always",
}


class SyntheticDrift(WorkloadOptions):
    """A change of the machine's speed, by the seconds since the call of `sweep run` began, on `node` or everywhere."""

    kind: DriftKind
    # Relative: 0.6 is 1.6 times as long.
    size: Annotated[float, Field(strict=True, gt=-0.9, le=10.0)]
    seconds: PositiveFloat = 600.0
    node: Annotated[str, Field(strict=True, min_length=1, max_length=255)] | None = (
        None  # as the scheduler calls it
    )

    @model_validator(mode="after")
    def _has_its_node(self) -> Self:
        if self.kind is DriftKind.SLOW_NODE and self.node is None:
            raise ValueError(
                "slow_node needs the node that is slow: {kind: slow_node, size: 0.3, node: node-1}"
            )
        return self


def _device_name(value: str) -> str:
    if value not in DEVICES:
        close = [name for name in DEVICES if name.startswith(value)] or get_close_matches(
            value[:80], DEVICES, n=1
        )
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{value[:80]!r} is not one of {', '.join(DEVICES)}{hint}")
    return value


class SyntheticOptions(WorkloadOptions):
    """Options of workload synthetic."""

    MAY_VARY = frozenset({"time_scale", "sleep"})

    device_name: Annotated[
        str,
        AfterValidator(_device_name),
        WithJsonSchema({"enum": list(DEVICES)}),
        key("device", "Which device to act as, by its name in the table of devices"),
    ] = "h100-sxm"
    device_memory_bytes: Annotated[
        PositiveInt | None, key("number", "Its memory, in place of the data sheet's")
    ] = None
    noise: Annotated[
        Fraction, key("fraction", "Standard deviation of the logarithm of a step's time")
    ] = 0.02
    time_scale: Annotated[PositiveFloat, key("number", "Multiplies step times")] = 1.0
    sleep: Annotated[
        Flag,
        key(
            "`true`, `false`",
            "Take the time that is reported; without it a trial takes milliseconds",
        ),
    ] = False
    one_rank_per_node: Annotated[
        Flag, key("`true`, `false`", "One process stands for all ranks of a node")
    ] = False
    faults: Annotated[
        tuple[SyntheticFault, ...], BeforeValidator(_few), key("list", "What goes wrong, below")
    ] = ()
    drift: Annotated[
        tuple[SyntheticDrift, ...],
        BeforeValidator(_few),
        key("list", "How the machine's speed changes meanwhile, below"),
    ] = ()

    def conditions(self) -> dict[str, Any]:
        """How many processes stand for the ranks changes no number: all of them draw the same noise."""
        return {
            name: value for name, value in self.as_written().items() if name != "one_rank_per_node"
        }


# --- command --------------------------------------------------------------------------------------------------------------------

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_PATTERN = re.compile(r"(?:[A-Za-z_]|\*)[A-Za-z0-9_*]{0,254}")


def _variable(name: str) -> str:
    """A name under which a sweep file may give ranks a value. What is no name may be a secret, written in its place: it is not repeated."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            "this is no name of an environment variable: letters, digits and _, no digit first, nothing else"
        )
    if name in LAUNCHERS_OWN or name.startswith("SWEEP_"):
        raise ValueError(f"{name} is set for each rank by its launcher; leave it out")
    return name


def _names_only(value: Any) -> Any:
    """Whatever is refused here may be a secret, written where only its name belongs: no message repeats it."""
    rule = "names of environment variables only, [HF_TOKEN]: the values are taken from the environment of `sweep run`"
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"expected a list of {rule}")
    for number, name in enumerate(value, 1):
        try:
            _variable(name)
        except ValueError as exc:
            raise ValueError(f"entry {number}: {exc}; expected {rule}") from None
        if name in value[: number - 1]:
            raise ValueError(f"{name} stands twice in the list")
    return value


def _name_or_pattern(value: str) -> str:
    """A name, or a beginning or end with `*`, of variables that ranks get."""
    if "*" not in value:
        if is_secret_name(_variable(value)):
            raise ValueError(
                f"{value} looks like a secret: name it in env_from, whose values are kept out of the store and the logs"
            )
    elif not _PATTERN.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no pattern of names: letters, digits, _ and *, as in MY_*"
        )
    return value


def _absolute(value: str) -> str:
    if not value.startswith(("/", "{run_dir}")):
        raise ValueError(
            f"{value[:80]!r} is relative, and ranks start in run directories of their own: give the absolute path"
        )
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError(
            "control character '\\x00' in a text"
        )  # as a sweep file's door says it, so that it is told once
    return value


Variable = Annotated[str, AfterValidator(_variable)]
Template = Annotated[str, AfterValidator(_without_nul), AfterValidator(well_formed)]


class CommandOptions(WorkloadOptions):
    """Options of workload command."""

    MAY_VARY = None  # they are names that templates may hold

    argv: Annotated[
        tuple[Template, ...],
        BeforeValidator(_few),
        Field(min_length=1),
        key("list of texts", "The program and its arguments, with `{names}` filled in; no shell"),
    ]
    env: Annotated[
        Mapping[Variable, Template],
        BeforeValidator(_few),
        key(
            "mapping of texts",
            "Added to its environment, likewise. Stored as it stands: no secrets",
        ),
    ] = {}
    env_from: Annotated[
        tuple[str, ...],
        BeforeValidator(_names_only),
        BeforeValidator(_few),  # these run last to first
        key(
            "list of names",
            "Names of variables whose values ranks get from the environment of `sweep run`, and that are stored nowhere: secrets",
        ),
    ] = ()
    pass_env: Annotated[
        tuple[Annotated[str, AfterValidator(_name_or_pattern)], ...],
        BeforeValidator(_few),
        key(
            "list of names and patterns",
            "Names, or patterns as `MY_*`, of other variables that ranks get from the environment of `sweep run`."
            " A pattern passes nothing that looks like a secret",
        ),
    ] = ()
    cwd: Annotated[
        Annotated[Template, AfterValidator(_absolute)] | None,
        key("absolute path", "Its working directory; without it, the run directory"),
    ] = None

    def conditions(self) -> dict[str, Any]:
        """A token may change, and be added, without another sweep; so may what else the environment hands over."""
        return {
            name: value
            for name, value in self.as_written().items()
            if name not in ("env_from", "pass_env")
        }

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        for name in self.env_from:
            if name in self.env:
                raise ValueError(
                    f"env_from names {name}, and env gives it a value: keep one of them, env_from for a secret"
                )
        for name in self.pass_env:
            if name in self.env or name in self.env_from:
                raise ValueError(
                    f"pass_env names {name}, which env or env_from names as well: keep one of them"
                )
        return self


# --- replay ---------------------------------------------------------------------------------------------------------------------


class ReplayOptions(WorkloadOptions):
    """Options of workload replay."""

    MAY_VARY = None  # they are columns of the table

    table: Annotated[str, Field(min_length=1), key("path", "A CSV file of measured runs")]
    table_id: Annotated[
        str, Field(min_length=1), key("text", "Which of its tables: the value of column `table_id`")
    ]
    through_ray: Annotated[
        Flag,
        key(
            "`true`, `false`",
            "Start a process for each launch, as Ray places it; without it a launch takes no time at all",
        ),
    ] = False

    def conditions(self) -> dict[str, Any]:
        """Where the file lies, and how it is read, changes no number; what it says is in the fingerprint."""
        return {"table_id": self.table_id}


# --- which of them ----------------------------------------------------------------------------------------------------------------


_NAME = key("`llama`, `synthetic`, `command`, `replay`", "Which program")
_OPTIONS = key("mapping", "The program's own: [workloads.md](workloads.md)")


class _WorkloadSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LlamaWorkload(_WorkloadSection):
    """Ranks train a Llama in plain torch."""

    name: Annotated[Literal["llama"], _NAME] = "llama"
    options: Annotated[LlamaOptions, _OPTIONS] = LlamaOptions()


class SyntheticWorkload(_WorkloadSection):
    """Ranks train nothing: they obey a model of memory and time, and go wrong on request."""

    name: Annotated[Literal["synthetic"], _NAME]
    options: Annotated[SyntheticOptions, _OPTIONS] = SyntheticOptions()


class CommandWorkload(_WorkloadSection):
    """Ranks run any program."""

    name: Annotated[Literal["command"], _NAME]
    options: Annotated[CommandOptions, _OPTIONS]


class ReplayWorkload(_WorkloadSection):
    """Nothing runs: a trial returns what a table says that was measured."""

    name: Annotated[Literal["replay"], _NAME]
    options: Annotated[ReplayOptions, _OPTIONS]


# The program that ranks run, and what it takes besides the layout: the name says which options there are.
Workload = LlamaWorkload | SyntheticWorkload | CommandWorkload | ReplayWorkload
WORKLOADS: Mapping[str, type[Workload]] = MappingProxyType(
    {
        "llama": LlamaWorkload,
        "synthetic": SyntheticWorkload,
        "command": CommandWorkload,
        "replay": ReplayWorkload,
    }
)


def _section(value: Any) -> Any:
    """The name alone may stand for the section, and a section without a name is llama's."""
    if isinstance(value, str):
        return {"name": value, "options": {}}
    return {"name": "llama", "options": {}, **value} if isinstance(value, Mapping) else value


class _OrItsName:
    """Says in the JSON schema what `_section` does."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"enum": list(WORKLOADS)}, handler(schema)]}


WorkloadChoice = Annotated[Workload, Discriminator("name"), BeforeValidator(_section), _OrItsName()]


def workload_mistake(
    workload: Workload, *, precisions: Sequence[Precision], device: str
) -> str | None:
    """What the workload was told and can never do."""
    match workload:
        case SyntheticWorkload(options=options):
            able = DEVICES[options.device_name].peak_flops
            for precision in precisions:
                if precision not in able:
                    has = ", ".join(sorted(able))
                    return f"precision {precision} is none that {options.device_name} has (workload.options.device_name); it has {has}"
        case LlamaWorkload(options=options) if (
            options.memory_limit_bytes is not None and device not in ("auto", "cpu")
        ):
            return f"device {device} has a limit of its own; workload.options.memory_limit_bytes is for device cpu: leave it out"
    return None


# --- options that vary ----------------------------------------------------------------------------------------------------------


def options_of(workload: Workload, layout: Layout) -> dict[str, Any]:
    """What a trial of the layout is told: the sweep's options with those that vary on top. A command's are in its templates instead."""
    varying = dict(layout.options) if workload.options.MAY_VARY is not None else {}
    return {**workload.options.as_written(), **varying}


def varied(options: WorkloadOptions, varying: Options) -> WorkloadOptions:
    """The options with those that vary in place."""
    return (
        type(options).model_validate({**options.as_written(), **dict(varying)})
        if varying and options.MAY_VARY is not None
        else options
    )
