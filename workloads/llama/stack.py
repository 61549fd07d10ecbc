"""The software and the device that a rank runs on, as the rank sees them.

The driver's version is the launcher's to tell: it asks NVML.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.core.trial.fingerprint import Stack


def describe_stack(device: torch.device) -> Stack:
    """Return the versions and the name of the device; None for what it does not have."""
    cuda = device.type == "cuda"
    return Stack(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if cuda else None,
        nccl=_nccl_version() if cuda else None,
        device_name=torch.cuda.get_device_name(device) if cuda else _processor_name(),
    )


def _nccl_version() -> str | None:
    """None for a torch that was built without NCCL, which one GPU does not need."""
    if not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _processor_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.processor() or None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine() or None,
    )
