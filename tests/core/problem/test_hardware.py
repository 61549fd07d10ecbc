"""A name is a device only if it is certain: a slice or a variant of a card never gets its peak."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.hardware import DEVICES, GIB, from_driver_name, from_label
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
