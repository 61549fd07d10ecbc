"""GPU time in hours, as every command prints it."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.gpu_hours_text import gpu_hours_text


@pytest.mark.parametrize(
    ("gpu_seconds", "text"),
    [
        (0.0, "0.00"),
        (0.1, "0.000028"),
        (2.5, "0.00069"),
        (20.0, "0.0056"),
        (180.0, "0.050"),
        (7200.0, "2.00"),
        (3.6e7, "10,000.00"),
    ],
)
def test_hours_keep_two_digits_that_say_something(gpu_seconds: float, text: str) -> None:
    assert gpu_hours_text(gpu_seconds) == text
