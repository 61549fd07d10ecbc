"""Numbers are compared if they may be true and were timed to their end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orchestrator.core.trial.comparable import is_comparable


@pytest.mark.parametrize(
    ("implausible", "bound", "expected"),
    [
        (None, None, True),
        ("faster than light", None, False),
        (None, 0.5, False),
        # A bound of zero seconds still says that the steps were not timed to their end.
        (None, 0.0, False),
        ("faster than light", 0.5, False),
    ],
)
def test_doubts_of_either_kind_leave_a_measurement_out(
    implausible: str | None, bound: float | None, expected: bool
) -> None:
    doubts = SimpleNamespace(implausible=implausible, step_seconds_bound=bound)
    assert is_comparable(doubts) is expected
