"""The runs of a cell's trials: the fastest by all of them, at the machine's present speed."""

from __future__ import annotations

from math import exp

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.sweep.measured_runs import MeasuredRuns


def layout(size: int) -> Layout:
    return Layout(micro_batch_size=size)


def runs_of(*seconds: tuple[int, float]) -> MeasuredRuns:
    """Runs of trials, one second apart; trial 2 has micro-batches of 2."""
    found = MeasuredRuns()
    for at, (trial_id, each) in enumerate(seconds):
        purpose = Purpose.CONFIRMATION if trial_id in found.of_trial else Purpose.NEW
        run = Run(step_seconds=each, at=float(at), nodes=(f"n{at}",), purpose=purpose)
        found.note(trial_id, layout(trial_id), run)
    return found


def test_nothing_is_known_before_the_first_run() -> None:
    nothing = MeasuredRuns()
    assert (nothing.num_trials, nothing.leader, nothing.best(), nothing.newest) == (
        0,
        None,
        None,
        None,
    )
    assert (nothing.seconds, nothing.drift(), nothing.change) == ({}, None, None)


def test_the_fastest_leads_and_of_equals_the_first_trial() -> None:
    runs = runs_of((1, 1.2), (2, 1.0))
    assert runs.best() == (layout(2), 1.0)
    runs.note(4, layout(4), Run(step_seconds=0.9))
    assert runs.best() == (layout(4), 0.9)
    runs.note(3, layout(3), Run(step_seconds=0.9))
    assert runs.leader == 3
    runs.note(8, layout(8), Run(step_seconds=1.5))
    assert runs.leader == 3


def test_a_leader_whose_repeat_was_slow_falls_behind() -> None:
    runs = runs_of((1, 1.00), (2, 1.01))
    assert runs.leader == 1
    runs.note(1, layout(1), Run(step_seconds=1.06, at=5.0, purpose=Purpose.CONFIRMATION))
    assert runs.change is None
    assert runs.leader == 2
    assert runs.num_repeats == 1


def test_a_repeat_may_make_another_trial_the_leader() -> None:
    runs = runs_of((1, 1.00), (2, 1.01))
    assert runs.leader == 1
    runs.note(2, layout(2), Run(step_seconds=0.95, at=5.0, purpose=Purpose.CONFIRMATION))
    assert runs.leader == 2


def test_without_drift_a_trial_takes_the_median_of_its_runs() -> None:
    runs = runs_of((1, 1.0), (1, 1.02), (1, 1.01))
    assert runs.seconds_of(1) == pytest.approx(1.01)
    assert runs.seconds == {1: runs.seconds_of(1)}
    assert runs.seconds_of_each([]) == {}


def test_runs_of_a_machine_that_was_faster_are_corrected() -> None:
    # Each run takes 3 % longer than the one before it, and trials 1 to 3 are repeated.
    order = [1, 2, 3, 4, 5, 6, 1, 2, 3, 1, 2, 3]
    runs = runs_of(
        *((trial_id, (1 + trial_id / 100) * exp(0.03 * at)) for at, trial_id in enumerate(order))
    )
    assert runs.change is not None
    now = exp(0.03 * (len(order) - 1))
    # Trial 6 has not run since, and would take longer by now, too.
    assert runs.seconds_of(6) == pytest.approx(1.06 * now, rel=0.05)
    assert runs.seconds_of(1) == pytest.approx(1.01 * now, rel=0.05)
    assert runs.leader == 1


def test_what_was_measured_is_found_by_trial_and_by_layout() -> None:
    runs = runs_of((1, 1.0), (2, 1.1), (1, 1.0))
    assert runs.num_trials == 2
    assert runs.layout_of(2) == layout(2)
    assert (runs.trial_of(layout(2)), runs.trial_of(layout(16))) == (2, None)
    assert runs.nodes_of(1) == {"n0", "n2"}
    assert runs.newest == 2.0
    undated = MeasuredRuns()
    undated.note(1, layout(1), Run(step_seconds=1.0))
    assert undated.newest is None
