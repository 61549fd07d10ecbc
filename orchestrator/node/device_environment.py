"""Variables of ranks for their devices and compilers, unless somebody has set them.

The allocator's mode is a setting that changes numbers, and counts as one. The others change where
libraries keep files.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from orchestrator.core.trial.launch_order import LaunchOrder

LLAMA = "workloads.llama"
# Newer name first: torch reads both.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Without it, a layout at the edge of memory fails by fragmentation.
EXPANDABLE = "expandable_segments:True"
# Collectives that NCCL's flight recorder keeps: some steps of the largest layouts.
TRACED_COLLECTIVES = 2000
TRACE_FILE = "nccl-trace-"


def allocator_settings(order: LaunchOrder, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator's mode for llama's ranks on GPUs; nothing if somebody has set one.

    `environment`: the launcher's own, which its ranks inherit.
    """
    if order.program != LLAMA or not order.devices:
        return {}
    if any(name in known for name in ALLOCATOR_NAMES for known in (environment, order.environment)):
        return {}
    return {ALLOCATOR_NAMES[0]: EXPANDABLE}


def trace_settings(order: LaunchOrder, run_dir: Path) -> dict[str, str]:
    """Return variables that have NCCL write the last collectives of each rank if one times out."""
    if not order.devices or order.request.layout.world_size < 2:
        return {}
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(TRACED_COLLECTIVES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # torch appends the rank.
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(run_dir / TRACE_FILE),
    }


def compile_caches(order: LaunchOrder, root: Path) -> dict[str, str]:
    """The folders in which torch.compile and Triton keep what they compiled, for later ranks.

    One for each stack below SWEEP_HOME, so that trials, sweeps and ranks of a node share it.
    """
    if order.program != LLAMA:
        return {}
    # The launcher's folder is SWEEP_HOME/runs/SWEEP.
    home = root.parents[1] if root.parent.name == "runs" else root
    folder = home / "compiled" / _stack()
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


@cache
def _stack() -> str:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return f"torch-{torch}-python-{platform.python_version()}"
