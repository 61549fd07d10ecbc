"""The kinds of failure: whose fault each is, whether to retry, what it means and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.step_part import StepPart


class FailureKind(StrEnum):
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    CONFIG_REJECTED = "config_rejected"
    NOT_FINITE = "not_finite"
    USER_ERROR = "user_error"
    SEGFAULT = "segfault"
    KILLED = "killed"
    PREEMPTED = "preempted"
    BAD_RESULT = "bad_result"
    HUNG = "hung"
    START_TIMEOUT = "start_timeout"
    NCCL = "nccl"
    DEVICE_ERROR = "device_error"
    XID = "xid"
    STORAGE = "storage"
    PORT_CLASH = "port_clash"
    LAUNCH_FAILED = "launch_failed"
    NODE_LOST = "node_lost"
    ORCHESTRATOR_LOST = "orchestrator_lost"
    EDITED = "edited"
    CANCELLED = "cancelled"


class Fault(StrEnum):
    """The cause of a failure."""

    LAYOUT = "layout"  # a result: it cannot run
    CODE = "code"  # a bug with this layout
    MACHINE = "machine"  # no result: the trial waits again
    NOBODY = "nobody"  # we ended the attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The consequences of a kind of failure, and the text that a person reads about it."""

    fault: Fault
    max_retries: int = 0  # further attempts of one trial
    # Follows the rank's number: "rank 3 ran out of device memory". Empty: no rank fails so.
    verb: str = ""
    means: str
    fix: str


# A layout that was measured well is not at fault if a repeat has numbers that cannot be true: the
# machine was slowed meanwhile, so the repeat is tried again.
MAX_BAD_REPEATS_RETRIED = 2

_K = FailureKind
POLICIES: Mapping[FailureKind, Policy] = MappingProxyType(
    {
        _K.OOM_GPU: Policy(
            fault=Fault.LAYOUT,
            verb="ran out of device memory",
            means="the device's allocator, or a library on the device, found no memory",
            fix="nothing: it is a result. `v_oom` lists what it rules out",
        ),
        # Tried once more alone; then infeasible.
        _K.OOM_HOST: Policy(
            fault=Fault.LAYOUT,
            verb="ran out of host memory",
            max_retries=1,
            means="the kernel's OOM killer, or malloc; tried once more with no other gang running",
            fix="give the node or container more memory; fewer `num_threads` or loader workers",
        ),
        _K.CONFIG_REJECTED: Policy(
            fault=Fault.LAYOUT,
            verb="refused the layout",
            means="the workload says that it cannot run this layout",
            fix="add a constraint, so that it is not tried at all",
        ),
        # The same layout would train the same numbers again.
        _K.NOT_FINITE: Policy(
            fault=Fault.LAYOUT,
            verb="diverged",
            means="the training diverged: the program reports or raises a loss or gradient norm "
            "that is NaN or infinite",
            fix="lower the learning rate or widen the precision; the message names the step",
        ),
        _K.USER_ERROR: Policy(
            fault=Fault.CODE,
            verb="failed",
            means="an exception or exit code of the program",
            fix="fix what the traceback in `sweep logs TRIAL` shows, then `sweep invalidate`",
        ),
        _K.SEGFAULT: Policy(
            fault=Fault.CODE,
            verb="crashed",
            max_retries=1,
            means="SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS; on a GPU an Xid of "
            "the driver that the program caused (13, 31, 32, 43)",
            fix="its log has Python's stack (faulthandler); often a bug of a library",
        ),
        _K.KILLED: Policy(
            fault=Fault.MACHINE,
            verb="was killed from outside",
            max_retries=2,
            means="SIGKILL from outside, and no sign of an out-of-memory",
            fix="the node's log may show what killed the rank",
        ),
        # Spot nodes may go several times; a trial that is ended each time may end itself.
        _K.PREEMPTED: Policy(
            fault=Fault.MACHINE,
            verb="was asked from outside to end",
            max_retries=3,
            means="SIGTERM, SIGINT or SIGHUP from outside, or a batch system's message: "
            "preemption, a time limit, a spot node that is withdrawn",
            fix="nothing: the trial waits; if it repeats, a longer time limit or nodes that stay. "
            "A program that ends itself with SIGTERM counts as preempted too",
        ),
        _K.BAD_RESULT: Policy(
            fault=Fault.CODE,
            verb="ended without a usable result",
            means="it ended well, but its result is not valid or breaks physics (MFU above 1); a "
            f"repeat of a measured trial is tried again, up to {MAX_BAD_REPEATS_RETRIED} times",
            fix="the message says what is wrong with it",
        ),
        # Tried once more, elsewhere or later, in case the machine caused it; then the layout did.
        _K.HUNG: Policy(
            fault=Fault.LAYOUT,
            verb="made no progress",
            max_retries=1,
            means="no progress within the phase's limit, or the limit `total` passed, after the "
            "first step began",
            fix="the message names the place, and its log ends with the stacks of all processes of"
            " each rank; if it was only slow, the message says which limit to change",
        ),
        _K.START_TIMEOUT: Policy(
            fault=Fault.LAYOUT,
            verb="did not get to its first step",
            max_retries=1,
            means="the limit of `start` or `rendezvous` passed",
            fix="a slow import or a network that does not connect; if it was only slow, the "
            "message says which limit to change",
        ),
        _K.NCCL: Policy(
            fault=Fault.MACHINE,
            verb="lost communication",
            max_retries=2,
            means="communication failed, and no rank did worse before",
            fix="`NCCL_DEBUG=INFO` before `sweep run`; the network, the firewall, `ulimit -l`, "
            "the size of /dev/shm; `nccl-trace-*` in the run folder",
        ),
        _K.DEVICE_ERROR: Policy(
            fault=Fault.MACHINE,
            verb="had its device fail",
            max_retries=1,
            means="no usable device, or an illegal access, far from the memory limit, that the "
            "driver does not explain",
            fix="`nvidia-smi`, `dmesg`; take the node out if it repeats",
        ),
        _K.XID: Policy(
            fault=Fault.MACHINE,
            verb="lost its GPU",
            max_retries=2,
            means="NVIDIA's driver reports that the hardware failed: ECC, NVLink, off the bus, "
            "firmware; the message has the number",
            fix="`dmesg` on that node; reset the GPU or take the node out. Two such trials bench "
            "the node",
        ),
        _K.STORAGE: Policy(
            fault=Fault.MACHINE,
            verb="could not read or write its files",
            max_retries=2,
            means="file system full, over quota, read-only, stale or broken; too many open files",
            fix="`df`, the quota, `ulimit -n` and the mounts of the node that it names",
        ),
        _K.PORT_CLASH: Policy(
            fault=Fault.MACHINE,
            verb="found its port taken",
            max_retries=2,
            means="a port was taken",
            fix="if the program picks its own port, let it use MASTER_PORT",
        ),
        _K.LAUNCH_FAILED: Policy(
            fault=Fault.MACHINE,
            max_retries=2,
            means="the launcher could not start the ranks, or got no nodes",
            fix="the message says why: folder, foreign process on the GPU, no slots",
        ),
        # If the same trial loses a second node, the trial itself may be what takes nodes down.
        _K.NODE_LOST: Policy(
            fault=Fault.MACHINE,
            max_retries=1,
            means="the node, or its agent, is gone",
            fix="repair the node; the sweep continues on the rest of the cluster",
        ),
        # A trial that runs at six deaths may be what takes the machine down.
        _K.ORCHESTRATOR_LOST: Policy(
            fault=Fault.MACHINE,
            max_retries=5,
            means="the attempt's orchestrator was killed; found by the next `sweep run`",
            fix="nothing: the trial waits again; if it failed, check whether it takes the machine "
            "down, then `sweep invalidate`",
        ),
        _K.CANCELLED: Policy(
            fault=Fault.NOBODY,
            means="ended by Ctrl-C, SIGTERM, a closed terminal or `sweep cancel`",
            fix="nothing: the next `sweep run` runs it again",
        ),
        # A person seldom edits the program in three starts of one trial. Without an end, one that
        # writes its own sources would run for ever.
        _K.EDITED: Policy(
            fault=Fault.CODE,
            max_retries=2,
            means="the program was edited between the attempt's start and the first check for "
            "edits after its first step, so it is not known which code ran",
            fix="nothing after an edit of yours: it runs again; if several made it fail, "
            "`sweep invalidate`. A program that changes its own sources fails so each time: let it "
            "write under `{run_dir}`",
        ),
    }
)
# Rules for several kinds use these sets. A rule for one kind alone is where it applies.
OUT_OF_MEMORY_KINDS = frozenset({_K.OOM_GPU, _K.OOM_HOST})
HANG_KINDS = frozenset({_K.HUNG, _K.START_TIMEOUT})
# The attempt was lost with its node or orchestrator, or taken away. `v_gpu_seconds` repeats this
# set and OUT_OF_MEMORY_KINDS.
LOST_KINDS = frozenset({_K.NODE_LOST, _K.ORCHESTRATOR_LOST, _K.PREEMPTED})
# A rank also fails so if another rank failed before it.
AFTERMATH_KINDS = frozenset({_K.NCCL})
# The node is at fault, also in a gang of several. Ranks wait for each other, so other kinds may
# name a node that only waited.
NODE_KINDS = frozenset(
    {_K.DEVICE_ERROR, _K.XID, _K.NODE_LOST, _K.LAUNCH_FAILED, _K.STORAGE, _K.KILLED}
)
# The node may be at fault if the whole gang is on it.
ONE_NODE_KINDS = AFTERMATH_KINDS | HANG_KINDS
# The machine may have caused these; a hang does not show its cause. The query `@flaky_nodes`
# repeats them.
SUSPECT_KINDS = frozenset(
    {kind for kind, policy in POLICIES.items() if policy.fault is Fault.MACHINE} | HANG_KINDS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """Facts about memory that ran out. Unknown is None."""

    # An allocator, a library of the device or the rank itself reports it: it proves that the layout
    # does not fit. False: it is inferred, or was caused by another process.
    is_reported: bool = False
    asked_bytes: int | None = None  # by the allocation that failed
    live_bytes: int | None = None  # by tensors, at that moment
    device_bytes: int | None = None  # the device's memory
    # Where in a step it ran out.
    step_part: StepPart | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of the first bad rank of an attempt, and its evidence."""

    kind: FailureKind
    message: str  # one line for a person
    rank: int | None = None
    node: str | None = None
    phase: str | None = None
    step: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    evidence: str = ""  # the matched text
    memory: MemoryShortage | None = None  # None: no out-of-memory
    log_tail: str = ""
    log_path: str = ""


def may_retry(kind: FailureKind, earlier: Mapping[FailureKind, int]) -> bool:
    """Return whether a trial is worth another attempt after a failure of this kind.

    `earlier` counts its failed attempts before this one, by kind.
    """
    return earlier.get(kind, 0) < POLICIES[kind].max_retries


def event_after(kind: FailureKind, earlier: Mapping[FailureKind, int]) -> TrialEvent:
    """Return the event of a trial whose attempt failed so; a cancelled trial always waits again.

    `earlier` counts its failed attempts before this one, by kind. This is the only rule, for an end
    that a scheduler reports, that a spool kept, or that a dead orchestrator left.
    """
    if kind is FailureKind.CANCELLED or may_retry(kind, earlier):
        return TrialEvent.REQUEUED
    return TrialEvent.OUT_OF_MEMORY if kind in OUT_OF_MEMORY_KINDS else TrialEvent.FAILED


def event_after_repeat(kind: FailureKind, earlier: Mapping[FailureKind, int]) -> TrialEvent:
    """Return the event of a measured trial whose repeat failed so; REQUEUED: it may be repeated.

    `earlier` counts its failed repeats before this one, by kind.
    """
    if kind is FailureKind.BAD_RESULT and earlier.get(kind, 0) < MAX_BAD_REPEATS_RETRIED:
        return TrialEvent.REQUEUED
    return event_after(kind, earlier)
