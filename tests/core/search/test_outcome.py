"""The outcome of a layout by the time of its step."""

from __future__ import annotations

from math import inf, log, nan

import pytest

from orchestrator.core.search.outcome import Measured


def test_a_score_is_the_logarithm_of_the_seconds_of_a_step() -> None:
    found = Measured.of_step(8.0, peak_memory_bytes=3.0, joules_per_token=0.5)
    assert found == Measured(score=log(8.0), peak_memory_bytes=3.0, joules_per_token=0.5)
    assert not found.is_useless


@pytest.mark.parametrize("seconds", [0.0, -1.0, inf, nan])
def test_a_time_of_a_wrong_clock_is_useless_and_the_peak_is_kept(seconds: float) -> None:
    found = Measured.of_step(seconds, peak_memory_bytes=3.0)
    assert found.is_useless
    assert found.peak_memory_bytes == 3.0
