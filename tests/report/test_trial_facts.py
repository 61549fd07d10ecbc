"""What is told of an attempt: how long it took, unless it only simulates."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.protocol import DriverMemoryKind, Phase
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_facts import attempt_facts, attempt_title, compared_rows


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


def test_shares_of_the_reserved_time_name_their_total_and_what_no_phase_has(
    scaling: SweepRows,
) -> None:
    attempt = next(one for _, one in scaling.attempts() if one.measurement is not None)
    attempt = replace(
        attempt,
        phase_seconds={Phase.START: 0.3, Phase.STEADY: 1.0},
        # 4.7 s of 2 GPUs: 79.9 % are neither timed steps nor warm-up.
        gpu_seconds=9.4,
        timed_seconds=0.7,
        warmup_seconds=0.245,
    )
    facts = attempt_facts(attempt, 2)
    assert dict(facts)["phases"] == "start 0.3 s, steady 1.0 s; 1.3 s in all"
    place = next(place for place, (name, _) in enumerate(facts) if name == "GPU-hours")
    hours, around = facts[place][1], facts[place + 1][1]
    assert hours == "0.0026: useful 14.9%, warm-up 5.2%, start-up 79.9% (4.7 s of 2 GPUs)"
    assert around is not None and "and 3.4 s of it before and after them" in around


def test_the_time_of_a_run_that_no_longer_counts_is_not_called_failed(
    scaling: SweepRows,
) -> None:
    measured = next(one for _, one in scaling.attempts() if one.measurement is not None)
    invalidated = replace(measured, gpu_seconds=9.4, superseded=True, pooled=False)
    hours = dict(attempt_facts(invalidated, 2))["GPU-hours"]
    assert hours == "0.0026: no longer counted 100.0% (4.7 s of 2 GPUs)"


def test_a_run_with_other_software_than_the_one_that_counts_says_so(scaling: SweepRows) -> None:
    first = next(one for _, one in scaling.attempts() if one.pooled and not one.superseded)
    assert first.fingerprint is not None
    other = first.fingerprint.model_copy(update={"stack": Stack(torch="9.9")})
    apart = replace(first, number=2, superseded=True, pooled=False)
    changed = replace(apart, fingerprint=other)
    assert attempt_title(changed, [first, changed]) == (
        "Attempt 2: measured; attempt 1 counts, with other code or software"
    )
    assert attempt_title(apart, [first, apart]) == (
        "Attempt 2: measured, superseded: it does not count"
    )


def test_the_peak_that_the_kernel_saw_is_shown_and_not_compared_with_allocations(
    scaling: SweepRows,
) -> None:
    trial = replace(
        next(one.trial for one in scaling.trials if one.trial.predicted_memory_bytes),
        peak_memory_allocated_bytes=None,
        peak_memory_reserved_bytes=None,
        peak_memory_driver_bytes=300 << 20,
        peak_memory_driver_kind=DriverMemoryKind.RSS,
        device_memory_bytes=None,
    )
    name, predicted, measured, ratio = compared_rows(trial)[1]
    assert (name, measured, ratio) == ("peak memory", "300.0 MiB (rss)", "-")
    assert predicted != "-"
