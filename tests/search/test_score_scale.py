"""Scores of layouts: less is better, whatever the objective is."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from orchestrator.search.score_scale import ScoreScale
from tests.search.planted_cell import SECONDS, TOKENS, planted

CANDIDATES = planted(zero_stages=(1,)).candidates
# 256 sequences of 4,096 tokens on 16 GPUs.
TOKENS_OF_A_STEP = 256 * 4096 / 16


def test_a_faster_layout_has_a_lower_score_by_both_objectives() -> None:
    tokens, seconds = ScoreScale(CANDIDATES, TOKENS), ScoreScale(CANDIDATES, SECONDS)
    assert tokens.score(2000.0) < tokens.score(1000.0)
    assert seconds.score(1.0) < seconds.score(2.0)
    # A layout has the same score by its speed and by its seconds.
    assert tokens.score(TOKENS_OF_A_STEP / 8.0) == pytest.approx(seconds.score(8.0))
    assert seconds.score(8.0) == pytest.approx(log(8.0))


def test_a_score_leads_back_to_the_speed() -> None:
    tokens = ScoreScale(CANDIDATES, TOKENS)
    assert tokens.tokens_per_second_per_gpu(tokens.score(1234.5)) == pytest.approx(1234.5)
    assert ScoreScale(CANDIDATES, SECONDS).tokens_per_second_per_gpu(0.0) is None


def test_a_gain_is_relative_to_the_objective() -> None:
    # From 1,000 to 1,250 tokens/s is a quarter more; the seconds become a fifth less.
    improvement = log(1250.0 / 1000.0)
    assert ScoreScale(CANDIDATES, TOKENS).gain(improvement) == pytest.approx(0.25)
    assert ScoreScale(CANDIDATES, SECONDS).gain(improvement) == pytest.approx(0.2)
    assert ScoreScale(CANDIDATES, TOKENS).gain(0.0) == 0.0


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
    scale = ScoreScale(CANDIDATES, TOKENS)
    assert scale.text(scale.score(speed)) == text


def test_seconds_are_shown_as_those_of_a_step() -> None:
    scale = ScoreScale(CANDIDATES, SECONDS)
    assert scale.text(scale.score(0.5)) == "0.5 s a step"


def test_without_any_prediction_values_are_still_ordered() -> None:
    unknown = np.full(len(CANDIDATES.table), np.nan)
    scale = ScoreScale(
        replace(CANDIDATES, step_seconds=unknown, tokens_per_second_per_gpu=unknown), TOKENS
    )
    assert scale.score(4.0) == pytest.approx(-log(4.0))
    assert scale.tokens_per_second_per_gpu(scale.score(4.0)) == pytest.approx(4.0)
