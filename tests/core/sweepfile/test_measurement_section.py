"""How a layout is measured: what a sweep file may say of it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.core.sweepfile.measurement_section import Exclusive, Measuring, Profiled
from orchestrator.core.trial.protocol import Device
from tests.core.sweepfile.bounds import check_bounds


def test_there_may_be_as_many_steps_at_least_as_at_most() -> None:
    assert Measuring(min_steps=20, max_steps=20).min_steps == 20
    with pytest.raises(ValidationError, match="min_steps 21 is more than max_steps 20"):
        Measuring(min_steps=21, max_steps=20)


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("warmup_steps", [2, 1000], [1, 1001]),
        ("min_steps", [2, 1000], [1, 1001]),
        ("max_steps", [2, 10_000], [1, 10_001]),
        ("min_seconds", ["auto", 0.0, 3600.0], [-0.1, 3600.1]),
        ("precision", [1e-9, 0.999], [0.0, 1.0]),
        ("wait_for_nodes", [1e-9, 1e8], [0.0, 1.1e8]),
    ],
)
def test_a_number_is_taken_up_to_its_bounds(
    name: str, taken: list[object], refused: list[object]
) -> None:
    others = {"max_steps": 10_000} if name == "min_steps" else {"min_steps": 2}
    check_bounds(Measuring, name, taken=taken, refused=refused, others=others)


def test_three_steps_warm_up_and_five_to_fifty_are_timed_to_two_percent() -> None:
    found = Measuring()
    assert (found.warmup_steps, found.min_steps, found.max_steps) == (3, 5, 50)
    assert (found.precision, found.min_seconds, found.wait_for_nodes) == (0.02, "auto", 900.0)
    assert (found.exclusive, found.preflight, found.profile) == (
        Exclusive.NONE,
        True,
        Profiled.NONE,
    )


@pytest.mark.parametrize(
    ("asked", "device", "confirms", "warmup_seconds", "min_seconds"),
    [
        ("auto", Device.CUDA, False, 2.0, 5.0),
        ("auto", Device.CUDA, True, 2.0, 10.0),
        ("auto", Device.CPU, True, 0.0, 0.0),
        (7.0, Device.CUDA, True, 2.0, 7.0),
        (0.0, Device.CUDA, False, 0.0, 0.0),
        (7.0, Device.CPU, False, 0.0, 7.0),
    ],
)
def test_a_gpu_settles_for_seconds_and_a_cpu_does_not(
    asked: object, device: Device, *, confirms: bool, warmup_seconds: float, min_seconds: float
) -> None:
    section = Measuring.model_validate({"min_seconds": asked, "precision": 0.05})
    plan = section.plan(device, confirms=confirms)
    assert (plan.warmup_seconds, plan.min_seconds) == (warmup_seconds, min_seconds)
    assert (plan.warmup_steps, plan.min_steps, plan.max_steps) == (3, 5, 50)
    assert plan.relative_confidence == 0.05
