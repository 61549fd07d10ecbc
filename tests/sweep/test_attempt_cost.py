"""What the next attempt of a cell is expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.measurement_section import Measuring
from orchestrator.core.sweepfile.search_section import Strategy
from orchestrator.sweep.attempt_cost import AttemptCost
from tests.search.planted_cell import planted, searcher

GUESSED = TrialCost.of(Measuring(), launch_seconds=None, timed_steps=None)
MEASURED = TrialCost.of(Measuring(), launch_seconds=5.0, timed_steps=7.0)


@pytest.fixture
def cost() -> AttemptCost:
    model = PRESETS["llama-3.1-8b"]
    cell = Cell(model=model, num_gpus=16, sequence_length=4096, global_batch_size=256)
    return AttemptCost(cell=cell, predicted_seconds=60.0)


def test_the_next_trial_is_predicted_once_launches_were_measured(cost: AttemptCost) -> None:
    proposal = searcher(planted(), Strategy.AUTO).ask()
    assert proposal is not None
    # The rate of steps of 2 s: 256 sequences of 4096 tokens are 2^20.
    rate = 2**20 / 16 / 2.0
    proposal = replace(proposal, predicted_tokens_per_second_per_gpu=rate)
    # A minute around every trial would end short sweeps before they begin.
    assert cost.expected_gpu_seconds(proposal, GUESSED) is None
    # 3 steps are warm-up.
    wanted = 16 * (5.0 + (3 + 7) * 2.0)
    assert cost.expected_gpu_seconds(proposal, MEASURED) == pytest.approx(wanted)


def test_else_it_is_expected_to_reserve_what_the_last_measured_one_did(cost: AttemptCost) -> None:
    assert cost.expected_gpu_seconds(None, GUESSED) is None
    reserved = []
    for gpu_seconds, is_measured in ((3.0, False), (8.0, True), (1.0, False), (9.0, True)):
        cost.note_reserved(gpu_seconds, is_measured=is_measured)
        reserved.append(cost.expected_gpu_seconds(None, GUESSED))
    # An out-of-memory does not tell how long it takes to measure.
    assert reserved == [3.0, 8.0, 8.0, 9.0]


def test_before_the_first_end_a_trial_is_guessed_from_its_predicted_seconds(
    cost: AttemptCost,
) -> None:
    assert (cost.expected_seconds, cost.guessed_gpu_seconds) == (60.0, 16 * 60.0)
    cost.last_seconds = 45.0
    cost.note_reserved(500.0, is_measured=False)
    assert (cost.expected_seconds, cost.guessed_gpu_seconds) == (45.0, 500.0)


def test_only_measured_trials_tell_how_far_the_prediction_is_off(cost: AttemptCost) -> None:
    cost.note_reserved(480.0, is_measured=False)
    assert cost.over_prediction is None
    cost.note_reserved(1920.0, is_measured=True)
    assert cost.over_prediction == pytest.approx(2.0)
