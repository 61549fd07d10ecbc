"""A GPU is known by its driver's name and by Ray's, and is taken for no other."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.device_name import driver_name_of, may_be_called, ray_name_of


# What NvidiaGPUAcceleratorManager of Ray 2.60 makes of them.
@pytest.mark.parametrize(
    ("driver_name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA A30 MIG 1g.6gb", "A30"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4070 Ti", "GeForce-RTX-4070-Ti"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("AMD Instinct MI300X OAM", "AMD-Instinct-MI300X-OAM"),
    ],
)
def test_ray_shortens_the_name_of_a_driver(driver_name: str, expected: str) -> None:
    assert ray_name_of(driver_name) == expected


@pytest.mark.parametrize(
    ("name", "driver_name", "expected"),
    [
        ("Tesla T4", "Tesla T4", True),
        ("T4", "Tesla T4", True),
        ("RTX", "NVIDIA RTX A6000", True),  # older versions of Ray
        ("L4", "NVIDIA L40S", False),
        ("GeForce-RTX-4070", "NVIDIA GeForce RTX 4070 Ti", False),
        ("NVIDIA GeForce RTX 4070", "NVIDIA GeForce RTX 4070 Ti", False),
        ("NVIDIA A30", "NVIDIA A30 MIG 1g.6gb", False),
    ],
)
def test_a_gpu_is_not_taken_for_another_whose_name_contains_its_words(
    name: str, driver_name: str, *, expected: bool
) -> None:
    assert may_be_called(name, driver_name) is expected


@pytest.mark.parametrize(
    ("name", "among", "expected"),
    [
        ("H200", "NVIDIA H200", "NVIDIA H200"),
        # The machine that starts the sweep has other GPUs than the cluster, or none.
        ("H100", "Tesla T4", "H100"),
        ("H100", None, "H100"),
        # A cluster whose GPUs Ray does not name may have others than this machine.
        (None, "Tesla T4", None),
        (None, None, None),
    ],
)
def test_gpus_have_the_name_that_their_driver_gives_them(
    name: str | None, among: str | None, expected: str | None
) -> None:
    assert driver_name_of(name, among=among) == expected
