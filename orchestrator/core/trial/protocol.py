"""The messages between a node's launcher and a rank program, as values and text.

A rank gets torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT) and a run directory (SWEEP_RUN_DIR) with `request.json`. The rank writes a heartbeat,
each over the one before it, and at its end a result or a failure, under a temporary name that is
then renamed. A heartbeat may be read while it is still empty. A rank's files are untrusted text:
they are parsed here, with bounds, or refused as a bad result.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
)

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.trial.extra import bounded_extra
from orchestrator.core.trial.fingerprint import WITHOUT_NUL, Stack
from orchestrator.core.trial.message import Message
from orchestrator.core.trial.rank_profile import ProfilePlan, RankProfile

RUN_DIR_VARIABLE = "SWEEP_RUN_DIR"
# In the environment of every process that an attempt starts; leftovers are found by it.
ATTEMPT_VARIABLE = "SWEEP_ATTEMPT"
REQUEST_FILE = "request.json"
MAX_RESULT_BYTES = 1 << 20
MAX_SAMPLES = 10_000


def heartbeat_file(rank: int) -> str:
    return f"heartbeat-{rank}.json"


def result_file(rank: int) -> str:
    return f"result-{rank}.json"


def failure_file(rank: int) -> str:
    return f"failure-{rank}.json"


def log_file(rank: int) -> str:
    return f"log-{rank}.txt"


# The line above the stacks in a rank's log, which are written when its time is up.
STACKS_BEGIN = "--- where the processes of this rank are, now that its time is up ---"


class Phase(StrEnum):
    """The stage that a rank is in. Each phase has its own time limit."""

    START = "start"  # process start to `main`, with imports
    RENDEZVOUS = "rendezvous"  # builds process group, model, optimizer
    FIRST_STEP = "first_step"  # compilation, lazy NCCL, optimizer state
    STEADY = "steady"  # warm-up and timed steps, each limited
    TEARDOWN = "teardown"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


MAX_SECONDS = 1e7  # nothing takes longer than four months
Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_SECONDS)]
# No clock resolves less, and a division by it is finite.
PositiveSeconds = Annotated[float, Field(strict=True, ge=1e-9, le=MAX_SECONDS)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
Step = Annotated[int, Field(ge=0, le=10**9)]
ShortText = Annotated[str, Field(max_length=4000)]


class MeasurementPlan(Message):
    """The plan of a rank program: a warm-up, then timed steps until the median is precise."""

    warmup_steps: Annotated[int, Field(ge=1)]
    min_steps: Annotated[int, Field(ge=2)]
    max_steps: Annotated[int, Field(ge=2, le=MAX_SAMPLES)]
    # Half-width of the median's 95 % interval over the median.
    relative_confidence: Annotated[float, Field(gt=0)]
    # Work takes at least this long: in the warm-up after the first step, and in timed steps. This
    # may need more steps than `max_steps`.
    warmup_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    min_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    # The best layout's step time: a trial that cannot beat it is ended early. None: none is.
    beat_seconds: PositiveSeconds | None = None
    # A user's program is not ended before it could write more lines than it was asked for: their
    # number shows whether a line is one step.
    counts_lines: bool = False


class DriverMemoryKind(StrEnum):
    """The source of a peak of memory that the program did not report."""

    # Used on a device: the allocator's, and what it does not know of.
    NVML = "nvml"
    # Resident memory of the program's largest process.
    RSS = "rss"


class LimitName(StrEnum):
    """The parts of an attempt that have a time limit: each phase, and the whole."""

    START = "start"
    RENDEZVOUS = "rendezvous"
    FIRST_STEP = "first_step"
    STEADY = "steady"
    TEARDOWN = "teardown"
    TOTAL = "total"


class PhaseLimits(Message):
    """Seconds that a rank may stay in each phase; in `steady`, from one heartbeat to the next.

    `auto` limits have their values from before the first step.
    """

    start: PositiveSeconds
    rendezvous: PositiveSeconds
    first_step: PositiveSeconds
    steady: PositiveSeconds
    teardown: PositiveSeconds
    total: PositiveSeconds
    # Limits that follow the steps (core/trial/limits.py); the others are fixed.
    auto: tuple[LimitName, ...] = ()
    predicted_step_seconds: PositiveSeconds | None = None  # the longest; None: no prediction
    in_file: bool = True  # a sweep file sets them
    # Part of an `auto` first_step, since layers are compiled.
    compile_seconds: Seconds = 0.0


PositiveFlops = Annotated[float, Field(gt=0, le=1e18)]  # of one device, per second
# "table: ...", or MEASURED_PEAK with the method and the trial.
PeakSource = Annotated[str, Field(max_length=200, pattern=WITHOUT_NUL)]
MEASURED_PEAK = "measured: "


class KnownPeak(Message):
    """A device's peak that an earlier trial of the sweep measured, for all MFUs of that node."""

    node: str  # host name
    device_name: str | None  # each device has its own peak
    flops: PositiveFlops
    source: PeakSource


class TrialRequest(Message):
    """Everything that a rank program needs to run one layout."""

    sweep: str
    trial_id: int
    attempt: int
    workload: str
    options: Mapping[str, Any] = {}  # the workload's own
    model: ModelShape
    sequence_length: int
    layout: Layout
    device: Device
    measurement: MeasurementPlan
    limits: PhaseLimits
    seed: int
    # One process per node represents the node's ranks: it starts them itself, or trains nothing.
    one_rank_per_node: bool = False
    # The steps come from the first rank of the gang's last node, and not from rank 0.
    reports_on_last_node: bool = False
    peaks: tuple[KnownPeak, ...] = ()  # measured before, at the layout's precision
    # Not None: the layout is profiled. `attempt` then counts its profiles, which no measurement
    # shares.
    profile: ProfilePlan | None = None
    elapsed_seconds: float = 0.0  # since the start of the orchestrator
    nodes: tuple[str, ...] = ()  # the gang's, by the scheduler's names

    def reporting_rank(self, *, local_world_size: int) -> int:
        """Return the rank whose result has the steps, by the number of ranks per node."""
        return self.layout.world_size - local_world_size if self.reports_on_last_node else 0

    @property
    def tag(self) -> str:
        """The value of ATTEMPT_VARIABLE for this attempt."""
        number = f"profile-{self.attempt}" if self.profile is not None else str(self.attempt)
        return f"{self.sweep}/{self.trial_id}/{number}"

    @property
    def folder(self) -> str:
        """The name of this attempt's folder in that of its trial."""
        return f"{'attempt' if self.profile is None else 'profile'}-{self.attempt}"


class Heartbeat(Message):
    phase: Phase
    step: Step = 0
    # A timed step runs: neither the warm-up nor a step that is measured separately.
    timed: bool = False
    # Its numbers are in, however the gang ends from now on: the launcher may end it.
    enough: bool = False
    # On the node's monotonic clock, which its processes share.
    at: Annotated[float, Field(ge=0, le=1e12)] | None = None
    # The total limit now in force, by the launcher.
    total_limit_seconds: PositiveSeconds | None = None


class CollectiveTime(Message):
    """The time of one collective at one message size."""

    collective: Annotated[str, Field(max_length=32)]
    message_bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    seconds: PositiveSeconds  # the slowest rank's median
    num_calls: Annotated[int, Field(ge=1, le=1 << 30)]


def _bounded(extra: Any) -> Any:
    return bounded_extra(extra) if isinstance(extra, Mapping) else extra


class LinesRead(Message):
    """One read of a program's lines that found new steps. Seconds count from its start."""

    # The time of the read before: these lines were not there yet.
    after: Seconds
    at: Seconds
    num_steps: Step  # steps so far, these included


class CountedLines(Message):
    """The number of lines that a program was asked for, and of those that it wrote.

    It was not ended before it could write more than it was asked for.
    """

    num_asked: Annotated[int, Field(ge=1)]
    num_written: Step


class ProgramSeen(Message):
    """Observations of a user's program by its rank. Times are of the rank's clock."""

    # From the program's start to its end.
    seconds: Seconds
    reads: list[LinesRead] = Field(default=[], max_length=MAX_SAMPLES)
    # Steps of lines that came after the numbers were enough. They only show the pace.
    later_seconds: list[PositiveSeconds] = Field(default=[], max_length=MAX_SAMPLES)
    ended_itself: bool = True  # False: it was told to end
    # False: neither its command nor its script names the number of steps that are asked for.
    knows_num_steps: bool = True
    # By how much the step numbers in its lines rise from line to line; None: they have none.
    steps_per_line: float | None = None
    # Steps that a line covers, each of its time, by the sweep file.
    every: Annotated[int, Field(ge=1)] = 1
    # None: it may have been ended before it wrote all its lines.
    counted: CountedLines | None = None


class RankResult(Message):
    """The measurement of one rank. Only the step samples are required; unknown is None."""

    # Empty: the rank reported other values only.
    step_seconds: list[PositiveSeconds] = Field(
        max_length=MAX_SAMPLES,
        description="seconds of each timed optimizer step, in order; required",
    )
    warmup_seconds: list[PositiveSeconds] = Field(
        default=[], max_length=MAX_SAMPLES, description="those of the warm-up"
    )
    tokens_per_step: int | None = Field(
        default=None,
        gt=0,
        le=1 << 50,
        description="of all ranks; without it, global batch x sequence length",
    )
    phase_seconds: dict[Phase, Seconds] = Field(
        default={},
        max_length=8,
        description="seconds in `start`, `rendezvous`, `first_step`, `steady`, `teardown`",
    )
    compile_seconds: Seconds | None = Field(
        default=None,
        description="seconds of compiling (`torch.compile`), within these phases: most of it is"
        " part of `first_step`",
    )
    peak_memory_allocated_bytes: Bytes | None = Field(
        default=None, description="highest allocated memory"
    )
    peak_memory_reserved_bytes: Bytes | None = Field(
        default=None, description="highest memory that the allocator held"
    )
    memory_bytes_by_part: dict[str, Bytes] = Field(
        default={},
        max_length=32,
        description='bytes at the peak by part, such as `{"parameters": 123}`',
    )
    peak_memory_resident_bytes: Bytes | None = Field(
        default=None,
        description="highest memory of a process on a CPU; without it that of the program's "
        "largest process, by the kernel",
    )
    peak_memory_active_bytes: Bytes | None = Field(
        default=None, description="highest memory of blocks in use, by any stream"
    )
    inactive_split_bytes: Bytes | None = Field(
        default=None, description="highest sum of free rests of split blocks: fragmentation"
    )
    device_used_bytes: Bytes | None = Field(
        default=None,
        description="memory in use on the device after the timed steps, by everything "
        "(`torch.cuda.mem_get_info`: total less free)",
    )
    device_memory_bytes: Bytes | None = Field(default=None, description="memory of the device")
    allocator_retries: int | None = Field(
        default=None,
        ge=0,
        le=1 << 40,
        description="how often the allocator freed its cache and tried again",
    )
    allocator_ooms: int | None = Field(
        default=None, ge=0, le=1 << 40, description="out-of-memory errors that it raised"
    )
    peak_flops: PositiveFlops | None = Field(
        default=None,
        description="peak FLOP/s of one device at this precision; without it there is no MFU",
    )
    peak_flops_source: PeakSource | None = Field(default=None, description="source of that peak")
    attention_kernel: Annotated[str, Field(max_length=200, pattern=WITHOUT_NUL)] | None = Field(
        default=None, description="the kernel of attention that ran"
    )
    loss_first: float | None = Field(
        default=None, ge=-1e30, le=1e30, description="loss of the first step"
    )
    loss_last: float | None = Field(
        default=None,
        ge=-1e30,
        le=1e30,
        # A program that knows one loss calls it so, as lines do.
        validation_alias=AliasChoices("loss_last", "loss"),
        description="loss of the last step, or `loss`; NaN, infinite, or null after a `loss_first` "
        "that is a number: the training diverged (`not_finite`)",
    )
    # Only whether it is finite matters.
    gradient_norm: float | None = Field(
        default=None,
        ge=0,
        le=1e30,
        description="of the last step; not finite: the training diverged",
    )
    collectives: list[CollectiveTime] = Field(
        default=[],
        max_length=1000,
        description="of workload netbench: each collective and message size with its seconds",
    )
    extra: Annotated[dict[str, Any], BeforeValidator(_bounded)] = Field(
        default={},
        description="any fields of your own, at most 16 KiB: kept as JSON in `v_trial.extra`",
    )
    stack: Stack = Field(
        default=Stack(),
        description="`python`, `torch`, `cuda`, `nccl`, `driver`, `device_name`: part of the "
        "fingerprint",
    )
    # The next three are no fields of a program's document: its rank adds them.
    seen: ProgramSeen | None = None
    # The fastest step of a trial that was ended early since it cannot be the best.
    step_seconds_bound: PositiveSeconds | None = None
    profile: RankProfile | None = None


# If one of these is not finite, the training diverged.
TRAINED_NUMBERS = ("loss_first", "loss_last", "gradient_norm")


class RankFailure(Message):
    """A rank's note about the exception that ends it."""

    exception: ShortText  # qualified class name, e.g. torch.OutOfMemoryError
    message: ShortText
    traceback: Annotated[str, Field(max_length=100_000)] = ""
    phase: Phase
    step: Step = 0
    at_unix_seconds: Annotated[float, Field(ge=0, le=1e11)]
    out_of_memory: bool = False
    # Until that moment.
    phase_seconds: Annotated[dict[Phase, Seconds], Field(max_length=8)] = Field(
        default_factory=dict
    )
    peak_memory_allocated_bytes: Bytes | None = None
    device_memory_bytes: Bytes | None = None


class BadResult(ValueError):
    """A rank wrote something that is not a valid result. The message says why."""


class NotFiniteResult(BadResult):
    """A result of a training that diverged: its loss or its gradient norm is NaN or infinite."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__(f"{name} is {value}: the training diverged")
        self.name, self.value = name, value


_M = TypeVar("_M")

_REQUEST = TypeAdapter(TrialRequest)
_RESULT = TypeAdapter(RankResult)
_FAILURE = TypeAdapter(RankFailure)
_HEARTBEAT = TypeAdapter(Heartbeat)


def encode(message: TrialRequest | RankResult | RankFailure | Heartbeat) -> bytes:
    return message.model_dump_json().encode()


def decode_request(text: bytes) -> TrialRequest:
    return _REQUEST.validate_json(text)


def decode_result(text: bytes, *, needs_steps: bool = True) -> RankResult:
    """Parse a rank's result. Raises BadResult if it is not valid, or has no step but needs one.

    Raises its subclass NotFiniteResult if the loss or gradient norm is NaN or infinite, also as
    text.
    """
    try:
        result = _decode(_RESULT, text, "result")
    except BadResult as exc:
        cause = exc.__cause__
        for error in cause.errors(include_url=False) if isinstance(cause, ValidationError) else ():
            if error["type"] == "finite_number" and error["loc"][0] in (*TRAINED_NUMBERS, "loss"):
                raise NotFiniteResult(str(error["loc"][0]), error["input"]) from exc
        raise
    if needs_steps and not result.step_seconds:
        raise BadResult("result is not valid: step_seconds: it has no step")
    return result


def decode_failure(text: bytes) -> RankFailure:
    """Parse a rank's failure note. Raises BadResult."""
    return _decode(_FAILURE, text, "failure note")


def decode_heartbeat(text: bytes) -> Heartbeat:
    """Parse a heartbeat. Raises BadResult."""
    return _decode(_HEARTBEAT, text, "heartbeat")


def _decode(adapter: TypeAdapter[_M], text: bytes, what: str) -> _M:
    if len(text) > MAX_RESULT_BYTES:
        raise BadResult(f"{what} has {len(text)} bytes, more than {MAX_RESULT_BYTES}")
    try:
        return adapter.validate_json(text)
    except (ValueError, RecursionError) as exc:  # a ValidationError is a ValueError
        detail = str(exc)[:200]
        if isinstance(exc, ValidationError):
            errors = exc.errors(include_url=False, include_input=False)[:5]
            detail = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'whole'}: {e['msg']}" for e in errors
            )
        raise BadResult(f"{what} is not valid: {detail}") from exc
