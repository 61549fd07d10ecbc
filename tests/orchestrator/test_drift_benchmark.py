"""A few sweeps on machines that drift, whole ones: the benchmark of drift, small."""

from __future__ import annotations

import pytest

from benchmarks.drift import WRONG, Case, run_case


@pytest.mark.parametrize("drift", ["slow_start", "step", "wave", "slow_node"])
def test_no_layout_is_called_the_winner_that_only_the_hour_favoured(drift: str) -> None:
    for seed in (1, 4):
        outcome = run_case(Case(drift=drift, rule="now", seed=seed, max_trials=16))
        assert outcome.off is None or outcome.off <= WRONG, outcome
        assert outcome.among_tied, outcome


def test_the_earlier_rule_was_misled_by_the_same_drift() -> None:
    """Else the test above could not fail."""
    outcomes = [run_case(Case(drift="slow_start", rule="earlier", seed=seed, max_trials=None)) for seed in (1, 4)]
    assert all(outcome.off is not None and outcome.off > WRONG for outcome in outcomes)


def test_a_quiet_machine_has_a_winner_and_pays_little() -> None:
    outcome = run_case(Case(drift="none", rule="now", seed=1, max_trials=16))
    assert outcome.named
    assert outcome.repeats <= 6
