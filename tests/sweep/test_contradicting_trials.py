"""Trials that contradict physics: found once, and repeated in turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestrator.core.problem.contradiction import TimedLayout
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.sweep.contradicting_trials import ContradictingTrials

# Trial 1 recomputes nothing, so it cannot take twice the time of trial 2.
LAYOUTS = {
    trial_id: Layout(micro_batch_size=4, recompute=Recompute.parse(text))
    for trial_id, text in ((1, "none"), (2, "selective_attention"))
}
SECONDS = {1: 2.0, 2: 1.0}


def timed(trial_ids: Collection[int]) -> Mapping[int, TimedLayout]:
    return {
        one: TimedLayout(layout=LAYOUTS[one], seconds=SECONDS[one], sd=0.01, thrashing=False)
        for one in trial_ids
    }


def both_checked() -> ContradictingTrials:
    found = ContradictingTrials()
    for trial_id, layout in LAYOUTS.items():
        found.note(trial_id, layout)
    assert found.has_unchecked
    found.check(timed, best_seconds=1.0, may_repeat=lambda _: True)
    assert not found.has_unchecked
    return found


def test_both_trials_of_a_contradiction_are_repeated_in_turn() -> None:
    found = both_checked()
    first = found.next(lambda _: True)
    assert first is not None and first[0] == 1
    assert "trial 1" in first[1] and "does less work than trial 2" in first[1]
    found.note_begun(1)
    second = found.next(lambda _: True)
    assert second is not None and second[0] == 2
    found.note_begun(2)
    assert found.next(lambda _: True) is None


def test_a_trial_that_may_not_be_repeated_is_passed_over() -> None:
    found = both_checked()
    second = found.next(lambda trial_id: trial_id != 1)
    assert second is not None and second[0] == 2


def test_all_are_compared_again_only_if_one_was_measured_since() -> None:
    found = both_checked()
    found.compare_all()
    assert found.has_unchecked
    found.check(timed, best_seconds=1.0, may_repeat=lambda _: True)
    found.compare_all()
    assert not found.has_unchecked
    found.note(1, LAYOUTS[1])
    found.compare_all()
    assert found.has_unchecked
