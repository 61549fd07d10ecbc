"""Collects what `core/machines/node_health.py` judges, from this machine's GPUs to its clock.

Plain Python, no Ray: it runs in an actor on each node of a cluster, or here. It leaves no process:
what needs torch, or the GPUs, runs in one that ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from layout_sweep.start import OWN_PACKAGES, command
from orchestrator.core.machines.node_health import (
    COMPARED_PACKAGES,
    GpuFacts,
    NodeFacts,
    baseline_bytes,
    xids_since,
)
from orchestrator.node.gpu_monitor import driver_version, gpu_facts
from orchestrator.node.kernel_log import kernel_records
from orchestrator.node.processes import LAUNCHER_VARIABLE, launcher_identity

# Added to the time of the products: importing torch from a cold network file system takes minutes.
MATMUL_PATIENCE_SECONDS = 120.0
# Older errors in the kernel log do not count: the GPU may have been repaired since.
XID_MICROSECONDS = 86_400e6
CLOCK_QUESTIONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePlan:
    """The questions to one node."""

    node: str  # the scheduler's name for it
    # SWEEP_HOME: the folder of the run folders.
    home: str
    matmul_seconds: float = 0.0  # 0: no matrix products
    devices: tuple[str, ...] | None = None  # NVML's indices; None: all


class NodeProbe:
    """Answers for the machine that it runs on."""

    def gather(self, plan: ProbePlan, *, nvml: Any = None) -> NodeFacts:
        gpus = gpu_facts(plan.devices, nvml=nvml)
        unread: list[str] = []
        measured = _matmul(plan, gpus, unread)
        flops, errors = measured.get("flops", {}), measured.get("errors", {})
        versions = versions_here()
        free, disk_error = _disk(Path(plan.home))
        return NodeFacts(
            node=plan.node,
            host=socket.gethostname(),
            boot_id=_first_line(Path("/proc/sys/kernel/random/boot_id")),
            kernel=platform.release(),
            python=versions.pop("python"),
            packages=versions,
            driver=driver_version(nvml=nvml) if gpus else None,
            cuda=measured.get("cuda"),
            nccl=measured.get("nccl"),
            gpus=tuple(
                replace(gpu, matmul_flops=flops.get(gpu.index), matmul_error=errors.get(gpu.index))
                for gpu in gpus
            ),
            xids=_xids(unread) if gpus else None,
            cpu_name=cpu_name(),
            num_cores=len(os.sched_getaffinity(0)),
            cpu_matmul_flops=flops.get("cores"),
            free_disk_bytes=free,
            home=plan.home,
            disk_error=disk_error,
            unread=tuple(unread),
        )

    def clock(self) -> float:
        return time.time()


def with_clock(
    facts: NodeFacts, ask: Callable[[], float], *, clock: Callable[[], float] = time.time
) -> NodeFacts:
    """Add how far the node's clock is ahead of this one: the quickest of a few answers counts."""
    answers = []
    for _ in range(CLOCK_QUESTIONS):
        began = clock()
        answer = ask()
        ended = clock()
        answers.append(((ended - began) / 2, answer - (began + ended) / 2))
    uncertainty, offset = min(answers)
    return replace(facts, clock_offset_seconds=offset, clock_uncertainty_seconds=uncertainty)


def versions_here() -> dict[str, str | None]:
    """Return versions that must be the same on all nodes, without importing torch."""
    return {
        "python": platform.python_version(),
        "code": _code_digest(),
        **{name: _version(name) for name in COMPARED_PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _code_digest() -> str:
    """Digest of our sources: the version of an editable installation does not change with them."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(file for package in OWN_PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _matmul(plan: ProbePlan, gpus: tuple[GpuFacts, ...], unread: list[str]) -> Mapping[str, Any]:
    """The output of workloads.tools.matmul on free GPUs; empty if not wanted or not possible."""
    if not plan.matmul_seconds:
        return {}
    free = [gpu.index for gpu in gpus if not _is_in_use(gpu)]
    if gpus and not free:
        unread.append("matmul: every GPU is held")
        return {}
    if gpus and _version("torch") is None:
        unread.append("matmul: torch is not installed")
        return {}
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(free),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # If the process is left over, the next launcher here finds it by this variable.
        LAUNCHER_VARIABLE: launcher_identity(Path(plan.home).absolute()),
    }
    # It uses GPUs: it must die with this process.
    arguments = [str(os.getpid()), "workloads.tools.matmul", f"--seconds={plan.matmul_seconds}"]
    limit = plan.matmul_seconds + MATMUL_PATIENCE_SECONDS
    try:
        done = subprocess.run(
            command("orchestrator.node.die_with_parent", *arguments, f"--devices={','.join(free)}"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            env={**os.environ, **environment},
        )
        found: Mapping[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        unread.append(f"matmul: no answer within {limit:.0f} s")
        return {}
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1][-200:] if lines else "no word said"
        unread.append(f"matmul: exit code {done.returncode}: {last}")
        return {}
    if (refused := found.get("refused")) is not None:
        unread.append(f"matmul: {refused}")
    return found


def _is_in_use(gpu: GpuFacts) -> bool:
    if gpu.processes:
        return True
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return used is not None and total is not None and used > baseline_bytes(total)


def _xids(unread: list[str]) -> dict[int, int] | None:
    since = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6 - XID_MICROSECONDS
    try:
        return xids_since(kernel_records(), since)
    except OSError as exc:
        unread.append(f"kernel log: {exc.strerror}")
        return None


def _disk(home: Path) -> tuple[int | None, str | None]:
    """Free bytes for run folders, and why nothing can be written there."""
    folder = next(path for path in (home, *home.parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return None, f"{folder} is not writable"
    try:
        return shutil.disk_usage(folder).free, None
    except OSError as exc:
        return None, f"{folder}: {exc.strerror}"


def cpu_name() -> str | None:
    """The name of this machine's processor, as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine() or None,
    )


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().split("\n", 1)[0]
    except OSError:
        return None
