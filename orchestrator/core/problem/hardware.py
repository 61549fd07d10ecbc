"""Facts about devices, from their makers' data sheets.

An unknown device is None: its peak is measured, and marked as measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.core.problem.device_name import ray_name_of
from orchestrator.core.problem.layout import Precision

GIB = 1 << 30
# The limit of a device whose memory is unknown.
UNLIMITED_BYTES = 1 << 60
DRIVER_LEAVES = 0.985  # of the nominal memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device and its links.

    FLOP/s are dense (no sparsity); bandwidths are bytes per second and direction.
    """

    name: str
    peak_flops: Mapping[Precision, float]
    # As the driver reports it, less than nominal.
    memory_bytes: int
    memory_bandwidth: float
    # To the other GPUs of the node, per GPU.
    intra_node_bandwidth: float
    inter_node_bandwidth: float  # to other nodes, per GPU
    # US dollars, on demand; None: unknown.
    price_per_hour: float | None = None


def _gpu(
    name: str,
    bf16: float | None,
    tf32: float,
    fp8: float | None,
    gib: float,
    hbm: float,
    nvlink: float,
    network: float,
    price: float | None,
    *,
    fp16: float | None = None,  # None: as bf16
) -> Hardware:
    # fp32 training runs its matrix products in TF32 if the device has it
    # (torch.set_float32_matmul_precision("high")).
    of = {Precision.BF16: bf16, Precision.FP16: fp16 or bf16, Precision.FP32: tf32}
    of[Precision.FP8] = fp8
    return Hardware(
        name=name,
        peak_flops=MappingProxyType({p: peak * 1e12 for p, peak in of.items() if peak is not None}),
        memory_bytes=int(gib * GIB),
        memory_bandwidth=hbm * 1e12,
        intra_node_bandwidth=nvlink * 1e9,
        inter_node_bandwidth=network * 1e9,
        price_per_hour=price,
    )


# TFLOP/s bf16 / TF32 / fp8, GiB, TB/s, GB/s NVLink one way, GB/s network per GPU, on-demand dollars
# (typical 2026 list prices).
DEVICES: Mapping[str, Hardware] = MappingProxyType(
    {
        hardware.name: hardware
        for hardware in (
            _gpu("a100-40gb", 312, 156, None, 39.4, 1.555, 300, 25, 2.0),
            _gpu("a100-80gb", 312, 156, None, 79.1, 2.039, 300, 25, 2.5),
            _gpu("h100-sxm", 989, 494, 1979, 79.1, 3.35, 450, 50, 4.0),
            _gpu("h100-pcie", 756, 378, 1513, 79.1, 2.0, 300, 25, 3.5),
            _gpu("h200", 989, 494, 1979, 139.7, 4.8, 450, 50, 5.0),
            _gpu("b200", 2250, 1100, 4500, 178.0, 8.0, 900, 50, 8.0),
            _gpu("l40s", 362, 183, 733, 44.4, 0.864, 32, 12, 1.8),
            _gpu("v100-32gb", None, 15.7, None, 31.7, 0.9, 150, 12, 1.5, fp16=125),
            _gpu("v100-16gb", None, 15.7, None, 15.7, 0.9, 150, 12, 1.3, fp16=125),
            _gpu("h20", 148, 74, 296, 95.6, 4.0, 450, 50, None),
            _gpu("h800", 989, 494, 1979, 79.1, 3.35, 200, 50, None),
            _gpu("a800-80gb", 312, 156, None, 79.1, 2.039, 200, 25, None),
            _gpu("mi250x-gcd", 191.5, 47.9, None, 64.0, 1.6, 100, 25, None),
            _gpu("mi300x", 1307, 653, 2614, 191.5, 5.3, 448, 50, 3.0),
            _gpu("a40", 149.7, 74.8, None, 44.4, 0.696, 56, 12, 0.8),
            _gpu("a10g", 70, 35, None, 22.5, 0.6, 16, 6, 1.0),
            _gpu("rtx-4090", 165, 83, 330, 23.6, 1.008, 16, 6, 0.5),
        )
    }
)

# What names a device for certain -> its name above. Whole names: a slice ("... MIG 1g.10gb"), a
# superchip or a card with other memory or clocks ("GH200", "H100 NVL", "A100-SXM-64GB") begins or
# ends like one of these, and has another peak.
_DEVICE_OF_NAME: Mapping[str, str] = MappingProxyType(
    {
        # The driver's (nvidia-smi, torch.cuda.get_device_name).
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A100 80GB PCIe": "a100-80gb",
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA L40S": "l40s",
        "NVIDIA H20": "h20",
        "NVIDIA H800": "h800",
        "NVIDIA A40": "a40",
        "NVIDIA A10G": "a10g",
        "Tesla V100-SXM2-32GB": "v100-32gb",
        # Ray's accelerator types, which are cut short: "A100", "H100", "H200" and "V100" each name
        # several devices.
        "A100-40G": "a100-40gb",
        "A100-80G": "a100-80gb",
        "B200": "b200",
        "L40S": "l40s",
    }
)


# How tables of measured runs, papers and people call them: the first whose words all occur in a
# label.
_DEVICE_OF_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gb200",), "b200"),
    (("b200",), "b200"),
    (("h200",), "h200"),
    (("h100", "pcie"), "h100-pcie"),
    (("h100",), "h100-sxm"),
    (("gh200",), "h100-sxm"),
    (("h800",), "h800"),
    (("h20",), "h20"),
    (("a800",), "a800-80gb"),
    (("a100", "40"), "a100-40gb"),
    (("a100",), "a100-80gb"),
    (("mi250",), "mi250x-gcd"),
    (("mi300",), "mi300x"),
    (("l40s",), "l40s"),
    (("a40",), "a40"),
    (("a10g",), "a10g"),
    (("4090",), "rtx-4090"),
    (("v100", "16"), "v100-16gb"),
    (("v100",), "v100-32gb"),
)


def from_label(label: str, *, memory_bytes: float | None = None) -> Hardware:
    """The device that a table of runs calls so, for predictions only.

    For an unknown one, an A100 with the memory that the table gives: ranking within a table needs
    little of the numbers, so a likely device is better than none. A measured MFU never uses it.
    """
    text = label.lower()
    known = next(
        (DEVICES[name] for words, name in _DEVICE_OF_WORDS if all(word in text for word in words)),
        None,
    )
    device = known or replace(DEVICES["a100-80gb"], name=text or "unknown")
    if memory_bytes is None or abs(memory_bytes / device.memory_bytes - 1) < 0.1:
        return device
    return replace(device, memory_bytes=int(memory_bytes * DRIVER_LEAVES))


def data_sheet_peak(name: str, precision: Precision) -> tuple[float, str] | None:
    """The dense peak FLOP/s of the device that a driver calls so, and its source.

    None if no data sheet has the device, or the device no such precision.
    """
    hardware = from_driver_name(name)
    if hardware is None or precision not in hardware.peak_flops:
        return None
    return hardware.peak_flops[precision], f"table: {hardware.name} {precision} dense"


def from_driver_name(name: str) -> Hardware | None:
    """The device that a driver, or Ray, calls so; None if it is unknown or one of several."""
    key = _DEVICE_OF_NAME.get(name)
    return DEVICES[key] if key is not None else None


def is_surely(name: str, driver_name: str) -> bool:
    """Return whether GPUs of this name, the driver's or Ray's, are surely those of a driver's name.

    Ray's name is not sure if devices with a data sheet and their variants share it, or if Ray
    leaves words of the driver's name out: an `RTX-6000` may be the one of the Ada generation.
    """
    # Ray's names have no spaces.
    if name == driver_name or " " in name:
        return name == driver_name
    device = from_driver_name(name)
    if device is not None:
        return device is from_driver_name(driver_name)
    # A program may report an empty name.
    maker, *words = driver_name.split() or [""]
    is_whole = name == "-".join(words) and maker != "Quadro"
    return is_whole and name not in map(ray_name_of, _DEVICE_OF_NAME)
