"""Judges the facts of nodes: which nodes are fit to measure on, and which differ from the others.

`orchestrator/node/probe.py` collects the facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from orchestrator.core.machines.check import Check, Status, fail, ok, warn
from orchestrator.core.problem.hardware import GIB, from_driver_name
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.xid import XIDS, Xid, XidCause, named

MIN_FREE_BYTES, GOOD_FREE_BYTES = 200 << 20, 5 << 30  # logs take 10 MB per rank
# A driver alone uses this much of a GPU's memory: 0.6 of 80 GiB, more of more.
BASELINE_BYTES, BASELINE_SHARE = GIB, 0.01
CLOCK_SKEW_SECONDS = 2.0
# ECC errors since the driver was loaded. One corrected error is harmless; this many predict
# uncorrected ones.
MANY_CORRECTED = 1000
# Devices: with two it is unknown which of them is wrong.
ENOUGH_OF_A_KIND = 3
# Shares of the median of its kind: GPUs of one kind agree within 2-3 % in large matrix products.
SLOW_GPU, UNFIT_GPU = 0.95, 0.85
# Other programs share the cores, so a slow CPU is only a warning.
SLOW_CPU = 0.7
# Share of the data sheet: well-fed large products reach 0.65-0.85 on A100, H100 and H200.
EXPECTED_OF_PEAK = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """Facts about one GPU, from its driver and a matrix product. Unknown is None."""

    index: str
    name: str | None = None
    processes: tuple[str, ...] = ()  # compute processes on it, in words
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    ecc_corrected: int | None = None
    row_remap_pending: bool | None = None  # the next reset replaces memory rows
    row_remap_failed: bool | None = None
    matmul_flops: float | None = None  # per second
    matmul_error: str | None = None  # why a matrix product failed


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Facts that one node reports about itself. Unknown is None; `unread` has the reasons."""

    node: str  # the scheduler's name for it
    host: str
    boot_id: str | None = None  # equal if one machine simulates several
    kernel: str | None = None
    python: str | None = None
    # Name to version; None: not installed.
    packages: Mapping[str, str | None] = field(default_factory=dict)
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    # NVIDIA's error numbers in the kernel log of the last day, with their counts.
    xids: Mapping[int, int] | None = None
    cpu_name: str | None = None
    num_cores: int | None = None
    cpu_matmul_flops: float | None = None  # per second, all cores together
    free_disk_bytes: int | None = None  # for run folders
    home: str | None = None  # SWEEP_HOME there, which has them
    disk_error: str | None = None  # why run folders cannot be written
    clock_offset_seconds: float | None = None  # ahead of the head's clock
    clock_uncertainty_seconds: float | None = None  # half the measurement's round trip
    unread: tuple[str, ...] = ()


def baseline_bytes(total_bytes: int) -> int:
    """Return how much memory an idle GPU's driver may use. If more is used, a process uses it."""
    return max(BASELINE_BYTES, int(BASELINE_SHARE * total_bytes))


def judge_nodes(
    nodes: Sequence[NodeFacts], *, own: Mapping[str, str | None] | None = None
) -> dict[str, tuple[Check, ...]]:
    """Return the checks of each node, by its name. A node with a failed check must not be used.

    `own`: versions on this machine, which decide if the nodes are split evenly.
    """
    agreed = {
        name: _agreed([versions_of(node).get(name) for node in nodes], (own or {}).get(name))
        for name in _COMPARED
    }
    kinds: dict[str, list[float]] = {}
    for node in nodes:
        for kind, flops in _matmuls(node).values():
            kinds.setdefault(kind, []).append(flops)
    return {
        node.node: (
            *(check(node) for check in _ALONE),
            _matmul(node, kinds),
            _versions(node, agreed),
        )
        for node in nodes
    }


def unfit(checks: Iterable[Check]) -> str | None:
    """Return why a node with these checks must not be used; None: it is fit."""
    failed = [f"{check.name}: {check.found}" for check in checks if check.status is Status.FAIL]
    return "; ".join(failed) or None


def versions_of(node: NodeFacts) -> dict[str, str | None]:
    """Return what is compared between nodes, by name."""
    names = ("python", "kernel", "driver", "cuda", "nccl")
    return {**{name: getattr(node, name) for name in names}, **node.packages}


# -- a node alone ----------------------------------------------------------------------------------


def _gpus(node: NodeFacts) -> Check:
    if not node.gpus:
        return ok("gpus", f"none; {node.num_cores or 'unknown'} cores")
    names = Counter(gpu.name or "unknown" for gpu in node.gpus)
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    in_use = [
        f"GPU {gpu.index} is held by {', '.join(gpu.processes)}"
        for gpu in node.gpus
        if gpu.processes
    ]
    in_use += [text for gpu in node.gpus if not gpu.processes for text in _unexplained(gpu)]
    if in_use:
        advice = "end what runs there: it disturbs measurements and takes memory from layouts"
        return fail("gpus", "; ".join((found, *in_use)), advice)
    if len(names) > 1:
        return warn("gpus", found, "GPUs of one node differ: the slowest is measured")
    return ok("gpus", f"{found}, clean")


def _unexplained(gpu: GpuFacts) -> list[str]:
    """Memory that no visible process uses: another container's, or not yet freed by the driver."""
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if used is None or total is None or used <= baseline_bytes(total):
        return []
    return [f"GPU {gpu.index} has {used / GIB:.1f} GiB in use by no process that can be seen"]


def _ecc(node: NodeFacts) -> Check:
    bad, doubtful = [], []
    for gpu in node.gpus:
        if gpu.ecc_uncorrected:
            bad.append(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected")
        if gpu.row_remap_failed:
            bad.append(f"GPU {gpu.index}: a memory row could not be replaced")
        if (gpu.ecc_corrected or 0) >= MANY_CORRECTED:
            doubtful.append(f"GPU {gpu.index}: {gpu.ecc_corrected} corrected")
        if gpu.row_remap_pending:
            doubtful.append(f"GPU {gpu.index}: memory rows wait to be replaced")
    if bad:
        return fail("ecc", "; ".join(bad), "drain the node, reset the GPU, and test its memory")
    if doubtful:
        advice = "reset the GPU when nothing runs (nvidia-smi -r)"
        return warn("ecc", "; ".join(doubtful), advice)
    known = any(gpu.ecc_uncorrected is not None for gpu in node.gpus)
    return ok("ecc", "no errors" if known else "unknown" if node.gpus else "no GPU")


def _xids(node: NodeFacts) -> Check:
    if node.xids is None:
        return ok("xid", "unknown: the kernel log cannot be read" if node.gpus else "no GPU")
    statuses = {
        number: status
        for number in sorted(node.xids)
        if number in XIDS and (status := _status_of(XIDS[number])) is not Status.OK
    }
    if not statuses:
        return ok("xid", "none in the last day")
    report = fail if Status.FAIL in statuses.values() else warn
    found = ", ".join(f"{node.xids[number]} x {named(number)}" for number in statuses)
    advice = "`dmesg` on that node has the GPU's bus address; reset it, or take it out"
    return report("xid", found, advice)


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
        return fail("disk", node.disk_error, "run folders go there: repair it, or set SWEEP_HOME")
    if node.free_disk_bytes is None:
        return warn("disk", "unknown")
    place = "" if node.home is None else f" in {node.home}"
    found = f"{node.free_disk_bytes / GIB:.1f} GiB free{place}"
    advice = "logs and results go to this folder: free some space, or set SWEEP_HOME to another"
    if node.free_disk_bytes < MIN_FREE_BYTES:
        return fail("disk", f"{found}; {MIN_FREE_BYTES / GIB:.1f} GiB are needed", advice)
    if node.free_disk_bytes < GOOD_FREE_BYTES:
        return warn("disk", f"{found}, less than {GOOD_FREE_BYTES / GIB:.0f}", advice)
    return ok("disk", found)


def _clock(node: NodeFacts) -> Check:
    offset, uncertainty = node.clock_offset_seconds, node.clock_uncertainty_seconds or 0.0
    if offset is None:
        return warn("clock", "unknown")
    found = f"{offset:+.3f} s against the head, known to {uncertainty:.3f} s"
    if abs(offset) - uncertainty <= CLOCK_SKEW_SECONDS:
        return ok("clock", found)
    advice = (
        "synchronise the clocks (chrony, ntp): logs of different nodes cannot be compared, and "
        "tokens expire early"
    )
    return warn("clock", found, advice)


_ALONE: tuple[Callable[[NodeFacts], Check], ...] = (_gpus, _ecc, _xids, _disk, _clock)


# -- a node compared with the others ---------------------------------------------------------------


def _matmuls(node: NodeFacts) -> dict[str, tuple[str, float]]:
    """Kind and FLOP/s of each device of a node with a matrix product, by the device's name."""
    if node.gpus:
        return {
            f"GPU {gpu.index}": (gpu.name or "GPU", gpu.matmul_flops)
            for gpu in node.gpus
            if gpu.matmul_flops is not None
        }
    if node.cpu_matmul_flops is None:
        return {}
    kind = f"{node.num_cores} cores {node.cpu_name or 'unknown'}"
    return {"cores": (kind, node.cpu_matmul_flops)}


def _matmul(node: NodeFacts, kinds: Mapping[str, Sequence[float]]) -> Check:
    broken = [
        f"GPU {gpu.index}: {gpu.matmul_error}" for gpu in node.gpus if gpu.matmul_error is not None
    ]
    if broken:
        return fail("matmul", "; ".join(broken), "reset the GPU, or take the node out")
    tried = _matmuls(node)
    if not tried:
        return ok("matmul", "not tried")
    rates = [flops for _, flops in tried.values()]
    found = f"{min(rates) / 1e12:.3g} TFLOP/s"
    if len(rates) > 1:
        found = f"{min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s per GPU"
    slow, unfit = (SLOW_GPU, UNFIT_GPU) if node.gpus else (SLOW_CPU, 0.0)
    of_median = {
        name: flops / median(kinds[kind])
        for name, (kind, flops) in tried.items()
        if len(kinds[kind]) >= ENOUGH_OF_A_KIND
    }
    off = {name: share for name, share in of_median.items() if share < slow}
    if off:
        told = ", ".join(
            f"{name} at {share:.0%} of the median of its kind" for name, share in off.items()
        )
        report = fail if min(off.values()) < unfit else warn
        on_gpu = "heat, a power cap or a neighbour: nvidia-smi -q -d PERFORMANCE,CLOCK"
        advice = on_gpu if node.gpus else "is something else running there?"
        return report("matmul", f"{found}; {told}", advice)
    short = {
        name: share
        for name, (kind, flops) in tried.items()
        if (share := _of_data_sheet(kind, flops)) is not None and share < EXPECTED_OF_PEAK
    }
    if short:
        told = ", ".join(
            f"{name} at {share:.0%} of its data sheet" for name, share in short.items()
        )
        return warn("matmul", f"{found}; {told}", "a power cap, or clocks that are locked low?")
    return ok("matmul", found)


def _of_data_sheet(kind: str, flops: float) -> float | None:
    hardware = from_driver_name(kind)
    peak = hardware.peak_flops.get(Precision.BF16) if hardware is not None else None
    return flops / peak if peak is not None else None


# These must be the same on all nodes of a sweep; the status is that of a node that differs. A gang
# with two NCCLs hangs or computes nonsense. With two drivers or kernels it runs, but its numbers
# are not comparable.
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
    """The value of most nodes; of equally frequent ones this machine's, else the first."""
    counts = Counter(values)
    most = max(counts.values(), default=0)
    frequent = [value for value in counts if counts[value] == most]
    return own if own in frequent else next(iter(frequent), None)


def _versions(node: NodeFacts, agreed: Mapping[str, str | None]) -> Check:
    versions = versions_of(node)
    differs = {name: versions.get(name) for name in _COMPARED if versions.get(name) != agreed[name]}
    if not differs:
        names = ("python", "ray", "torch", "cuda", "nccl", "driver")
        known = [f"{name} {versions[name]}" for name in names if versions.get(name) is not None]
        return ok("versions", ", ".join(known))
    found = ", ".join(
        f"{name} {version or 'absent'}, elsewhere {agreed[name] or 'absent'}"
        for name, version in differs.items()
    )
    report = fail if any(_COMPARED[name] is Status.FAIL for name in differs) else warn
    return report("versions", found, "install the same environment on every node")


# -- the kernel's log ------------------------------------------------------------------------------

# In /dev/kmsg: level, number, microseconds since boot; text. The address is `PCI:0000:3b:00`.
_RECORD = re.compile(r"\d+,\d+,(\d+),[^;]*;.*?NVRM: Xid \(([^)]*)\): (\d+)")


def xids_since(
    records: Iterable[str], microseconds: float, *, addresses: Collection[str] | None = None
) -> dict[int, int]:
    """Count NVIDIA's errors in a kernel's log, from `microseconds` after the boot on.

    `addresses`: only those of these devices, by bus address such as `0000:3b:00`; None: of all.
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
