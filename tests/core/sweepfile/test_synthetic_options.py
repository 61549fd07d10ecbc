"""What a simulation may be told, and what it does if nothing is."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from orchestrator.core.sweepfile.synthetic_options import (
    SyntheticDrift,
    SyntheticFault,
    SyntheticOptions,
)
from tests.core.sweepfile.bounds import check_bounds

FAULT, DRIFT = {"fault": "oom"}, {"kind": "step", "size": 0.5}


@pytest.mark.parametrize(
    ("section", "name", "taken", "refused"),
    [
        (SyntheticFault, "rank", [0, 10**6], [-1]),
        (SyntheticFault, "probability", [0.0, 1.0], [-0.1, 1.1]),
        (
            SyntheticFault,
            "at",
            ["init", "forward", "teardown", "step_1", "step_999999999"],
            ["step_0", "step_1000000000", "step", "start"],
        ),
        (SyntheticDrift, "size", [-0.899, 10.0], [-0.9, 10.1]),
        (SyntheticDrift, "seconds", [1e-9, 1e9], [0.0, 1.1e9]),
        (SyntheticDrift, "node", ["x", "x" * 255], ["", "x" * 256]),
        (SyntheticOptions, "device_memory_bytes", [1, 1 << 50], [0, (1 << 50) + 1]),
        (SyntheticOptions, "noise", [0.0, 1.0], [-0.1, 1.1]),
        (SyntheticOptions, "time_scale", [1e-9, 1e9], [0.0, 1.1e9]),
        (SyntheticOptions, "faults", [[]], [[FAULT] * 513]),
        (SyntheticOptions, "drift", [[]], [[DRIFT] * 513]),
    ],
)
def test_an_option_is_taken_up_to_its_bounds(
    section: type[BaseModel], name: str, taken: list[object], refused: list[object]
) -> None:
    others = {SyntheticFault: FAULT, SyntheticDrift: DRIFT}.get(section)
    check_bounds(section, name, taken=taken, refused=refused, others=others)


def test_what_is_left_out_is_an_ordinary_device() -> None:
    options = SyntheticOptions()
    assert (options.device_name, options.noise, options.time_scale) == ("h100-sxm", 0.02, 1.0)
    assert (options.sleep, options.one_rank_per_node) == (False, False)
    fault = SyntheticFault.model_validate(FAULT)
    assert (fault.at, fault.probability, fault.first_attempt_only) == ("forward", 1.0, False)
    assert SyntheticDrift.model_validate(DRIFT).seconds == 600.0


def test_512_faults_are_not_too_many() -> None:
    assert len(SyntheticOptions.model_validate({"faults": [FAULT] * 512}).faults) == 512


def test_a_slow_node_has_a_name() -> None:
    slow = {"kind": "slow_node", "size": 0.3}
    with pytest.raises(ValidationError, match="slow_node needs the name of the slow node"):
        SyntheticDrift.model_validate(slow)
    assert SyntheticDrift.model_validate(slow | {"node": "n1"}).node == "n1"
