"""What is told of an attempt: how long it took, unless it only simulates."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_facts import attempt_facts


@pytest.mark.parametrize(
    ("phases", "seconds", "told"),
    [
        ({"warmup": 20.0, "timed": 30.0}, 60.0, ", took 1 min 00 s"),
        ({}, 60.0, ", took 1 min 00 s"),
        # Phases end a little after the attempt, by another clock.
        ({"timed": 60.5}, 60.0, ", took 1 min 00 s"),
        # Nobody waited for what is simulated.
        ({"timed": 500.0}, 0.1, "UTC"),
    ],
)
def test_an_attempt_says_how_long_it_took_unless_that_is_not_what_its_phases_say(
    scaling: SweepRows, phases: dict[str, float], seconds: float, told: str
) -> None:
    attempt = scaling.trials[0].attempts[0]
    attempt = replace(
        attempt,
        phase_seconds=phases,
        ended_at=attempt.started_at + timedelta(seconds=seconds),
    )
    facts = dict(attempt_facts(attempt, 2))
    assert facts["started"].endswith(told)
