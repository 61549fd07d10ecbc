"""A name is a device only if it is certain: a slice or a variant of a card never gets its peak."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.hardware import (
    DEVICES,
    GIB,
    UNLIMITED_BYTES,
    data_sheet_peak,
    from_driver_name,
    from_label,
    is_surely,
)
from orchestrator.core.problem.layout import Precision


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A800-SXM4-80GB", None),
        ("GRID A100D-80C", None),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 64GB HBM2e", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", None),  # 141 GB
        ("NVIDIA H800", "h800"),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A40-48Q", None),  # a virtual one
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", None),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla V100-PCIE-32GB", None),  # 112 TFLOP/s
        # Ray's accelerator types.
        ("A100", None),
        ("A100-40G", "a100-40gb"),
        ("A100-80G", "a100-80gb"),
        ("H100", None),  # SXM, PCIe or NVL
        ("H200", None),  # SXM or NVL
        ("B200", "b200"),
        ("GB200", None),
        ("L40S", "l40s"),
        ("V100", None),
        ("", None),
    ],
)
def test_only_a_name_that_says_which_device_it_is_is_a_device(
    name: str, device: str | None
) -> None:
    assert from_driver_name(name) is (DEVICES[device] if device is not None else None)


@pytest.mark.parametrize(
    ("name", "driver_name", "expected"),
    [
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL", True),
        ("NVIDIA H200", "NVIDIA H200 NVL", False),
        # One data sheet, but not one power limit.
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB", False),
        # Ray's accelerator types.
        ("T4", "Tesla T4", True),
        ("A100-80G", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80G", "NVIDIA A100-SXM4-40GB", False),
        ("B200", "NVIDIA B200", True),
        ("A100", "NVIDIA A100-SXM4-40GB", False),  # 40 or 80 GB
        ("H100", "NVIDIA H100 PCIe", False),  # SXM, PCIe or NVL
        ("H100", "NVIDIA H100 NVL", False),
        ("RTX", "NVIDIA RTX A6000", False),
        ("L4", "NVIDIA L40", False),
        ("RTX-6000", "Quadro RTX 6000", False),  # also of the Ada generation
        ("RTX-6000", "NVIDIA RTX 6000 Ada Generation", False),
        ("RTX-A6000", "NVIDIA RTX A6000", True),
        ("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Max-Q", False),
        ("A30", "NVIDIA A30 MIG 1g.6gb", False),
        ("A30", "", False),  # as a program may report it
    ],
)
def test_a_name_is_surely_of_a_device_only_if_no_other_has_it(
    name: str, driver_name: str, *, expected: bool
) -> None:
    assert is_surely(name, driver_name) is expected


@pytest.mark.parametrize(
    ("device", "precisions"),
    [
        ("v100-32gb", {Precision.FP16, Precision.FP32}),  # Volta has no bf16
        ("a100-80gb", {Precision.BF16, Precision.FP16, Precision.FP32}),
        ("h200", set(Precision)),
    ],
)
def test_a_peak_stands_for_the_precisions_that_the_device_has_and_for_no_other(
    device: str, precisions: set[Precision]
) -> None:
    assert set(DEVICES[device].peak_flops) == precisions


def test_peaks_are_those_of_the_data_sheet() -> None:
    assert DEVICES["v100-32gb"].peak_flops == {Precision.FP16: 125e12, Precision.FP32: 15.7e12}
    assert (
        DEVICES["h200"].peak_flops[Precision.BF16]
        == DEVICES["h200"].peak_flops[Precision.FP16]
        == 989e12
    )


@pytest.mark.parametrize(
    ("label", "device"),
    [
        ("H100-80GB", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("A100-80GB", "a100-80gb"),
        ("A100-40GB", "a100-40gb"),
        ("V100-16GB", "v100-16gb"),
        ("H20-96GB", "h20"),
        ("H200", "h200"),
    ],
)
def test_the_label_of_a_table_is_the_likely_device(label: str, device: str) -> None:
    assert from_label(label) is DEVICES[device]


def test_of_a_stranger_only_its_memory_is_taken_as_told() -> None:
    stranger = from_label("Ascend-910B", memory_bytes=64 * GIB)
    assert stranger.name == "ascend-910b"
    assert 0.95 * 64 * GIB < stranger.memory_bytes < 64 * GIB


@pytest.mark.parametrize(
    ("device", "bf16", "tf32", "fp8", "memory", "links"),
    # Data sheets: dense TFLOP/s; TB/s of memory; GB/s of NVLink, Infinity Fabric or PCIe in one
    # direction, half of what is advertised.
    [
        ("a100-40gb", 312, 156, None, 1.555, 600 / 2),
        ("a100-80gb", 312, 156, None, 2.039, 600 / 2),
        ("h100-sxm", 989, 494, 1979, 3.35, 900 / 2),
        ("h100-pcie", 756, 378, 1513, 2.0, 600 / 2),
        ("h200", 989, 494, 1979, 4.8, 900 / 2),
        ("b200", 2250, 1100, 4500, 8.0, 1800 / 2),
        ("l40s", 362, 183, 733, 0.864, 64 / 2),
        ("v100-32gb", None, 15.7, None, 0.9, 300 / 2),
        ("v100-16gb", None, 15.7, None, 0.9, 300 / 2),
        ("h20", 148, 74, 296, 4.0, 900 / 2),
        ("h800", 989, 494, 1979, 3.35, 400 / 2),
        ("a800-80gb", 312, 156, None, 2.039, 400 / 2),
        # Half of the card, which has 383 and 95.7.
        ("mi250x-gcd", 191.5, 47.9, None, 3.2 / 2, 200 / 2),
        ("mi300x", 1307, 653, 2614, 5.3, 896 / 2),
        ("a40", 149.7, 74.8, None, 0.696, 56),  # of 112.5
        ("a10g", 70, 35, None, 0.6, 32 / 2),
        ("rtx-4090", 165, 83, 330, 1.008, 32 / 2),
    ],
)
def test_flops_and_bandwidths_are_those_of_the_data_sheet(
    device: str, bf16: float | None, tf32: float, fp8: float | None, memory: float, links: float
) -> None:
    found = DEVICES[device]
    peaks = {Precision.BF16: bf16, Precision.FP32: tf32, Precision.FP8: fp8}
    for precision, tera in peaks.items():
        told = found.peak_flops.get(precision)
        assert told is None if tera is None else told == pytest.approx(tera * 1e12)
    assert found.memory_bandwidth == pytest.approx(memory * 1e12)
    assert found.intra_node_bandwidth == pytest.approx(links * 1e9)


# The nominal memory in GB or GiB, as makers count it.
NOMINAL_GB = {
    "a100-40gb": 40, "a100-80gb": 80, "h100-sxm": 80, "h100-pcie": 80, "h200": 141, "b200": 180,
    "l40s": 48, "v100-32gb": 32, "v100-16gb": 16, "h20": 96, "h800": 80, "a800-80gb": 80,
    "mi250x-gcd": 64, "mi300x": 192, "a40": 48, "a10g": 24, "rtx-4090": 24,
}  # fmt: skip


def test_a_driver_reports_at_most_the_nominal_memory_and_little_less() -> None:
    assert set(NOMINAL_GB) == set(DEVICES)
    for name, nominal in NOMINAL_GB.items():
        assert 0.92 * nominal < DEVICES[name].memory_bytes / GIB <= nominal


# The share of one GPU, in GB/s: 400 Gbit/s cards, 200, 100, and 50 of small instances.
NETWORKS = {
    50: {"h100-sxm", "h200", "b200", "h20", "h800", "mi300x"},
    25: {"a100-40gb", "a100-80gb", "h100-pcie", "a800-80gb", "mi250x-gcd"},
    12: {"l40s", "v100-32gb", "v100-16gb", "a40"},
    6: {"a10g", "rtx-4090"},
}


def test_a_gpu_has_the_network_of_the_usual_machines_with_it() -> None:
    found: dict[float, set[str]] = {}
    for device in DEVICES.values():
        found.setdefault(device.inter_node_bandwidth / 1e9, set()).add(device.name)
    assert found == NETWORKS


def test_the_peak_of_a_driver_s_name_has_its_source() -> None:
    found = data_sheet_peak("NVIDIA H200", Precision.FP8)
    assert found == (1979e12, "table: h200 fp8 dense")
    assert data_sheet_peak("Tesla V100-SXM2-32GB", Precision.BF16) is None
    assert data_sheet_peak("NVIDIA H100 NVL", Precision.BF16) is None


# US dollars an hour on demand, as of 2026: dearer devices are newer ones with more memory.
PRICES = {
    8.0: {"b200"}, 5.0: {"h200"}, 4.0: {"h100-sxm"}, 3.5: {"h100-pcie"}, 3.0: {"mi300x"},
    2.5: {"a100-80gb"}, 2.0: {"a100-40gb"}, 1.8: {"l40s"}, 1.5: {"v100-32gb"}, 1.3: {"v100-16gb"},
    1.0: {"a10g"}, 0.8: {"a40"}, 0.5: {"rtx-4090"},
    # Nobody rents these out by the hour at one price.
    None: {"h20", "h800", "a800-80gb", "mi250x-gcd"},
}  # fmt: skip


def test_an_hour_of_a_device_has_its_usual_price_or_none() -> None:
    found: dict[float | None, set[str]] = {}
    for device in DEVICES.values():
        found.setdefault(device.price_per_hour, set()).add(device.name)
    assert found == PRICES


def test_half_precision_of_volta_is_faster_than_what_it_lacks() -> None:
    assert DEVICES["v100-16gb"].peak_flops == DEVICES["v100-32gb"].peak_flops


def test_no_device_has_more_than_an_exbibyte() -> None:
    assert UNLIMITED_BYTES == 1_152_921_504_606_846_976


@pytest.mark.parametrize(
    ("share", "is_its_own"), [(0.91, True), (1.09, True), (0.89, False), (1.11, False)]
)
def test_a_table_may_tell_another_memory_of_a_known_device(
    share: float, *, is_its_own: bool
) -> None:
    """Within a tenth it is the device's own; else the driver leaves 98.5 % of it."""
    own = DEVICES["h200"].memory_bytes
    found = from_label("H200", memory_bytes=share * own)
    expected = own if is_its_own else int(share * own * 0.985)
    assert (found.name, found.memory_bytes) == ("h200", expected)
