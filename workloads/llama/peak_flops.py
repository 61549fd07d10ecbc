"""The peak FLOP/s of a device at a precision: from its data sheet, else measured by matrix
products.

A sweep measures a node's peak once, and gives it to later trials: so MFUs of one node are
comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orchestrator.core.problem.hardware import data_sheet_peak
from orchestrator.core.problem.layout import Precision
from orchestrator.core.trial.protocol import MEASURED_PEAK, TrialRequest
from workloads.tools.matmul import product_flops

# The type of the numbers with which a peak is measured. None: torch's plain products have no fp8.
_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP8: None,
}
_SIZES = {"cpu": (256, 512, 768), "cuda": (4096, 8192)}
# On CPUs all sizes together take well under half a second, or two seconds in emulated fp16. A GPU
# warms up for two seconds, and keeps its speed up for two.
_SECONDS_PER_SIZE = {"cpu": 0.08, "cuda": 4.0}


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """The peak FLOP/s of a device at a precision, and where the number comes from."""

    flops: float
    source: str  # "table: ..." or "measured: ..."


def trial_peak(
    request: TrialRequest,
    *,
    node: str,
    device: torch.device,
    device_name: str | None,
    achieved_flops: float,
) -> PeakFlops | None:
    """Return the peak for a trial's MFU: by the data sheet, else by an earlier trial on this node.

    If the trial was faster than that, the earlier measurement was too low (the machine was busy):
    then measure again, and use the larger. All ranks of a node have the same data and do the same.
    None: it cannot be measured.
    """
    listed = listed_peak(device, request.layout.precision)
    if listed is not None:
        return listed
    known = next((p for p in request.peaks if (p.node, p.device_name) == (node, device_name)), None)
    earlier = PeakFlops(flops=known.flops, source=known.source) if known is not None else None
    if earlier is not None and achieved_flops <= earlier.flops:
        return earlier
    own = measured_peak(device, request.layout.precision)
    if own is not None:
        own = PeakFlops(flops=own.flops, source=f"{own.source}, in trial {request.trial_id}")
    return max((p for p in (earlier, own) if p is not None), key=lambda p: p.flops, default=None)


def measured_peak(device: torch.device, precision: Precision) -> PeakFlops | None:
    """Measure the peak with the threads that training uses.

    Ranks of one node measure at once, as they train. None: products in this precision cannot be
    timed, or the device has no memory left for the matrices, which is no failure of the layout.
    """
    dtype = _DTYPES[precision]
    if dtype is None:
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        flops, size, dtype_used = max(
            (
                product_flops(device, size=n, dtype=d, seconds=_SECONDS_PER_SIZE[device.type]),
                n,
                str(d),
            )
            for d in _dtypes_to_try(dtype, device)
            for n in _SIZES[device.type]
        )
    except torch.OutOfMemoryError:
        return None
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return PeakFlops(
        flops=flops,
        source=f"{MEASURED_PEAK}matmul {size}^3 {dtype_used.removeprefix('torch.')}{threads}",
    )


def listed_peak(device: torch.device, precision: Precision) -> PeakFlops | None:
    """Return the peak in the device's data sheet; None: it has none here."""
    if device.type != "cuda":
        return None
    listed = data_sheet_peak(torch.cuda.get_device_name(device), precision)
    return PeakFlops(flops=listed[0], source=listed[1]) if listed is not None else None


def _dtypes_to_try(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, ...]:
    # A CPU without bf16 or fp16 instructions emulates them, and may mix in faster fp32 products:
    # the higher of both counts.
    is_emulated = device.type == "cpu" and dtype is not torch.float32
    return (dtype, torch.float32) if is_emulated else (dtype,)
