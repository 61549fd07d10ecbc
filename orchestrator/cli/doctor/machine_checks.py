"""The checks of `sweep doctor` on this machine: software, GPUs, Ray, network, processes, limits.

Each check is independent and changes nothing. torch and Ray are imported in processes of their
own, so that a broken one is a finding and not a crash.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from layout_sweep.start import command
from orchestrator.cli.ray_start import start_ray_scheduler
from orchestrator.core.errors import SweepError
from orchestrator.core.machines.check import Check, fail, ok, warn

# Torch from a cold network file system takes minutes.
IMPORT_SECONDS = 120.0
NO_ANSWER = f"no answer within {IMPORT_SECONDS:.0f} s"
SHARED_MEMORY = Path("/dev/shm")
# NCCL takes up to 10 MiB for each pair of ranks; a container has 64 MiB unless told otherwise.
GOOD_SHARED_MEMORY_BYTES = 1 << 30
# Ray and a gang of eight ranks need fewer.
GOOD_OPEN_FILES = 4096
REQUIRED = (
    *("alembic", "numpy", "optuna", "psutil", "pydantic", "pyyaml"),
    *("ray", "rich", "sqlalchemy", "tenacity", "tomli-w", "typer"),
)
# Each package with the extra of this project that installs it.
OPTIONAL = {
    "torch": "train",
    "nvidia-ml-py": "gpu",
    "psycopg": "postgres",
    "pyarrow": "export",
    "scipy": "gp",
    "textual": "tui",
}
RAY_PROGRAM = "import ray; print(ray.__version__)"
TORCH_PROGRAM = """
import json, torch
from torch import cuda, distributed
devices = range(cuda.device_count() if cuda.is_available() else 0)
has_nccl = cuda.is_available() and distributed.is_nccl_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "devices": [cuda.get_device_name(i) for i in devices],
    "nccl": ".".join(map(str, cuda.nccl.version())) if has_nccl else None,
    "gloo": distributed.is_available() and distributed.is_gloo_available(),
}))
"""


def python() -> Check:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    found = f"{platform.python_version()} at {sys.executable}, {system}"
    if sys.platform != "linux":
        advice = "trials run on Linux only; plans and results can be shown here"
        return warn("python", found, advice)
    return ok("python", found)


def packages() -> Check:
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name in REQUIRED if versions[name] is None]
    if missing:
        advice = f"missing: {', '.join(missing)}; pip install . in the cloned folder"
        return fail("packages", found, advice)
    extras = [f"{n} (extra {extra})" for n, extra in OPTIONAL.items() if not versions[n]]
    return ok("packages", found, f"optional, not installed: {', '.join(extras)}" if extras else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def start(program: str) -> subprocess.Popen[str]:
    """Start a Python program whose last line `_last_line` reads."""
    return subprocess.Popen(
        command("-c", program),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _last_line(process: subprocess.Popen[str]) -> tuple[str | None, str]:
    """The last line that a program printed; or None and the reason why there is none."""
    try:
        out, err = process.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, NO_ANSWER
    if process.returncode == 0 and out.strip():
        return out.strip().splitlines()[-1], ""
    lines = err.strip().splitlines()
    return None, lines[-1][:300] if lines else f"exit code {process.returncode}"


def torch(process: subprocess.Popen[str]) -> Check:
    answer, error = _last_line(process)
    if answer is None and _version("torch") is None:
        advice = (
            "only training with workload llama needs it: pip install '.[train]' in the cloned"
            " folder"
        )
        return warn("torch", "not installed", advice)
    if answer is None:
        advice = "reinstall torch"
        if error == NO_ANSWER:
            advice = "is the machine very busy, or its disk slow? Each rank would wait as long"
        return fail("torch", f"cannot be imported: {error}", advice)
    facts = json.loads(answer)
    devices: Sequence[str] = facts["devices"]
    found = f"{facts['version']}, CPU only"
    if devices:
        libraries = f"CUDA {facts['cuda']}, NCCL {facts['nccl']}"
        found = f"{facts['version']}, {libraries}, {len(devices)} x {devices[0]}"
    if not facts["gloo"]:
        advice = "CPU ranks communicate over gloo: install torch from PyPI"
        return fail("torch", f"{found}, without gloo", advice)
    if not devices and _driver_gpus():
        advice = (
            "the driver has GPUs that torch does not see: is it a CPU build, or is"
            " CUDA_VISIBLE_DEVICES empty?"
        )
        return warn("torch", found, advice)
    return ok("torch", found)


def gpus() -> Check:
    from orchestrator.node.gpu_monitor import clean, device_name  # pydantic, 0.05 s

    name, indices = device_name(), _driver_gpus()
    if name is None and not indices:
        return ok("gpus", "none: each core counts as a GPU, and trials run one after another")
    if name is None:
        advice = (
            "without NVML, GPU usage is not recorded and foreign processes are not seen:"
            " pip install '.[gpu]' in the cloned folder"
        )
        return warn("gpus", f"the driver has {len(indices)}, but NVML does not answer", advice)
    found = f"{max(len(indices), 1)} x {name}"
    used = [reason for index in indices if (reason := clean([index])) is not None]
    if used:
        advice = "other programs on these GPUs disturb the measurements"
        return warn("gpus", f"{found}; {'; '.join(used)}", advice)
    return ok("gpus", f"{found}, no compute process on them")


def _driver_gpus() -> list[str]:
    """The indices of the GPUs that the kernel's driver knows."""
    try:
        return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").iterdir())]
    except OSError:
        return []


def ray(process: subprocess.Popen[str]) -> Check:
    version, error = _last_line(process)
    if version is None:
        advice = "reinstall ray (pip install layout-sweep)"
        return fail("ray", f"cannot be imported: {error}", advice)
    local = "`sweep run` starts a local one, unless --ray-address names a cluster"
    return ok("ray", f"{version}; {local}")


def cluster(address: str) -> Check:
    try:
        with tempfile.TemporaryDirectory() as folder:
            scheduler = start_ray_scheduler(address, root=Path(folder), say=lambda _: None)
            slots = scheduler.slots
            scheduler.close()
    except SweepError as exc:
        advice = "is it up (ray status), and do both sides run the same version of Ray?"
        return fail("cluster", str(exc), advice)
    unit = "GPUs" if slots.device == "cuda" else "cores"
    return ok("cluster", f"{address}: {len(slots.nodes)} node(s), {unit} {slots.by_size}")


def ray_access(ray_address: str | None) -> list[Check]:
    """Check who can reach Ray, or read what it must keep secret."""
    from orchestrator.core.machines.exposure import exposures
    from orchestrator.node.exposure import ray_facts

    facts = ray_facts(os.environ, cluster_address=ray_address)
    if problems := exposures(facts):
        return problems
    found = "no token, and none is needed"
    if facts.listeners:
        num = len(facts.listeners)
        found = f"{num} of Ray's sockets on this machine, none open to others without a token"
    elif facts.token_file_mode is not None:
        found = f"token in {facts.token_file}, mode {facts.token_file_mode:o}"
    return [ok("ray access", found)]


def environment(ray_address: str | None) -> list[Check]:
    """Check what ranks see of the environment, and which secrets Ray shows on this machine."""
    from orchestrator.core.trial.rank_environment import holds_secret, needed
    from orchestrator.node.exposure import secrets_of_raylets

    secrets = [name for name, value in os.environ.items() if holds_secret(name, value)]
    found = f"ranks see {len(needed(os.environ))} of its {len(os.environ)} variables"
    if secrets:
        found += f", and none of {_names(secrets)}"
    if ray_address is not None:
        found += (
            "; Ray's processes on a cluster have the environment in which each node's `ray start`"
            " was called"
        )
    advice = "pass other variables with workload.options.pass_env, secrets with env_from"
    checks = [ok("environment", found, advice)]
    for pid, names in secrets_of_raylets().items():
        problem = f"the Ray of process {pid} was started with {_names(names)}"
        unset = " ".join(f"-u {name}" for name in names)
        advice = f"start it without them: env {unset} ray start ..."
        problem += ": every program that runs in it can read them"
        checks.append(warn("environment", problem, advice))
    return checks


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def ports() -> Check:
    try:
        for _ in range(2):
            with (
                socket.create_server(("127.0.0.1", 0)) as server,
                socket.create_connection(server.getsockname(), timeout=5),
            ):
                pass
    except OSError as exc:
        advice = "ranks of one node meet there: check the container's network and ulimits"
        return fail("ports", f"127.0.0.1 cannot be used: {exc.strerror}", advice)
    return ok("ports", "127.0.0.1 can be bound and reached")


def proc() -> Check:
    try:
        Path("/proc/self/stat").read_text()
        Path("/proc/1/stat").read_text()
    except OSError as exc:
        advice = "it is used to find processes that a trial left: mount /proc without hidepid"
        return warn("/proc", f"{exc.filename}: {exc.strerror}", advice)
    return ok("/proc", "readable")


def clean_up() -> Check:
    """Check that something ends the daemons that the programs of a trial leave."""
    from orchestrator.node.cgroups import own_cgroup, why_no_cgroup

    reason = why_no_cgroup()
    if reason is None:
        found = f"wardens, and a cgroup for each rank server below {own_cgroup()}"
        return ok("clean-up", found)
    advice = (
        "if all wardens of a trial are killed at once, its daemons are found only by their"
        " environment; a cgroup of your own ends them: systemd-run --user --scope -p Delegate=yes"
        " sweep run ..."
    )
    return ok("clean-up", f"wardens, without a cgroup: {reason}", advice)


def shared_memory() -> Check:
    """Check shared memory, by which ranks exchange data if their GPUs cannot reach each other."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as exc:
        return warn("shared memory", f"{SHARED_MEMORY}: {exc.strerror}", "mount a tmpfs there")
    found = f"{free / 2**20:,.0f} MiB free in {SHARED_MEMORY}"
    if free < GOOD_SHARED_MEMORY_BYTES:
        advice = (
            "NCCL and the loaders of programs need more: start the container with --shm-size=8g or"
            " --ipc=host"
        )
        return warn("shared memory", found, advice)
    return ok("shared memory", found)


def compiler() -> Check:
    """Check what torch.compile needs: Triton builds a launcher with it at its first kernel."""
    found = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if found is not None else ["a C compiler (cc, gcc, or CC)"]
    missing += [] if header.exists() else [f"Python's headers ({header})"]
    if not missing:
        return ok("compiler", f"{found}, {header}")
    advice = "apt install gcc python3-dev, or option compile: false for workload llama"
    is_needed = bool(_driver_gpus())
    text = f"missing: {', '.join(missing)}"
    return warn("compiler", text, advice) if is_needed else ok("compiler", text, advice)


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {soft}, can be raised to {hard}"
    if soft != resource.RLIM_INFINITY and soft < GOOD_OPEN_FILES:
        return warn("open files", found, f"Ray opens many: ulimit -n {GOOD_OPEN_FILES * 16}")
    return ok("open files", found)
