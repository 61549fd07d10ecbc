"""What nodes say of themselves, and what that means: which of them are fit to measure on, and which differ from the others.

Values in, checks out. It asks nothing of a machine: `orchestrator/node/probe.py` does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from orchestrator.core.machines.check import Check, Status
from orchestrator.core.problem.hardware import GIB, from_driver_name
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.xid import XIDS, Xid, XidCause, named

MIN_FREE_BYTES, GOOD_FREE_BYTES = 200 << 20, 5 << 30  # a trial's logs are capped at 10 MB per rank
BASELINE_BYTES, BASELINE_SHARE = (
    GIB,
    0.01,
)  # of a GPU's memory, held by its driver while no process runs: 0.6 of 80 GiB, more of more
CLOCK_SKEW_SECONDS = 2.0
MANY_CORRECTED = 1000  # ECC errors that cost nothing one by one; so many since the driver was loaded announce worse
ENOUGH_OF_A_KIND = 3  # devices: of two that differ nobody knows which one is off
SLOW_GPU, SICK_GPU = (
    0.95,
    0.85,
)  # of the median of its kind: GPUs of one kind agree within 2-3 % in large matrix products
SLOW_CPU = 0.7  # cores are shared with whatever else runs there, so a slow one is told and no more
EXPECTED_OF_PEAK = (
    0.5  # of the data sheet: well-fed large products reach 0.65-0.85 on A100, H100 and H200
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """One GPU, as its driver and a matrix product show it. Unknown is None."""

    index: str
    name: str | None = None
    processes: tuple[str, ...] = ()  # compute processes that hold it, in words
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    ecc_corrected: int | None = None
    row_remap_pending: bool | None = None  # memory rows wait to be replaced, at the next reset
    row_remap_failed: bool | None = None
    matmul_flops: float | None = None  # per second
    matmul_error: str | None = None  # why it could not do one


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What one node said of itself. Unknown is None; why something is unknown stands in `unread`."""

    node: str  # as the scheduler calls it
    host: str
    boot_id: str | None = None  # the same on two nodes: they are simulated on one machine
    kernel: str | None = None
    python: str | None = None
    packages: Mapping[str, str | None] = field(
        default_factory=dict
    )  # name -> version; None: not installed
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    xids: Mapping[int, int] | None = (
        None  # NVIDIA's error numbers in the kernel log of the last day, and how often
    )
    cpu_name: str | None = None
    num_cores: int | None = None
    cpu_matmul_flops: float | None = None  # per second, all cores together
    free_disk_bytes: int | None = None  # where run folders go
    disk_error: str | None = None  # why nothing can be written there
    clock_offset_seconds: float | None = None  # ahead of the head's clock
    clock_uncertainty_seconds: float | None = None  # half the round trip that showed it
    unread: tuple[str, ...] = ()


def baseline_bytes(total_bytes: int) -> int:
    """What an idle GPU's driver may hold of its memory: more than that is held by somebody."""
    return max(BASELINE_BYTES, int(BASELINE_SHARE * total_bytes))


def judge_nodes(
    nodes: Sequence[NodeFacts], *, own: Mapping[str, str | None] | None = None
) -> dict[str, tuple[Check, ...]]:
    """The checks of each node, by its name: each one alone, then beside the others.

    `own`: versions on the machine that asks, which decide where the nodes are split evenly. A node with a failed check is not to be used.
    """
    agreed = {
        name: _agreed([versions_of(node).get(name) for node in nodes], (own or {}).get(name))
        for name in _COMPARED
    }
    kinds = _matmuls_by_kind(nodes)
    return {
        node.node: (
            *(check(node) for check in _ALONE),
            _matmul(node, kinds),
            _versions(node, agreed),
        )
        for node in nodes
    }


def unfit(checks: Iterable[Check]) -> str | None:
    """Why a node with these checks is not to be used; None: it is fit."""
    failed = [f"{check.name}: {check.found}" for check in checks if check.status is Status.FAIL]
    return "; ".join(failed) or None


def versions_of(node: NodeFacts) -> dict[str, str | None]:
    """What is compared between nodes, by name."""
    return {
        "python": node.python,
        "kernel": node.kernel,
        "driver": node.driver,
        "cuda": node.cuda,
        "nccl": node.nccl,
        **node.packages,
    }


# -- a node alone ------------------------------------------------------------------------------------------------------------------


def _gpus(node: NodeFacts) -> Check:
    if not node.gpus:
        return Check(
            name="gpus", status=Status.OK, found=f"none; {node.num_cores or 'unknown'} cores"
        )
    names = Counter(gpu.name or "unknown" for gpu in node.gpus)
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    held = [
        f"GPU {gpu.index} is held by {', '.join(gpu.processes)}"
        for gpu in node.gpus
        if gpu.processes
    ]
    held += [
        said for gpu in node.gpus if not gpu.processes and (said := _unexplained(gpu)) is not None
    ]
    if held:
        advice = "end what runs there: it disturbs what is measured, and takes memory that a layout needs"
        return Check(
            name="gpus", status=Status.FAIL, found=f"{found}; {'; '.join(held)}", advice=advice
        )
    if len(names) > 1:
        return Check(
            name="gpus",
            status=Status.WARN,
            found=found,
            advice="GPUs of one node differ: what is measured is the slowest",
        )
    return Check(name="gpus", status=Status.OK, found=f"{found}, clean")


def _unexplained(gpu: GpuFacts) -> str | None:
    """Memory that no process which can be seen holds: one in another container, or a driver that has not taken it back."""
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return None
    if gpu.memory_used_bytes <= baseline_bytes(gpu.memory_total_bytes):
        return None
    return f"GPU {gpu.index} has {gpu.memory_used_bytes / GIB:.1f} GiB in use by no process that can be seen"


def _ecc(node: NodeFacts) -> Check:
    bad = [
        f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected"
        for gpu in node.gpus
        if gpu.ecc_uncorrected
    ]
    bad += [
        f"GPU {gpu.index}: a memory row could not be replaced"
        for gpu in node.gpus
        if gpu.row_remap_failed
    ]
    if bad:
        return Check(
            name="ecc",
            status=Status.FAIL,
            found="; ".join(bad),
            advice="drain the node, reset the GPU, and test its memory",
        )
    doubtful = [
        f"GPU {gpu.index}: {gpu.ecc_corrected} corrected"
        for gpu in node.gpus
        if (gpu.ecc_corrected or 0) >= MANY_CORRECTED
    ]
    doubtful += [
        f"GPU {gpu.index}: memory rows wait to be replaced"
        for gpu in node.gpus
        if gpu.row_remap_pending
    ]
    if doubtful:
        return Check(
            name="ecc",
            status=Status.WARN,
            found="; ".join(doubtful),
            advice="reset the GPU when nothing runs (nvidia-smi -r)",
        )
    known = any(gpu.ecc_uncorrected is not None for gpu in node.gpus)
    return Check(
        name="ecc",
        status=Status.OK,
        found="no errors" if known else "unknown" if node.gpus else "no GPU",
    )


def _xids(node: NodeFacts) -> Check:
    if node.xids is None:
        return Check(
            name="xid",
            status=Status.OK,
            found="unknown: the kernel log cannot be read" if node.gpus else "no GPU",
        )
    known = {
        number: count
        for number, count in sorted(node.xids.items())
        if number in XIDS and _status_of(XIDS[number]) is not Status.OK
    }
    if not known:
        return Check(name="xid", status=Status.OK, found="none in the last day")
    status = (
        Status.FAIL
        if any(_status_of(XIDS[number]) is Status.FAIL for number in known)
        else Status.WARN
    )
    found = ", ".join(f"{count} x {named(number)}" for number, count in known.items())
    return Check(
        name="xid",
        status=status,
        found=found,
        advice="`dmesg` on that node has the GPU's bus address; reset it, or take it out",
    )


def _status_of(xid: Xid) -> Status:
    """The status of a node whose kernel log has this error in the last day."""
    match xid.cause:
        case XidCause.DEVICE:
            return Status.WARN if xid.is_contained else Status.FAIL
        case XidCause.NOTICE:
            return Status.WARN
        case _:
            return Status.OK


def _disk(node: NodeFacts) -> Check:
    if node.disk_error is not None:
        return Check(
            name="disk",
            status=Status.FAIL,
            found=node.disk_error,
            advice="run folders go there: mend it, or set SWEEP_HOME",
        )
    if node.free_disk_bytes is None:
        return Check(name="disk", status=Status.WARN, found="unknown")
    found = f"{node.free_disk_bytes / GIB:.1f} GiB free"
    if node.free_disk_bytes >= GOOD_FREE_BYTES:
        return Check(name="disk", status=Status.OK, found=found)
    too_little = node.free_disk_bytes < MIN_FREE_BYTES
    found += (
        f", of {MIN_FREE_BYTES / GIB:.1f} that are needed"
        if too_little
        else f", less than {GOOD_FREE_BYTES / GIB:.0f}"
    )
    status = Status.FAIL if too_little else Status.WARN
    return Check(
        name="disk",
        status=status,
        found=found,
        advice="logs and results go to SWEEP_HOME there: make room",
    )


def _clock(node: NodeFacts) -> Check:
    if node.clock_offset_seconds is None:
        return Check(name="clock", status=Status.WARN, found="unknown")
    found = f"{node.clock_offset_seconds:+.3f} s against the head, known to {node.clock_uncertainty_seconds or 0.0:.3f} s"
    if (
        abs(node.clock_offset_seconds) - (node.clock_uncertainty_seconds or 0.0)
        > CLOCK_SKEW_SECONDS
    ):
        advice = "synchronise the clocks (chrony, ntp): logs of nodes cannot be laid beside each other, and tokens expire early"
        return Check(name="clock", status=Status.WARN, found=found, advice=advice)
    return Check(name="clock", status=Status.OK, found=found)


_ALONE: tuple[Callable[[NodeFacts], Check], ...] = (_gpus, _ecc, _xids, _disk, _clock)


# -- a node beside the others ------------------------------------------------------------------------------------------------------


def _matmuls_by_kind(nodes: Sequence[NodeFacts]) -> dict[str, list[float]]:
    """FLOP/s of every device that was tried, by what it is."""
    found: dict[str, list[float]] = {}
    for node in nodes:
        for kind, flops in _matmuls(node).values():
            found.setdefault(kind, []).append(flops)
    return found


def _matmuls(node: NodeFacts) -> dict[str, tuple[str, float]]:
    """Kind and FLOP/s of each device of a node that was tried, by how it is called."""
    if not node.gpus:
        return (
            {}
            if node.cpu_matmul_flops is None
            else {"cores": (_kind_of_cores(node), node.cpu_matmul_flops)}
        )
    return {
        f"GPU {gpu.index}": (gpu.name or "GPU", gpu.matmul_flops)
        for gpu in node.gpus
        if gpu.matmul_flops is not None
    }


def _kind_of_cores(node: NodeFacts) -> str:
    return f"{node.num_cores} cores {node.cpu_name or 'unknown'}"


def _matmul(node: NodeFacts, kinds: Mapping[str, Sequence[float]]) -> Check:
    broken = [
        f"GPU {gpu.index}: {gpu.matmul_error}" for gpu in node.gpus if gpu.matmul_error is not None
    ]
    if broken:
        return Check(
            name="matmul",
            status=Status.FAIL,
            found="; ".join(broken),
            advice="reset the GPU, or take the node out",
        )
    tried = _matmuls(node)
    if not tried:
        return Check(name="matmul", status=Status.OK, found="not tried")
    rates = [flops for _, flops in tried.values()]
    found = (
        f"{_tera(min(rates))} TFLOP/s"
        if len(rates) == 1
        else f"{_tera(min(rates))} to {_tera(max(rates))} TFLOP/s per GPU"
    )
    slow, sick = (SLOW_GPU, SICK_GPU) if node.gpus else (SLOW_CPU, 0.0)
    of_median = {
        name: flops / median(kinds[kind])
        for name, (kind, flops) in tried.items()
        if len(kinds[kind]) >= ENOUGH_OF_A_KIND
    }
    off = {name: share for name, share in of_median.items() if share < slow}
    if off:
        status = Status.FAIL if min(off.values()) < sick else Status.WARN
        told = ", ".join(
            f"{name} at {share:.0%} of the median of its kind" for name, share in off.items()
        )
        advice = (
            "heat, a power cap or a neighbour: nvidia-smi -q -d PERFORMANCE,CLOCK"
            if node.gpus
            else "is something else running there?"
        )
        return Check(name="matmul", status=status, found=f"{found}; {told}", advice=advice)
    short = {
        name: share
        for name, (kind, flops) in tried.items()
        if (share := _of_data_sheet(kind, flops)) is not None
    }
    if any(share < EXPECTED_OF_PEAK for share in short.values()):
        told = ", ".join(
            f"{name} at {share:.0%} of its data sheet"
            for name, share in short.items()
            if share < EXPECTED_OF_PEAK
        )
        return Check(
            name="matmul",
            status=Status.WARN,
            found=f"{found}; {told}",
            advice="a power cap, or clocks that are locked low?",
        )
    return Check(name="matmul", status=Status.OK, found=found)


def _of_data_sheet(kind: str, flops: float) -> float | None:
    hardware = from_driver_name(kind)
    peak = hardware.peak_flops.get(Precision.BF16) if hardware is not None else None
    return flops / peak if peak is not None else None


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g}"


# What has to be the same on all nodes of a sweep, and how bad it is where it is not. One gang of two NCCLs hangs or lies; two drivers
# or kernels run it, and its numbers are comparable with nobody's.
_COMPARED: Mapping[str, Status] = MappingProxyType(
    {
        "layout-sweep": Status.FAIL,
        "code": Status.FAIL,
        "python": Status.FAIL,
        "ray": Status.FAIL,
        "torch": Status.FAIL,
        "cuda": Status.FAIL,
        "nccl": Status.FAIL,
        "pydantic": Status.WARN,
        "numpy": Status.WARN,
        "driver": Status.WARN,
        "kernel": Status.WARN,
    }
)
COMPARED_PACKAGES = tuple(
    name for name in _COMPARED if name not in ("code", "python", "cuda", "nccl", "driver", "kernel")
)


def _agreed(values: Sequence[str | None], own: str | None) -> str | None:
    """What most nodes have; where two are as frequent, what this machine has, else the first of them."""
    counts = Counter(values)
    most = max(counts.values(), default=0)
    frequent = [value for value in counts if counts[value] == most]
    return own if own in frequent else next(iter(frequent), None)


def _versions(node: NodeFacts, agreed: Mapping[str, str | None]) -> Check:
    versions = versions_of(node)
    differs = {name: versions.get(name) for name in _COMPARED if versions.get(name) != agreed[name]}
    if not differs:
        known = {
            name: version
            for name in ("python", "ray", "torch", "cuda", "nccl", "driver")
            if (version := versions.get(name)) is not None
        }
        return Check(
            name="versions",
            status=Status.OK,
            found=", ".join(f"{name} {version}" for name, version in known.items()),
        )
    found = ", ".join(
        f"{name} {version or 'absent'}, elsewhere {agreed[name] or 'absent'}"
        for name, version in differs.items()
    )
    status = Status.FAIL if any(_COMPARED[name] is Status.FAIL for name in differs) else Status.WARN
    return Check(
        name="versions",
        status=status,
        found=found,
        advice="install the same environment on every node",
    )


# -- the kernel's log --------------------------------------------------------------------------------------------------------------

# Of /dev/kmsg: level, number, microseconds since boot; text. The address is `PCI:0000:3b:00`.
_RECORD = re.compile(r"\d+,\d+,(\d+),[^;]*;.*?NVRM: Xid \(([^)]*)\): (\d+)")


def xids_since(
    records: Iterable[str], microseconds: float, *, addresses: Collection[str] | None = None
) -> dict[int, int]:
    """How often each of NVIDIA's errors stands in a kernel's log, from so many microseconds after the boot on.

    `addresses`: only of these devices, by their places on the bus, such as `0000:3b:00`; None: of all.
    """
    found = (match for record in records if (match := _RECORD.match(record)) is not None)
    return dict(
        Counter(
            int(match[3])
            for match in found
            if int(match[1]) >= microseconds
            and (addresses is None or match[2].removeprefix("PCI:").lower() in addresses)
        )
    )
