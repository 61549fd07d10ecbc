"""Digits that show whether a number was rounded."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.digits import decimals, is_fine


@pytest.mark.parametrize(
    ("seconds", "tokens", "fine"),
    [
        (0.5123456, 4096, True),
        (0.52, 4096, False),
        (1 / 1.923, 4096, False),  # 1.923 steps a second
        (4096 / 12000, 4096, False),  # 12,000 tokens a second
        (4096 / 12000, 4097, True),
        # Four digits are few, and five are not; of the steps a second, of the time, of the rate.
        (1 / 6234, 7, False),
        (1 / 12345, 7, True),
        (0.1234, 4096, False),
        (0.12345, 4096, True),
        (4096 / 1234, 4096, False),
        (4096 / 12345, 4096, True),
    ],
)
def test_a_time_is_fine_if_neither_it_nor_a_rate_has_few_digits(
    seconds: float, tokens: int, fine: bool
) -> None:
    assert is_fine(seconds, tokens) is fine


@pytest.mark.parametrize(
    ("value", "count"), [(0.52, 2), (0.0, 0), (12.0, 0), (1200.0, -2), (0.0512, 4)]
)
def test_decimals_count_the_digits_after_the_point(value: float, count: int) -> None:
    assert decimals(value) == count
