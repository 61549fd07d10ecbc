"""The drift that workload synthetic obeys on purpose."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.pretend.synthetic import slowness
from orchestrator.core.sweepfile.synthetic_options import SyntheticDrift, SyntheticOptions


@pytest.mark.parametrize(
    # At 0, 150, 300, 450 and 600 s.
    ("drift", "expected"),
    [
        ({"kind": "slow_start", "size": 0.6, "seconds": 300.0}, [1.6, 1.6, 1.0, 1.0, 1.0]),
        ({"kind": "step", "size": -0.25, "seconds": 300.0}, [1.0, 1.0, 0.75, 0.75, 0.75]),
        ({"kind": "wave", "size": 0.2, "seconds": 600.0}, [1.0, 1.1, 1.2, 1.1, 1.0]),
        ({"kind": "slow_node", "size": 0.3, "node": "b"}, [1.3] * 5),
        ({"kind": "slow_node", "size": 0.3, "node": "c"}, [1.0] * 5),
    ],
)
def test_a_machine_drifts_as_it_is_told(drift: dict[str, Any], expected: list[float]) -> None:
    drifts = [SyntheticDrift.model_validate(drift)]
    assert [
        slowness(drifts, at, ["a", "b"]) for at in (0.0, 150.0, 300.0, 450.0, 600.0)
    ] == pytest.approx(expected)
    assert slowness([*drifts, *drifts], 0.0, ["a", "b"]) == pytest.approx(expected[0] ** 2)


def test_a_slow_node_has_a_name() -> None:
    with pytest.raises(ValidationError, match="slow_node needs the name of the slow node"):
        SyntheticOptions.model_validate({"drift": [{"kind": "slow_node", "size": 0.3}]})
