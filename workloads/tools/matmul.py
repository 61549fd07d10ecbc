"""Measures how fast this machine multiplies matrices: `python -m workloads.tools.matmul --seconds 2
--devices 0,1` writes one JSON document.

GPUs (as CUDA_VISIBLE_DEVICES counts them) run torch, all at once, as in training; cores run numpy,
all of them. The sustained speed counts, not the best moment: it shows a GPU that gets hot or is
capped. The factors are random: products of ones or zeros draw less power, and were 13 % faster on
an H200. Workload llama measures the peak of a device without a data sheet in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Rows of square matrices: 1.1 TFLOP in bf16, and 2.1 GFLOP in fp32.
GPU_SIZE, CPU_SIZE = 8192, 1024
# FLOPs of a GPU between two readings of the clock: 15 ms on an H100.
GPU_FLOPS_AT_ONCE = 11e12


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--devices", default="", help="GPUs, with commas; none: the cores")
    asked = parser.parse_args(arguments)
    devices = [device for device in asked.devices.split(",") if device]
    if devices:
        found = on_gpus(devices, asked.seconds)
    else:
        found = {"flops": {"cores": on_cores(asked.seconds)}}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def on_cores(seconds: float) -> float:
    """FLOP/s of all cores together, in fp32."""
    import numpy as np

    a = np.ones((CPU_SIZE, CPU_SIZE), dtype=np.float32)
    out = np.empty_like(a)
    return kept_up(lambda: np.matmul(a, a, out=out), flops=2.0 * CPU_SIZE**3, seconds=seconds)


def on_gpus(devices: Sequence[str], seconds: float) -> dict[str, Any]:
    """FLOP/s of each GPU in bf16 while all of them compute, and the versions that torch knows."""
    import torch  # takes seconds: only with a GPU

    if not torch.cuda.is_available():
        return {"flops": {}, "refused": f"torch {torch.__version__} sees no GPU"}
    flops: dict[str, float] = {}
    errors: dict[str, str] = {}

    def measure(place: int) -> None:
        try:
            flops[devices[place]] = rate(place)
        except RuntimeError as exc:
            # A GPU that cannot even do this is a finding, and the others go on.
            errors[devices[place]] = f"{type(exc).__name__}: {str(exc).splitlines()[0][:300]}"

    def rate(place: int) -> float:
        device = torch.device("cuda", place)
        return product_flops(device, size=GPU_SIZE, dtype=torch.bfloat16, seconds=seconds)

    threads = [threading.Thread(target=measure, args=(place,)) for place in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {
        "flops": flops,
        "errors": errors,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl is not None else None,
    }


def product_flops(device: torch.device, *, size: int, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of products of two random square matrices by torch.

    A GPU's is the sustained rate: half of the time warms it up. A core's is that of its best
    product, since others may use it as well.
    """
    # Takes seconds: whoever has a device has imported it.
    import torch

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out, is_gpu = torch.empty_like(a), device.type == "cuda"
    flops = 2.0 * size**3
    num_at_once = max(1, round(GPU_FLOPS_AT_ONCE / flops)) if is_gpu else 1

    def products() -> None:
        for _ in range(num_at_once):
            torch.mm(a, b, out=out)
        if is_gpu:
            torch.cuda.synchronize(device)

    if not is_gpu:
        return kept_up(products, flops=flops, seconds=seconds, usual=min)
    kept_up(products, flops=flops, seconds=seconds / 2)
    return kept_up(products, flops=flops * num_at_once, seconds=seconds / 2)


def kept_up(
    work: Callable[[], object],
    *,
    flops: float,
    seconds: float,
    usual: Callable[[Sequence[float]], float] = median,
) -> float:
    """FLOP/s of repeated work, by the usual of its times; the first one warms up."""
    work()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while not times or time.perf_counter() < deadline:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return flops / usual(times)


if __name__ == "__main__":
    sys.exit(main())
