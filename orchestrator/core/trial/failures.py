"""Classifies how a rank failed: which kind of failure it was, and what shows it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.core.problem.xid import XidCause, first_of, named, xids_in
from orchestrator.core.trial.failure_kinds import (
    AFTERMATH_KINDS,
    OUT_OF_MEMORY_KINDS,
    POLICIES,
    Failure,
    FailureKind,
    MemoryShortage,
)
from orchestrator.core.trial.failure_signatures import Cause, find_cause
from orchestrator.core.trial.step_part import step_part

_K = FailureKind


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything known about how one rank failed. Unknown is None or empty."""

    rank: int
    node: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str = ""  # class name in the failure note
    message: str = ""
    traceback: str = ""
    noted_out_of_memory: bool = False
    bad_result: str | None = None  # why its result is not valid
    not_finite: str | None = None  # which number is NaN or infinite
    timed_out: str | None = None  # "first_step limit of 300 s"
    passed_total_limit: bool = False  # that of the whole attempt
    phase: str = "start"
    step: int = 0
    num_oom_kills: int = 0  # by the kernel in our cgroup
    # NVIDIA's errors on its node's devices during the attempt, by the driver or the kernel's log.
    xids: Sequence[int] = ()
    peak_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    at_unix_seconds: float = 0.0  # of the note, else the death
    log_tail: str = ""
    log_path: str = ""


# Values of protocol.Phase, which imports this module.
_PHASES_BEFORE_THE_FIRST_STEP = frozenset({"start", "rendezvous"})

# These errors are an out-of-memory in disguise if more of the device's memory than this is in use.
AMBIGUOUS_MEMORY_FRACTION = 0.85
_DISGUISES = re.compile(
    r"illegal memory access|CUBLAS_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED)"
    r"|unspecified launch failure"
)

# Messages of torch's CUDACachingAllocator and of workloads/live_tensors.
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}\b")
_LIVE = re.compile(rf"{_SIZE} is (?:allocated by PyTorch|held by live tensors)")
_DEVICE = re.compile(rf"(?:total capacity of|The limit is) {_SIZE}\b")

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# Any other signal came from outside.
_CRASHES = _FAULTS | {signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
# Begins the part of a message that a program printed.
LAST_LINE = "; the last line of its log: "
_WORD = re.compile(r"[^\W_]")
# The kernel ends a process so that has used up a limit of its own.
_LIMITS: Mapping[int, str] = MappingProxyType(
    {
        signal.SIGXCPU: "it has used up its CPU time (ulimit -t)",
        signal.SIGXFSZ: "a file would have grown beyond the limit (ulimit -f)",
    }
)
# Sent by batch systems, spot nodes, people and closed terminals. We only ever send SIGKILL.
ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# These explain an end, also after warnings in the log. SIGABRT does not: watchdogs send it.
_FATAL = _FAULTS | ASKED_TO_END | {signal.SIGKILL}
_OFTEN_ONLY_WARNINGS = frozenset({_K.NCCL, _K.PORT_CLASH, _K.STORAGE})

# `Error: text` at the start of a line: what a program prints last that leaves no failure note.
_LAST_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*"
    r"[A-Z]\w*(?:Error|Exception|Rejected|Finite|Interrupt|Exit|Warning))"
    r"(?:: ?(.*)|(?<=MemoryError))$",
    re.MULTILINE,
)
# Exceptions that only report how another process ended. What that one printed comes before them.
_MESSENGERS = re.compile(
    r"CalledProcessError|ChildFailedError|Process(?:Raised|Exited)Exception|SystemExit"
    r"|DataLoader worker"
)
# These kinds count even if a messenger's exception comes last.
_PASSED_ON = frozenset({_K.NOT_FINITE, _K.PREEMPTED, _K.XID})

# Exceptions of workloads.rank, whose names are their kinds.
_OWN_EXCEPTIONS: Mapping[str, FailureKind] = MappingProxyType(
    {"ConfigRejected": _K.CONFIG_REJECTED, "NotFinite": _K.NOT_FINITE}
)

# A line of a traceback that is no source line: an exception. Exception groups draw a bar before it.
_EXCEPTION_LINE = re.compile(r"^(?: *\| )?(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::.*)?$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
# Ends the traceback before.
_CHAINED = ("direct cause of the following exception:", "another exception occurred:")


def classify(evidence: Evidence) -> Failure:
    """Return what went wrong with one rank, and what shows it."""
    cause = _cause(evidence)
    module, _, name = evidence.exception.rpartition(".")
    is_own = module == "workloads.rank" and name in _OWN_EXCEPTIONS
    raised = f"{'' if is_own else evidence.exception}: {evidence.message}".strip(": ").splitlines()
    texts = (
        cause.text if "Xid" in cause.text else "",  # the driver knows best
        evidence.timed_out,
        raised[0] if raised else "",
        cause.text,
        evidence.bad_result,
        _exit_text(evidence),
    )
    detail = next((text for text in texts if text), "")
    return Failure(
        kind=cause.kind,
        message=f"rank {evidence.rank} {_what_it_did(cause.kind, evidence)}"
        + (f": {detail[:300]}" if detail else ""),
        rank=evidence.rank,
        node=evidence.node,
        phase=evidence.phase,
        step=evidence.step,
        signal=evidence.signal,
        exit_code=evidence.exit_code,
        evidence=cause.text,
        memory=_shortage(cause, evidence) if cause.kind in OUT_OF_MEMORY_KINDS else None,
        log_tail=evidence.log_tail,
        log_path=evidence.log_path,
    )


def _what_it_did(kind: FailureKind, evidence: Evidence) -> str:
    if kind is _K.HUNG and evidence.passed_total_limit:
        # It may have made progress all the time.
        at_step = f", at step {evidence.step}" if evidence.step else ""
        return f"was still in {evidence.phase}{at_step}"
    return f"{POLICIES[kind].verb} in {evidence.phase}"


def first_bad(ranks: Sequence[Evidence]) -> Failure:
    """Return the failure that caused those of the other ranks of a gang (at least one given)."""
    found = [(classify(rank), rank.at_unix_seconds) for rank in ranks]
    return min(found, key=lambda one: cause_order(*one))[0]


def cause_order(failure: Failure, at_unix_seconds: float) -> tuple[bool, bool, bool, float]:
    """Return the sort key of the failures of a gang: the one that caused the others comes first.

    An out-of-memory explains all others, whenever it was noticed. Otherwise the earliest is the
    cause; lost communication and an abort only if nothing else failed, since innocent peers of a
    dead rank die so, and a request to end last.
    """
    return (
        failure.kind is _K.CANCELLED,
        failure.kind not in OUT_OF_MEMORY_KINDS,
        is_aftermath(failure),
        at_unix_seconds,
    )


def is_aftermath(failure: Failure) -> bool:
    """Return whether the rank may be an innocent peer of one that failed before it."""
    return failure.kind in AFTERMATH_KINDS or failure.signal == signal.SIGABRT


def proves_out_of_memory(failure: Failure, *, on_cpu: bool = False) -> bool:
    """Return whether the failure proves that the layout does not fit its device.

    Layouts that need at least as much memory then need no launch. An out-of-memory inferred from a
    full device proves nothing; the host's memory is the layout's only if it trains on CPUs
    (`on_cpu`).
    """
    is_on_device = on_cpu or failure.kind is _K.OOM_GPU
    return is_on_device and failure.memory is not None and failure.memory.is_reported


def is_out_of_memory(exception: str, message: str) -> bool:
    """Return whether an exception of this class name and text reports that memory ran out."""
    cause = find_cause(f"{exception}: {message[:10_000]}")
    return cause is not None and cause.kind in OUT_OF_MEMORY_KINDS


def _shortage(cause: Cause, evidence: Evidence) -> MemoryShortage:
    """Read what the message of an out-of-memory states; the numbers are those of an allocator."""
    asked = _bytes(_ASKED, cause.text)
    part = step_part(evidence.traceback or evidence.log_tail, phase=evidence.phase)
    if asked is None:
        return MemoryShortage(is_reported=cause.is_reported, step_part=part)
    return MemoryShortage(
        is_reported=cause.is_reported,
        step_part=part,
        asked_bytes=asked,
        live_bytes=_bytes(_LIVE, cause.text),
        device_bytes=_bytes(_DEVICE, cause.text),
    )


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    return int(float(match[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(match[2]))


def _cause(evidence: Evidence) -> Cause:
    exception, message = evidence.exception, evidence.message
    if not exception and _ended_badly(evidence):
        # Without a note, the last exception in its log counts, not the noise around it.
        found = _LAST_EXCEPTION.findall(evidence.log_tail)
        exception, message = found[-1] if found else ("", "")
    said = f"{exception}: {message}" if exception else evidence.log_tail
    if evidence.not_finite is not None:
        return Cause(_K.NOT_FINITE, evidence.not_finite)
    own_kind = _OWN_EXCEPTIONS.get(exception.rpartition(".")[2])
    if own_kind is not None:
        return Cause(own_kind, said)
    memory = _memory_cause(evidence, exception, said)
    if memory is not None:
        return memory
    hardware = first_of(_xids(evidence), XidCause.DEVICE)
    if hardware is not None:
        felt = evidence.timed_out or _gist(exception, said) or _exit_text(evidence)
        return Cause(_K.XID, _with_xid(hardware, felt))
    if evidence.timed_out is not None:
        early = evidence.phase in _PHASES_BEFORE_THE_FIRST_STEP
        return Cause(_K.START_TIMEOUT if early else _K.HUNG, evidence.timed_out)
    cause = find_cause(said) if _ended_badly(evidence) else None
    if cause is not None and _DISGUISES.search(cause.text) and _near_the_memory_limit(evidence):
        used = f"{evidence.peak_memory_bytes} of {evidence.device_memory_bytes} bytes in use"
        return Cause(_K.OOM_GPU, f"{cause.text}, with {used}")
    software = first_of(_xids(evidence), XidCause.PROGRAM)
    is_felt = (
        cause.kind is _K.DEVICE_ERROR
        if cause is not None
        else not exception or "CUDA error" in said
    )
    if software is not None and is_felt:
        # The device is well; what the program did was wrong, as in a segmentation fault on the
        # host.
        felt = _gist(exception, said) or _exit_text(evidence)
        return Cause(_K.SEGFAULT, _with_xid(software, felt))
    if cause is None and _ended_badly(evidence) and _MESSENGERS.search(said):
        passed_on = find_cause(evidence.log_tail)
        cause = passed_on if passed_on is not None and passed_on.kind in _PASSED_ON else None
    if cause is not None and cause.kind not in OUT_OF_MEMORY_KINDS:
        is_warning = not exception and _signal(evidence) in _FATAL
        if not (is_warning and cause.kind in _OFTEN_ONLY_WARNINGS):
            return cause
    return Cause(_K.USER_ERROR, said[:1000]) if exception else _cause_by_exit(evidence)


def _xids(evidence: Evidence) -> tuple[int, ...]:
    """NVIDIA's errors that may have ended a rank: on its node, and in its own output."""
    if not _ended_badly(evidence) and evidence.timed_out is None:
        return ()
    text = f"{evidence.exception}: {evidence.message}\n{evidence.log_tail}"
    return (*evidence.xids, *xids_in(text))


def _with_xid(number: int, said: str) -> str:
    return f"{named(number)}: {said}" if said else named(number)


def _gist(exception: str, said: str) -> str:
    """One line of a rank's output: the first of its exception, or the last of its log."""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[0 if exception else -1][:300] if lines else ""


def _memory_cause(evidence: Evidence, exception: str, said: str) -> Cause | None:
    words = _last_words(evidence, exception, said) if _ended_badly(evidence) else ""
    cause = find_cause(words)
    if cause is not None and cause.kind in OUT_OF_MEMORY_KINDS:
        return cause
    if evidence.noted_out_of_memory:
        text = f"out of memory by the rank's failure note: {evidence.exception}: {evidence.message}"
        return Cause(_K.OOM_GPU, text[:1000], is_reported=True)
    if evidence.num_oom_kills and _signal(evidence) == signal.SIGKILL:
        return Cause(_K.OOM_HOST, f"memory.events: oom_kill +{evidence.num_oom_kills}")
    return None


def _last_words(evidence: Evidence, exception: str, said: str) -> str:
    """Return the cause in the words of the rank: its exception, and what caused that.

    Source lines and an out-of-memory that the rank survived are left out.
    """
    if evidence.exception:
        return f"{said}\n{_chain(evidence.traceback)}"
    number = _signal(evidence)
    if not exception and number is not None and number not in _CRASHES:
        return ""  # ended from outside
    cause = find_cause(said) if exception else None
    is_noise = cause is not None and cause.kind in _OFTEN_ONLY_WARNINGS
    if not exception or _MESSENGERS.search(said) or is_noise:
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


def _cause_by_exit(evidence: Evidence) -> Cause:
    number = _signal(evidence)
    if number in _CRASHES:
        return Cause(_K.SEGFAULT, _exit_text(evidence))
    if number is not None and number in _LIMITS:
        return Cause(_K.USER_ERROR, f"{_exit_text(evidence)}: {_LIMITS[number]}")
    if number is not None:
        kind = _K.PREEMPTED if number in ASKED_TO_END else _K.KILLED
        return Cause(kind, _exit_text(evidence))
    if evidence.exit_code == 0 and evidence.bad_result is not None:
        return Cause(_K.BAD_RESULT, evidence.bad_result)
    # A line of dashes or an empty line has no message.
    worded = [line.strip() for line in re.split(r"[\r\n]", evidence.log_tail) if _WORD.search(line)]
    last_line = f"{LAST_LINE}{worded[-1][-300:]}" if worded else ""
    return Cause(_K.USER_ERROR, f"{_exit_text(evidence)}{last_line}")


def _ended_badly(evidence: Evidence) -> bool:
    """Return whether the rank failed by itself.

    If it ended well without a result, hung, or was killed by us, its log is noise.
    """
    return bool(evidence.exception) or (
        evidence.timed_out is None
        and (evidence.signal is not None or evidence.exit_code not in (None, 0))
    )


def _near_the_memory_limit(evidence: Evidence) -> bool:
    peak, capacity = evidence.peak_memory_bytes, evidence.device_memory_bytes
    return peak is not None and capacity is not None and peak > AMBIGUOUS_MEMORY_FRACTION * capacity


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
