"""The most FLOP/s that one device can do at a precision: from the makers' table, or measured by matrix products where it has no entry."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from orchestrator.core.hardware import from_driver_name
from orchestrator.core.layout import Precision

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}
_SIZES = {"cpu": (256, 512, 768), "cuda": (4096, 8192)}
_SECONDS_PER_SIZE = 0.08  # all sizes together stay well under half a second


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    flops: float
    source: str  # "table: ..." or "measured: ..."


def peak_flops(device: torch.device, precision: Precision) -> PeakFlops | None:
    """Look up or measure. The measurement uses the threads that training uses; ranks of one node measure at once, as they train.

    None where the device has no room left for the matrices: that says nothing about the layout that was measured before.
    """
    if device.type == "cuda":
        hardware = from_driver_name(torch.cuda.get_device_name(device))
        if hardware is not None and precision in hardware.peak_flops:
            return PeakFlops(flops=hardware.peak_flops[precision], source=f"table: {hardware.name} {precision} dense")
    dtype = _DTYPES[precision]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        flops, size, dtype_used = max(
            (_best_matmul(n, d, device), n, str(d)) for d in _dtypes_to_try(dtype, device) for n in _SIZES[device.type]
        )
    except torch.OutOfMemoryError:
        return None
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return PeakFlops(flops=flops, source=f"measured: matmul {size}^3 {dtype_used.removeprefix('torch.')}{threads}")


def _dtypes_to_try(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, ...]:
    # A CPU without bf16 instructions emulates them, and may mix in fp32 products that are faster: the bound is the better of the two.
    return (dtype, torch.float32) if device.type == "cpu" and dtype is not torch.float32 else (dtype,)


def _best_matmul(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The best FLOP/s of repeated products of two square matrices, the first of which only warms up."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    best, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS_PER_SIZE:
        _synchronize(device)
        before = time.perf_counter()
        torch.mm(a, b, out=out)
        _synchronize(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - before))
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
