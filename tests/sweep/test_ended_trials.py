"""Whether the last trials of a cell brought a gain."""

from __future__ import annotations

import pytest

from orchestrator.core.sweepfile.sections import Objective, Plateau
from orchestrator.sweep.ended_trials import EndedTrials

SPEED, TIME = Objective.TOKENS_PER_SECOND_PER_GPU, Objective.STEP_SECONDS


@pytest.mark.parametrize(
    ("objective", "values", "expected"),
    [
        (SPEED, [100.0, 100.5, 100.9], True),
        (SPEED, [100.0, 100.5, 101.1], False),
        (SPEED, [100.0, 90.0, None], True),
        (SPEED, [100.0, 90.0], False),  # too few
        (SPEED, [None, None, None], False),  # nothing to compare with
        (TIME, [1.0, 0.995, 1.2], True),
        (TIME, [1.0, 0.98, 1.2], False),
    ],
)
def test_a_plateau_is_reached_if_the_last_two_gain_less_than_a_hundredth(
    objective: Objective, values: list[float | None], expected: bool
) -> None:
    ended = EndedTrials(objective)
    for value in values:
        ended.note(value)
    assert len(ended) == len(values)
    assert ended.have_plateaued(Plateau(trials=2, gain=0.01)) is expected
