"""The memory that a layout leaves free."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.merit import dollars_per_billion_tokens, headroom


@pytest.mark.parametrize(
    ("peak", "device", "free"),
    [
        (60.0, 80.0, 0.25),
        (80.0, 80.0, 0.0),
        (100.0, 80.0, -0.25),
        # A counter of 0 was not read, and nobody knows the memory of some devices.
        (None, 80.0, None),
        (0.0, 80.0, None),
        (60.0, None, None),
        (60.0, 0.0, None),
    ],
)
def test_the_headroom_is_the_share_of_the_memory_that_stays_free(
    peak: float | None, device: float | None, free: float | None
) -> None:
    assert headroom(peak, device) == free


def test_a_billion_tokens_cost_the_price_of_the_hours_that_they_take() -> None:
    # 3.60 dollars an hour are 0.1 cents a second, for 1,000 tokens.
    assert dollars_per_billion_tokens(1_000.0, 3.6) == pytest.approx(1_000.0)
    assert dollars_per_billion_tokens(10_000.0, 1.8) == pytest.approx(50.0)
