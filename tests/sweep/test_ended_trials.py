"""The last trials of a cell, and the gain that they brought."""

from __future__ import annotations

import pytest

from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Plateau
from orchestrator.core.trial.merit import Merit
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


def test_of_a_front_its_volume_has_to_grow() -> None:
    both = (Merit.SPEED, Merit.HEADROOM)
    ended = EndedTrials(Objective.STEP_SECONDS, both)
    plateau = Plateau(trials=2, gain=0.05)
    ended.note_point({Merit.SPEED: 1.0, Merit.HEADROOM: 0.2})
    # Half the speed, and four times the memory free: a third more volume than before.
    ended.note_point({Merit.SPEED: 0.5, Merit.HEADROOM: 0.8})
    ended.note_point({})
    assert not ended.have_plateaued(plateau)
    # Dominated, and one whose memory was not read.
    ended.note_point({Merit.SPEED: 0.4, Merit.HEADROOM: 0.7})
    ended.note_point({Merit.SPEED: 2.0, Merit.HEADROOM: None})
    assert ended.have_plateaued(plateau)
