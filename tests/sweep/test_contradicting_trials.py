"""Trials that contradict physics: found once, and repeated in turn."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.core.problem.contradiction import TimedLayout
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.sweep.contradicting_trials import ContradictingTrials

# Trial 1 recomputes nothing, so it cannot take twice the time of trial 2.
LAYOUTS = {
    trial_id: Layout(micro_batch_size=4, recompute=Recompute.parse(text))
    for trial_id, text in ((1, "none"), (2, "selective_attention"))
}
SECONDS = {1: 2.0, 2: 1.0}


TIMED = {
    one: TimedLayout(layout=layout, seconds=SECONDS[one], sd=0.01, thrashing=False)
    for one, layout in LAYOUTS.items()
}


def both_checked(*, repeatable: Collection[int] = frozenset(LAYOUTS)) -> ContradictingTrials:
    found = ContradictingTrials()
    for trial_id, layout in LAYOUTS.items():
        found.note(trial_id, layout)
    assert found.has_unchecked and found.compared() == set(LAYOUTS)
    found.check(TIMED, best_seconds=1.0, repeatable=repeatable)
    assert not found.has_unchecked
    return found


def test_both_trials_of_a_contradiction_are_repeated_in_turn() -> None:
    found = both_checked()
    (first, why), (second, _) = found.found
    assert (first, second) == (1, 2)
    assert "trial 1" in why and "does less work than trial 2" in why
    found.note_begun(1)
    assert [trial_id for trial_id, _ in found.found] == [2]
    found.note_begun(2)
    assert found.found == []


def test_a_trial_that_may_not_be_repeated_is_passed_over() -> None:
    assert [trial_id for trial_id, _ in both_checked(repeatable={2}).found] == [2]


def test_all_are_compared_again_only_if_one_was_measured_since() -> None:
    found = both_checked()
    found.compare_all()
    assert found.has_unchecked
    assert found.compared() == set(LAYOUTS)
    found.check(TIMED, best_seconds=1.0, repeatable=LAYOUTS)
    found.compare_all()
    assert not found.has_unchecked
    found.note(1, LAYOUTS[1])
    found.compare_all()
    assert found.has_unchecked
