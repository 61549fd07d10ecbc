"""Scores of layouts in words, by the objective."""

from __future__ import annotations

from math import log

import pytest

from orchestrator.search.score_scale import ScoreScale
from tests.search.planted_cell import SECONDS, TOKENS, planted

CELL = planted(zero_stages=(1,)).cell
# 256 sequences of 4,096 tokens on 16 GPUs.
TOKENS_OF_A_STEP = 256 * 4096 / 16


def test_a_score_leads_back_to_the_speed() -> None:
    found = ScoreScale(CELL, TOKENS).tokens_per_second_per_gpu(log(8.0))
    assert found == pytest.approx(TOKENS_OF_A_STEP / 8.0)
    assert ScoreScale(CELL, SECONDS).tokens_per_second_per_gpu(log(8.0)) is None


def test_a_gain_is_relative_to_the_objective() -> None:
    # From 1,000 to 1,250 tokens/s is a quarter more; the seconds become a fifth less.
    improvement = log(1250.0 / 1000.0)
    assert ScoreScale(CELL, TOKENS).gain(improvement) == pytest.approx(0.25)
    assert ScoreScale(CELL, SECONDS).gain(improvement) == pytest.approx(0.2)
    assert ScoreScale(CELL, TOKENS).gain(0.0) == 0.0


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (12345.6, "12,346 tokens/s/GPU"),
        (100.4, "100 tokens/s/GPU"),
        (12.345, "12.3 tokens/s/GPU"),
        (0.01234, "0.0123 tokens/s/GPU"),
    ],
)
def test_a_speed_is_shown_with_at_least_three_digits(speed: float, text: str) -> None:
    assert ScoreScale(CELL, TOKENS).text(log(TOKENS_OF_A_STEP / speed)) == text


def test_seconds_are_shown_as_those_of_a_step() -> None:
    assert ScoreScale(CELL, SECONDS).text(log(0.5)) == "0.5 s a step"
