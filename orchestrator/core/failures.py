"""What went wrong, whose fault it is, and whether to try again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class FailureKind(StrEnum):
    OOM_GPU = "oom_gpu"  # the device's allocator, or a library's allocation on the device, gave up
    OOM_HOST = "oom_host"  # the kernel's OOM killer, or malloc
    CONFIG_REJECTED = "config_rejected"  # the workload says that it cannot run this layout
    USER_ERROR = "user_error"  # an exception or exit code of the program
    SEGFAULT = "segfault"  # SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT
    KILLED = "killed"  # SIGKILL or SIGTERM from outside, no sign of memory
    BAD_RESULT = "bad_result"  # ended well, but what it wrote is no result
    HUNG = "hung"  # no progress within the phase's limit
    START_TIMEOUT = "start_timeout"  # never got as far as its first step: start or rendezvous limit
    NCCL = "nccl"  # communication failed with nobody else to blame
    PORT_CLASH = "port_clash"
    LAUNCH_FAILED = "launch_failed"  # the launcher could not start the ranks
    NODE_LOST = "node_lost"
    ORCHESTRATOR_LOST = "orchestrator_lost"  # the attempt's orchestrator died; found at the next start
    CANCELLED = "cancelled"


class Fault(StrEnum):
    """Whose fault a failure is."""

    LAYOUT = "layout"  # a result: the layout does not fit, or is refused
    CODE = "code"  # the program's bug, with this layout at least
    MACHINE = "machine"  # no result: the trial waits again
    NOBODY = "nobody"  # we ended it


@dataclass(frozen=True, slots=True)
class Policy:
    fault: Fault
    max_retries: int  # further attempts this kind may cause for one trial


_K = FailureKind
POLICIES: Mapping[FailureKind, Policy] = MappingProxyType(
    {
        _K.OOM_GPU: Policy(Fault.LAYOUT, 0),
        _K.OOM_HOST: Policy(Fault.LAYOUT, 1),  # once more alone; then infeasible
        _K.CONFIG_REJECTED: Policy(Fault.LAYOUT, 0),
        _K.USER_ERROR: Policy(Fault.CODE, 0),
        _K.SEGFAULT: Policy(Fault.CODE, 1),
        _K.KILLED: Policy(Fault.MACHINE, 2),
        _K.BAD_RESULT: Policy(Fault.CODE, 0),
        _K.HUNG: Policy(Fault.MACHINE, 1),
        _K.START_TIMEOUT: Policy(Fault.MACHINE, 1),
        _K.NCCL: Policy(Fault.MACHINE, 2),
        _K.PORT_CLASH: Policy(Fault.MACHINE, 2),
        _K.LAUNCH_FAILED: Policy(Fault.MACHINE, 2),
        _K.NODE_LOST: Policy(Fault.MACHINE, 2),
        _K.ORCHESTRATOR_LOST: Policy(Fault.MACHINE, 1_000_000),  # says nothing about the layout, however often
        _K.CANCELLED: Policy(Fault.NOBODY, 0),
    }
)

OUT_OF_MEMORY_KINDS = frozenset({FailureKind.OOM_GPU, FailureKind.OOM_HOST})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first bad rank of an attempt, and what shows it."""

    kind: FailureKind
    message: str  # one line for a person
    rank: int | None = None
    node: str | None = None
    phase: str | None = None
    step: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    evidence: str = ""  # the matched text
    log_tail: str = ""
    log_path: str = ""


def may_retry(kind: FailureKind, earlier: Mapping[FailureKind, int]) -> bool:
    """Say whether a trial that failed so is worth another attempt; `earlier` counts its failed attempts by kind, this one included."""
    return earlier.get(kind, 0) <= POLICIES[kind].max_retries
