"""What the orchestrator, a node's launcher and a rank program say to each other, as values and text.

A rank is told by torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and a run
directory (SWEEP_RUN_DIR). In it lies `request.json`; the rank writes a heartbeat and, at its end, a result or a failure, each under
a temporary name and then renamed. What a rank wrote is untrusted text: it is parsed here, with bounds, or refused as a bad result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.fingerprint import WITHOUT_NUL, Stack
from orchestrator.core.trial.machine_load import MachineLoad

RUN_DIR_VARIABLE = "SWEEP_RUN_DIR"
ATTEMPT_VARIABLE = "SWEEP_ATTEMPT"  # in the environment of every process an attempt starts; leftovers are found by it
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


class Phase(StrEnum):
    """Where a rank is. Each has a time limit of its own."""

    START = "start"  # process start to `main`, imports included
    RENDEZVOUS = "rendezvous"  # process group, model and optimizer built
    FIRST_STEP = "first_step"  # first optimizer step: compilation, lazy NCCL, optimizer state
    STEADY = "steady"  # warm-up and timed steps; the limit holds from step to step
    TEARDOWN = "teardown"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


MAX_SECONDS = 1e7  # nothing here takes or waits for longer than four months
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
# No clock resolves less, and a division by it stays finite.
PositiveSeconds = Annotated[float, Field(ge=1e-9, le=MAX_SECONDS)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
Step = Annotated[int, Field(ge=0, le=10**9)]
ShortText = Annotated[str, Field(max_length=4000)]


class MeasurementPlan(_Message):
    """How a rank program measures: drop the warm-up, then time steps until their median is known well enough."""

    warmup_steps: Annotated[int, Field(ge=1)]
    min_steps: Annotated[int, Field(ge=2)]
    max_steps: Annotated[int, Field(ge=2, le=MAX_SAMPLES)]
    relative_confidence: Annotated[
        float, Field(gt=0)
    ]  # half-width of the median's 95 % interval over the median


class LimitName(StrEnum):
    """The parts of an attempt that have a time limit: each phase, and the whole."""

    START = "start"
    RENDEZVOUS = "rendezvous"
    FIRST_STEP = "first_step"
    STEADY = "steady"
    TEARDOWN = "teardown"
    TOTAL = "total"


class PhaseLimits(_Message):
    """Seconds a rank may stay in each phase; in `steady`, from one heartbeat to the next. Of `auto` ones: before any step is seen."""

    start: PositiveSeconds
    rendezvous: PositiveSeconds
    first_step: PositiveSeconds
    steady: PositiveSeconds
    teardown: PositiveSeconds
    total: PositiveSeconds
    # Limits that follow the steps (core/trial/limits.py); the others are fixed.
    auto: tuple[LimitName, ...] = ()
    # The longest step that is expected; None: nothing is predicted.
    predicted_step_seconds: PositiveSeconds | None = None
    in_file: bool = True  # a sweep file sets them


PositiveFlops = Annotated[float, Field(gt=0, le=1e18)]  # of one device in a second
PeakSource = Annotated[
    str, Field(max_length=200, pattern=WITHOUT_NUL)
]  # "table: ...", or MEASURED_PEAK and how and in which trial
MEASURED_PEAK = "measured: "


class KnownPeak(_Message):
    """The peak of one device as an earlier trial of the sweep has measured it on a node: one node's MFUs all rest on it."""

    node: str  # its host name
    device_name: (
        str | None
    )  # as that trial's ranks saw it; another device on the same node has another peak
    flops: PositiveFlops
    source: PeakSource


class TrialRequest(_Message):
    """All that a rank program needs to run one layout."""

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
    one_rank_per_node: bool = False  # it stands for the others there
    peaks: tuple[
        KnownPeak, ...
    ] = ()  # at the layout's precision, of the nodes where one was measured already
    elapsed_seconds: float = 0.0  # from the beginning of the orchestrator's call to this attempt
    nodes: tuple[str, ...] = ()  # of the gang, as the scheduler calls them

    @property
    def tag(self) -> str:
        """What the environment of every process of this attempt carries."""
        return f"{self.sweep}/{self.trial_id}/{self.attempt}"


class Heartbeat(_Message):
    phase: Phase
    step: Step = 0
    timed: bool = False  # a timed step runs: no warm-up, and nothing that is looked at apart
    # On the node's monotonic clock, which its processes share.
    at: Annotated[float, Field(ge=0, le=1e12)] | None = None
    # The total limit in force now, as the launcher says.
    total_limit_seconds: PositiveSeconds | None = None


class CollectiveTime(_Message):
    """What one collective took at one message size."""

    collective: Annotated[str, Field(max_length=32)]
    message_bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    seconds: PositiveSeconds  # of one call, of the slowest rank: the median
    num_calls: Annotated[int, Field(ge=1, le=1 << 30)]


class RankResult(_Message):
    """What one rank measured. Only the step samples are required; unknown is None."""

    step_seconds: Annotated[
        list[PositiveSeconds],
        Field(min_length=1, max_length=MAX_SAMPLES),
        Field(description="seconds of each timed optimizer step, in order; required"),
    ]
    warmup_seconds: Annotated[
        list[PositiveSeconds],
        Field(max_length=MAX_SAMPLES),
        Field(description="those of the warm-up"),
    ] = []
    tokens_per_step: Annotated[
        Annotated[int, Field(gt=0, le=1 << 50)] | None,
        Field(description="of all ranks; without it, global batch x sequence length"),
    ] = None
    phase_seconds: Annotated[
        dict[Phase, Seconds],
        Field(max_length=8),
        Field(description="seconds in `start`, `rendezvous`, `first_step`, `steady`, `teardown`"),
    ] = {}
    peak_memory_allocated_bytes: Annotated[
        Bytes | None, Field(description="highest allocated memory")
    ] = None
    peak_memory_reserved_bytes: Annotated[
        Bytes | None, Field(description="highest memory that the allocator held")
    ] = None
    memory_bytes_by_part: Annotated[
        dict[str, Bytes],
        Field(max_length=32),
        Field(description='bytes at the peak by part, such as `{"parameters": 123}`'),
    ] = {}
    device_memory_bytes: Annotated[Bytes | None, Field(description="memory of the device")] = None
    allocator_retries: Annotated[
        Annotated[int, Field(ge=0, le=1 << 40)] | None,
        Field(description="how often the allocator freed its cache and tried again"),
    ] = None
    peak_flops: Annotated[
        PositiveFlops | None,
        Field(
            description="peak FLOP/s of one device at this precision; without it there is no MFU"
        ),
    ] = None
    peak_flops_source: Annotated[PeakSource | None, Field(description="where that comes from")] = (
        None
    )
    loss_first: Annotated[
        Annotated[float, Field(ge=-1e30, le=1e30)] | None,
        Field(description="loss of the first step"),
    ] = None
    loss_last: Annotated[
        Annotated[float, Field(ge=-1e30, le=1e30)] | None,
        Field(
            description="loss of the last step; NaN, infinite, or null after a `loss_first` that is a number: the "
            "training diverged (`not_finite`)"
        ),
    ] = None
    # The gradient norm of the last step; only whether it is finite matters.
    gradient_norm: Annotated[
        Annotated[float, Field(ge=0, le=1e30)] | None,
        Field(description="of the last step; not finite: the training diverged"),
    ] = None
    collectives: Annotated[
        list[CollectiveTime],
        Field(max_length=1000),
        Field(
            description="of workload netbench: each collective and message size with its seconds"
        ),
    ] = []
    stack: Annotated[
        Stack,
        Field(
            description="`python`, `torch`, `cuda`, `nccl`, `driver`, `device_name`: part of the fingerprint"
        ),
    ] = Stack()


# A number of a result that shows that its training diverged, where it is not finite.
TRAINED_NUMBERS = ("loss_first", "loss_last", "gradient_norm")


class RankFailure(_Message):
    """What a rank could still say before it died of an exception."""

    exception: ShortText  # qualified class name, e.g. torch.OutOfMemoryError
    message: ShortText
    traceback: Annotated[str, Field(max_length=100_000)] = ""
    phase: Phase
    step: Step = 0
    at_unix_seconds: Annotated[float, Field(ge=0, le=1e11)]
    out_of_memory: bool = False
    phase_seconds: Annotated[dict[Phase, Seconds], Field(max_length=8)] = {}  # until then
    peak_memory_allocated_bytes: Bytes | None = None
    device_memory_bytes: Bytes | None = None


class BadResult(ValueError):
    """A rank wrote something that is not a result. The message says what."""


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


def decode_result(text: bytes) -> RankResult:
    """Parse a rank's result. Raises BadResult for rubbish of any kind: too large, no JSON, negative, missing, unknown; its kind NotFiniteResult
    where the loss or gradient norm is NaN or infinite, also as a text.
    """
    try:
        return _decode(_RESULT, text, "result")
    except BadResult as exc:
        errors = (
            exc.__cause__.errors(include_url=False)
            if isinstance(exc.__cause__, ValidationError)
            else []
        )
        for error in errors:
            if error["type"] == "finite_number" and error["loc"][0] in TRAINED_NUMBERS:
                raise NotFiniteResult(str(error["loc"][0]), error["input"]) from exc
        raise


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
    except (ValidationError, ValueError, RecursionError) as exc:
        errors = (
            exc.errors(include_url=False, include_input=False)
            if isinstance(exc, ValidationError)
            else []
        )
        detail = (
            "; ".join(f"{'.'.join(map(str, e['loc'])) or 'whole'}: {e['msg']}" for e in errors[:5])
            or str(exc)[:200]
        )
        raise BadResult(f"{what} is not valid: {detail}") from exc


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """NVML samples of one node while timed steps ran; None where NVML does not say."""

    utilisation: float | None = None  # mean, 0..1
    power_watts: float | None = None  # mean per GPU
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How one rank ended, and what it said."""

    rank: int
    exit_code: int | None = None  # None: killed by us before it ended by itself
    signal: int | None = None
    result: RankResult | None = None
    failure: RankFailure | None = None
    bad_result: str | None = None  # why what it wrote is no result
    phase: Phase = Phase.START
    step: int = 0
    ended_at_unix_seconds: float | None = None
    log_path: str = ""
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node's launcher says of its ranks after an attempt. All of its processes are gone by then."""

    node: str  # host name, or address where names repeat
    ranks: Sequence[RankOutcome]
    failure: Failure | None = (
        None  # classified from the first bad rank of this node; None: every rank measured
    )
    failed_at_unix_seconds: float | None = None
    seconds: float = 0.0  # wall time from the order to the last process gone
    # From the last result to the last process gone; None: not every rank measured.
    teardown_seconds: float | None = None
    processes_killed: int = 0  # leftovers beyond the ranks themselves
    environment: Mapping[str, str] = field(
        default_factory=dict
    )  # by which ranks were told how to communicate; see core.communication
    chosen: tuple[str, ...] = ()  # names in it that nobody had set: the launcher chose their values
    gpu: GpuUsage = field(default_factory=GpuUsage)
    load: MachineLoad = field(default_factory=MachineLoad)  # while steps were timed


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What one node's launcher is asked to run: its share of a gang, once."""

    request: TrialRequest
    program: str  # a module with `main() -> int`: "workloads.llama"
    local_world_size: int
    first_rank: int = 0  # global rank of this node's first
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = (
        None  # None: this node holds the whole gang, its launcher binds a port itself
    )
    address: str | None = (
        None  # this node's, as the others of the gang reach it; None: nobody has to
    )
    devices: Sequence[str] = ()  # for CUDA_VISIBLE_DEVICES, physical indices or UUIDs, one per rank
    cpus: Sequence[int] = ()  # cores to pin the ranks to, shared out among them; empty: not pinned
    # The process that asks for it (processes.global_identity): its CPU time is the sweep's.
    orchestrator: str = ""
    node_slots: int | None = (
        None  # ranks that this node has room for, other gangs' included: they share the cores where none are pinned
    )
    # Variables of ranks, besides those that the launcher sets.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    # The same of values that are secret: they reach ranks, and are taken out of every log, report and message.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
