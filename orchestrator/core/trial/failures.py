"""Reads what a rank left behind: which kind of failure it was, and what shows it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.core.problem.xid import XidCause, first_of, named, xids_in
from orchestrator.core.trial.failure_kinds import (
    OUT_OF_MEMORY_KINDS,
    POLICIES,
    Failure,
    FailureKind,
)

_K = FailureKind


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of how one rank ended badly. Unknown is None or empty."""

    rank: int
    node: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str = ""  # qualified class name, from the rank's failure note
    message: str = ""
    traceback: str = ""
    noted_out_of_memory: bool = False
    bad_result: str | None = None  # why what it wrote is no result
    not_finite: str | None = None  # what of its result is NaN or infinite
    timed_out: str | None = None  # which limit passed, for a person: "first_step limit of 300 s"
    phase: str = "start"
    step: int = 0
    num_oom_kills: int = 0  # by the kernel in our cgroup, while the attempt ran
    # NVIDIA's errors on its node's devices while the attempt ran, by the driver or the kernel's log.
    xids: Sequence[int] = ()
    peak_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    at_unix_seconds: float = 0.0  # of the failure note, else of the death
    log_tail: str = ""
    log_path: str = ""


# Phases in which a rank has not yet begun its first step (the values of protocol.Phase, which imports this module).
_PHASES_BEFORE_THE_FIRST_STEP = frozenset({"start", "rendezvous"})

AMBIGUOUS_MEMORY_FRACTION = 0.85  # an illegal access with more of the device in use than this is an out-of-memory in disguise
_DISGUISES = re.compile(
    r"illegal memory access|CUBLAS_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED)|unspecified launch failure"
)

_NOTED = "out of memory by the rank's own word: "  # before the evidence where only the failure note's flag says so
_REFUSED_BY_HOST = re.compile(
    r"DefaultCPUAllocator|MemoryError\b"
)  # an allocation of this process, which a smaller layout may not need

# torch's CUDACachingAllocator, and workloads/llama/live_tensors.
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}\b")
_HELD = re.compile(rf"{_SIZE} is (?:allocated by PyTorch|held by live tensors)")
_DEVICE = re.compile(rf"(?:total capacity of|The limit is) {_SIZE}\b")

_JUDGED_CHARACTERS = 10_000  # of an exception's text

_CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)  # any other signal came from outside
# How batch systems, spot nodes, people and closed terminals end a program. We never do: our own end is SIGKILL.
ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_FATAL = ASKED_TO_END | {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGKILL,
}  # not SIGABRT: so end watchdogs
_MUTTERED = frozenset({FailureKind.NCCL, FailureKind.PORT_CLASH, FailureKind.STORAGE})

# First match wins; so the more telling text stands first. Sources: messages of torch, CUDA, cuBLAS, cuDNN, NCCL, gloo, glibc, Linux.
_SIGNATURES: tuple[tuple[FailureKind, re.Pattern[str]], ...] = tuple(
    (
        kind,
        re.compile(pattern.lower()),
    )  # for text in small letters: looking for both cases at once would take ten times as long
    for kind, pattern in (
        # A size nobody asks for comes out of a corrupted message after a communication failure, not out of a model.
        (_K.NCCL, r"tried to allocate (?:\d{6,}(?:\.\d+)? ?[GT]i?B|[\d.]+ ?[PE]i?B)"),
        # Locked-memory limits (ulimit -l) read like memory, and are the machine's configuration.
        (_K.NCCL, r"ibv_\w+ failed with error:? cannot allocate memory"),
        (_K.OOM_HOST, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
        (_K.OOM_GPU, r"\b(?:torch\.(?:cuda\.)?|c10::)?OutOfMemoryError\b"),
        (_K.OOM_GPU, r"\b(?:CUDA|HIP|XPU|NPU) out of memory"),
        (_K.OOM_GPU, r"\b(?:CUDA|HIP) (?:runtime |driver )?error:? out of memory"),
        (_K.OOM_GPU, r"Cuda failure (?:\d+ )?'out of memory'"),
        (_K.OOM_GPU, r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"),
        (
            _K.OOM_GPU,
            r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
        ),
        (_K.OOM_GPU, r"Triton Error \[(?:CUDA|HIP)\]: out of memory"),
        (_K.OOM_GPU, r"Failed to CUDA (?:calloc|malloc)(?: async)?"),
        (_K.OOM_GPU, r"RESOURCE_EXHAUSTED: Out of memory"),
        (_K.OOM_GPU, r"cuMemCreate.{0,80}out of memory"),
        (_K.OOM_HOST, r"\bMemoryError\b|_ArrayMemoryError"),
        (_K.OOM_HOST, r"cannot allocate memory|std::bad_alloc|unable to mmap \d+ bytes"),
        (_K.OOM_HOST, r"oom-kill|oom_reaper|(?:Memory cgroup )?out of memory: Killed process"),
        # torch's DataLoader, when /dev/shm is full.
        (
            _K.OOM_HOST,
            r"insufficient shared memory \(shm\)|workers are out of shared memory|unable to write to file </torch_",
        ),
        (_K.PREEMPTED, r"slurmstepd: error: \*\*\* (?:JOB|STEP) [^ ]+ ON [^ ]+ CANCELLED AT"),
        (
            _K.PREEMPTED,
            r"SignalException: Process \d+ got signal: (?:1|2|15)\b|\bSignal (?:1|2|15) \(SIG(?:HUP|INT|TERM)\) received by PID",
        ),
        (_K.PREEMPTED, r"(?m)^(?:\[rank\d+\]: ?)?KeyboardInterrupt$|\bSIGTERMException\b"),
        (
            _K.PREEMPTED,
            r"spot instance interruption|instance (?:is being|was|has been) preempted|node (?:is being|was|has been) preempted",
        ),
        # Of programs that look themselves: Megatron-LM, torch's clip_grad_norm_ and anomaly mode, Lightning, detectron2, fairseq, DeepSpeed.
        (
            _K.NOT_FINITE,
            r"found (?:NaN|Inf) in local (?:grad norm|forward loss)|(?:unexpected|found) result nan|gradients? .{0,60}is non-finite",
        ),
        (
            _K.NOT_FINITE,
            r"returned nan values in its \d+(?:st|nd|rd|th) output|loss returned in `\w+` is (?:nan|inf)",
        ),
        (
            _K.NOT_FINITE,
            r"\bloss (?:is|was|became|has become) (?:now )?(?:nan|inf|infinite|not finite|non-finite)\b",
        ),
        (_K.NOT_FINITE, r"minimum loss scale reached|loss scale already at minimum"),
        (_K.PORT_CLASH, r"EADDRINUSE|address already in use"),
        (
            _K.DEVICE_ERROR,
            r"illegal memory access was encountered|CUBLAS_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED)",
        ),
        (_K.XID, r"uncorrectable (?:NVLink|ECC) error|GPU (?:has fallen off the bus|is lost)"),
        (
            _K.DEVICE_ERROR,
            r"CUDA driver initialization failed|CUDA unknown error|no CUDA-capable device|No CUDA GPUs are available",
        ),
        (_K.DEVICE_ERROR, r"Found no NVIDIA driver|invalid device ordinal"),
        (
            _K.DEVICE_ERROR,
            r"CUDA-capable device\(s\) is/are busy or unavailable|system not yet initialized|unspecified launch failure",
        ),
        (_K.STORAGE, r"No space left on device|Disk quota exceeded|Read-only file system"),
        (_K.STORAGE, r"Stale (?:NFS )?file handle|Input/output error|Too many open files"),
        (
            _K.NCCL,
            r"Dist(?:Backend|Network|Store)Error|Rendezvous(?:Connection|Timeout|Closed)Error",
        ),
        (
            _K.NCCL,
            r"nccl(?:System|Internal|Remote|UnhandledCuda)Error|NCCL (?:communicator was aborted|error)",
        ),
        (
            _K.NCCL,
            r"Watchdog caught collective operation timeout|HeartbeatMonitor|heartbeat monitor timed out",
        ),
        (
            _K.NCCL,
            r"gloo/transport/|Gloo connectFullMesh failed|Connection closed by peer|Connection reset by peer",
        ),
        (
            _K.NCCL,
            r"TCPStore|Socket Timeout|client socket has timed out|Timed out waiting \d+ms for (?:recv|send)",
        ),
        (_K.NCCL, r"NET/IB ?: Got completion|Broken pipe"),
    )
)

_SMALL_LETTERS = {
    capital: capital + 32 for capital in range(ord("A"), ord("Z") + 1)
}  # keeps lengths, as str.lower does not

# `Error: text` at the start of a line, after a traceback: what a program says that leaves no failure note.
_LAST_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Rejected|Finite|Interrupt|Exit|Warning))(?:: ?(.*)|(?<=MemoryError))$",
    re.MULTILINE,
)
# Exceptions that only pass on how another process ended, or that it fell silent: what that one printed stands before them.
_TOLD_BY_OTHERS = frozenset(
    {FailureKind.NOT_FINITE, FailureKind.PREEMPTED, FailureKind.XID}
)  # also where a messenger speaks last
_MESSENGERS = re.compile(
    r"CalledProcessError|ChildFailedError|Process(?:Raised|Exited)Exception|SystemExit|DataLoader worker"
)

# Exceptions of workloads.rank, which say themselves what they are.
_OWN_EXCEPTIONS: Mapping[str, FailureKind] = MappingProxyType(
    {"ConfigRejected": FailureKind.CONFIG_REJECTED, "NotFinite": FailureKind.NOT_FINITE}
)

# A line of a traceback that is no source line: the exception itself, or one in its chain of causes (groups draw a bar before theirs).
_EXCEPTION_LINE = re.compile(r"^(?: *\| )?(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::.*)?$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "direct cause of the following exception:",
    "another exception occurred:",
)  # ends the traceback before


def classify(evidence: Evidence) -> Failure:
    """Say what went wrong with one bad rank, and what shows it."""
    kind, matched = _kind(evidence)
    is_own = (
        evidence.exception.startswith("workloads.rank.")
        and evidence.exception.rpartition(".")[2] in _OWN_EXCEPTIONS
    )
    said = f"{'' if is_own else evidence.exception}: {evidence.message}".strip(": ").splitlines()
    told = matched if "Xid" in matched else ""  # the driver's word for what the program only felt
    texts = (
        told,
        evidence.timed_out,
        said[0] if said else "",
        matched,
        evidence.bad_result,
        _exit_text(evidence),
    )
    detail = next((text for text in texts if text), "")
    return Failure(
        kind=kind,
        message=f"rank {evidence.rank} {POLICIES[kind].verb} in {evidence.phase}"
        + (f": {detail[:300]}" if detail else ""),
        rank=evidence.rank,
        node=evidence.node,
        phase=evidence.phase,
        step=evidence.step,
        signal=evidence.signal,
        exit_code=evidence.exit_code,
        evidence=matched,
        log_tail=evidence.log_tail,
        log_path=evidence.log_path,
    )


def first_bad(ranks: Sequence[Evidence]) -> Failure:
    """Classify a gang by the rank that is to blame (at least one given).

    An out-of-memory anywhere explains everything after it. Otherwise the earliest to go wrong is to blame, but a rank that lost
    communication or aborted only where no other did worse: that is what innocent peers of a dead rank die of.
    """
    judged = [(classify(rank), rank) for rank in ranks]

    def blame(pair: tuple[Failure, Evidence]) -> tuple[bool, bool, float]:
        failure, rank = pair
        return failure.kind not in OUT_OF_MEMORY_KINDS, is_aftermath(failure), rank.at_unix_seconds

    return min(judged, key=blame)[0]


def is_aftermath(failure: Failure) -> bool:
    """Whether a rank that failed so may be the innocent peer of another one that failed before it."""
    return failure.kind is FailureKind.NCCL or failure.signal == signal.SIGABRT


def proves_out_of_memory(failure: Failure, *, on_cpu: bool = False) -> bool:
    """Whether it proves that the layout does not fit its device, so that what needs at least as much memory needs no launch.

    An allocator or library of the device has to have said so, or the rank itself: an out-of-memory inferred from a full device is none,
    and the host's memory is the layout's only where it trains on CPUs (`on_cpu`), and an allocation of its own process was refused.
    """
    match = _match(failure.evidence)
    if failure.kind is FailureKind.OOM_GPU:
        return failure.evidence.startswith(_NOTED) or (
            match is not None and match[0] is FailureKind.OOM_GPU
        )
    return (
        on_cpu
        and failure.kind is FailureKind.OOM_HOST
        and _REFUSED_BY_HOST.search(failure.evidence) is not None
    )


def is_out_of_memory(exception: str, message: str) -> bool:
    """Whether an exception of this class name and text says that memory ran out, the device's or the host's."""
    match = _match(f"{exception}: {message[:_JUDGED_CHARACTERS]}")
    return match is not None and match[0] in OUT_OF_MEMORY_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedAllocation:
    """What an allocator said of the allocation that did not fit. Unknown is None."""

    tried_bytes: int
    held_bytes: int | None  # by tensors, at that moment
    device_bytes: int | None


def refused_allocation(text: str) -> RefusedAllocation | None:
    """Read the message of torch's allocators, or of `workloads.llama` on a CPU with a limit; None: it is none."""
    tried = _TRIED.search(text)
    if tried is None:
        return None
    held, device = _HELD.search(text), _DEVICE.search(text)
    return RefusedAllocation(
        tried_bytes=_bytes(tried),
        held_bytes=_bytes(held) if held is not None else None,
        device_bytes=_bytes(device) if device is not None else None,
    )


def _bytes(match: re.Match[str]) -> int:
    return int(float(match[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(match[2]))


def _kind(evidence: Evidence) -> tuple[FailureKind, str]:
    """The kind, and the text that shows it."""
    exception, message = evidence.exception, evidence.message
    if not exception and _ended_badly(evidence):
        # Without a note, its log is the witness: the last exception, if it shows one, stands for all noise around it.
        found = _LAST_EXCEPTION.findall(evidence.log_tail)
        exception, message = found[-1] if found else ("", "")
    said = f"{exception}: {message}" if exception else evidence.log_tail
    if evidence.not_finite is not None:
        return FailureKind.NOT_FINITE, evidence.not_finite
    named_kind = _OWN_EXCEPTIONS.get(exception.rpartition(".")[2])
    if named_kind is not None:
        return named_kind, said
    memory = _memory_kind(evidence, exception, said)
    if memory is not None:
        return memory
    hardware = first_of(_xids(evidence), XidCause.DEVICE)
    if hardware is not None:
        return FailureKind.XID, _with_xid(
            hardware, evidence.timed_out or _gist(exception, said) or _exit_text(evidence)
        )
    if evidence.timed_out is not None:
        early = evidence.phase in _PHASES_BEFORE_THE_FIRST_STEP
        return (FailureKind.START_TIMEOUT if early else FailureKind.HUNG), evidence.timed_out
    match = _match(said) if _ended_badly(evidence) else None
    if match is not None and _DISGUISES.search(match[1]) and _near_the_memory_limit(evidence):
        return (
            FailureKind.OOM_GPU,
            f"{match[1]}, with {evidence.peak_memory_bytes} of {evidence.device_memory_bytes} bytes in use",
        )
    software = first_of(_xids(evidence), XidCause.PROGRAM)
    is_felt = (
        match[0] is FailureKind.DEVICE_ERROR
        if match is not None
        else not exception or "CUDA error" in said
    )
    if software is not None and is_felt:
        # The device is well, what the program asked of it was not: as a segmentation fault is on the host.
        return FailureKind.SEGFAULT, _with_xid(
            software, _gist(exception, said) or _exit_text(evidence)
        )
    if match is None and _ended_badly(evidence) and _MESSENGERS.search(said):
        passed_on = _match(evidence.log_tail)
        match = passed_on if passed_on is not None and passed_on[0] in _TOLD_BY_OTHERS else None
    if (
        match is not None
        and match[0] not in OUT_OF_MEMORY_KINDS
        and not (_only_mutters(evidence, exception) and match[0] in _MUTTERED)
    ):
        return match
    if exception:
        return FailureKind.USER_ERROR, said[:1000]
    return _kind_of_exit(evidence)


def _xids(evidence: Evidence) -> tuple[int, ...]:
    """NVIDIA's errors that may have ended a rank: those of its node meanwhile, and those that stand in its own words."""
    if not _ended_badly(evidence) and evidence.timed_out is None:
        return ()
    return (
        *evidence.xids,
        *xids_in(f"{evidence.exception}: {evidence.message}\n{evidence.log_tail}"),
    )


def _with_xid(number: int, said: str) -> str:
    return f"{named(number)}: {said}" if said else named(number)


def _gist(exception: str, said: str) -> str:
    """One line of what a rank said: the first of its exception, the last of its log."""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[0 if exception else -1][:300] if lines else ""


def _only_mutters(evidence: Evidence, exception: str) -> bool:
    """Whether a signal ended the rank whatever its log was complaining of: NCCL warns of what it then survives."""
    return not exception and _signal(evidence) in _FATAL


def _memory_kind(evidence: Evidence, exception: str, said: str) -> tuple[FailureKind, str] | None:
    match = _match(_last_words(evidence, exception, said)) if _ended_badly(evidence) else None
    if match is not None and match[0] in OUT_OF_MEMORY_KINDS:
        return match
    if evidence.noted_out_of_memory:
        return FailureKind.OOM_GPU, f"{_NOTED}{evidence.exception}: {evidence.message}"[:1000]
    if evidence.num_oom_kills and _signal(evidence) == signal.SIGKILL:
        return FailureKind.OOM_HOST, f"memory.events: oom_kill +{evidence.num_oom_kills}"
    return None


def _last_words(evidence: Evidence, exception: str, said: str) -> str:
    """What the rank died of in its own words: its exception and what caused that, never a line of source or an out-of-memory survived."""
    if evidence.exception:
        return f"{said}\n{_chain(evidence.traceback)}"
    number = _signal(evidence)
    if not exception and number is not None and number not in _CRASHES:
        return ""  # ended from outside, whatever it had survived before
    match = _match(said) if exception else None
    if not exception or _MESSENGERS.search(said) or (match is not None and match[0] in _MUTTERED):
        return evidence.log_tail
    return f"{said}\n{_chain(evidence.log_tail)}"


def _chain(text: str) -> str:
    """The exceptions of the last traceback in a text, and of those that led to it."""
    *before, chain = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE).split(_TRACEBACK)
    for earlier in reversed(before):
        if not earlier.rstrip().endswith(_CHAINED):
            break
        chain = earlier + chain
    return "\n".join(_EXCEPTION_LINE.findall(chain))


def _kind_of_exit(evidence: Evidence) -> tuple[FailureKind, str]:
    number = _signal(evidence)
    if number is not None:
        kind = (
            FailureKind.SEGFAULT
            if number in _CRASHES
            else FailureKind.PREEMPTED
            if number in ASKED_TO_END
            else FailureKind.KILLED
        )
        return kind, _exit_text(evidence)
    if evidence.exit_code == 0 and evidence.bad_result is not None:
        return FailureKind.BAD_RESULT, evidence.bad_result
    return FailureKind.USER_ERROR, _exit_text(evidence)


def _ended_badly(evidence: Evidence) -> bool:
    """Whether it ended by itself, and badly. False for one that ended well without a result, hung or was killed by us: its log is noise."""
    return bool(evidence.exception) or (
        evidence.timed_out is None
        and (evidence.signal is not None or evidence.exit_code not in (None, 0))
    )


def _near_the_memory_limit(evidence: Evidence) -> bool:
    peak, capacity = evidence.peak_memory_bytes, evidence.device_memory_bytes
    return peak is not None and capacity is not None and peak > AMBIGUOUS_MEMORY_FRACTION * capacity


def _match(text: str) -> tuple[FailureKind, str] | None:
    small = text.translate(_SMALL_LETTERS)
    for kind, pattern in _SIGNATURES:
        match = pattern.search(small)
        if match is not None:
            start = text.rfind("\n", 0, match.start()) + 1
            line = text[start : start + 1000].split("\n", 1)[0]
            return kind, line
    return None


def _signal(evidence: Evidence) -> int | None:
    """The signal it died of; shells report one as exit code 128 + n."""
    if evidence.signal is not None:
        return evidence.signal
    code = evidence.exit_code
    return code - 128 if code is not None and 128 < code < 160 else None


def _exit_text(evidence: Evidence) -> str:
    number = _signal(evidence)
    if number is not None:
        try:
            return f"died of {signal.Signals(number).name}"
        except ValueError:
            return f"died of signal {number}"
    return f"exit code {evidence.exit_code}" if evidence.exit_code is not None else ""
