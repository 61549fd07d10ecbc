"""The confirmation of one cell: which layout leads, however its runs come in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.core.trial.winner import median_run
from orchestrator.sweep.confirmation import Confirmation, Repeat


def layout(trial_id: int) -> Layout:
    return Layout(data_parallel_size=1, micro_batch_size=1 + trial_id)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0])), min_size=1)
)
def test_the_leader_is_the_trial_with_the_fastest_median_after_every_run(
    runs: list[tuple[int, float]],
) -> None:
    confirmation, all_of = Confirmation(), dict[int, list[Run]]()
    for trial_id, step_seconds in runs:
        run = Run(step_seconds=step_seconds, relative_confidence=None)
        confirmation.note(trial_id, layout(trial_id), run)
        all_of.setdefault(trial_id, []).append(run)
        seconds, fastest = min((median_run(some).step_seconds, one) for one, some in all_of.items())
        assert confirmation.runs.best() == (layout(fastest), seconds)


CONFIRM = Confirm(contenders=3, repeats=2)


def begin(confirmation: Confirmation, trial_id: int, purpose: Purpose) -> None:
    """Begin a repeat, as the ledger of attempts has it while it is under way."""
    repeating(confirmation)[trial_id] = purpose
    confirmation.begin(trial_id)


def repeating(confirmation: Confirmation) -> dict[int, Purpose]:
    assert isinstance(confirmation.repeating, dict)
    return confirmation.repeating


def note(
    confirmation: Confirmation,
    trial_id: int,
    seconds: float,
    at: float,
    *,
    of: Layout | None = None,
    purpose: Purpose = Purpose.NEW,
) -> None:
    repeating(confirmation).pop(trial_id, None)
    confirmation.note(
        trial_id,
        of or layout(trial_id),
        Run(step_seconds=seconds, relative_confidence=0.005, at=at, purpose=purpose),
    )


def check(confirmation: Confirmation, every: int = 4) -> Repeat | None:
    return confirmation.next_check(CONFIRM, anchor_every=every)


def test_the_first_that_was_measured_is_measured_again_after_so_many_trials() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 5):
        assert check(confirmation) is None
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id)
    anchor = check(confirmation)
    assert anchor is not None
    assert (anchor.trial_id, anchor.purpose) == (1, Purpose.ANCHOR)
    begin(confirmation, 1, Purpose.ANCHOR)
    assert check(confirmation) is None  # it is under way
    note(confirmation, 1, 2.0, 300.0, purpose=Purpose.ANCHOR)
    due = []
    for trial_id in range(5, 20):
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id + 100)
        due.append(check(confirmation) is not None)
    # Twice as many trials later, since the machine stayed as it was.
    assert due.index(True) == 7


def test_in_a_cell_of_many_layouts_the_first_is_soon_measured_again_to_know_the_noise() -> None:
    confirmation, due = Confirmation(), list[int]()
    for trial_id in range(1, 30):
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id)
        if confirmation.next_check(CONFIRM, anchor_every=8, num_left=100):
            due.append(trial_id)
            note(confirmation, 1, 2.0, 60.0 * trial_id + 30, purpose=Purpose.ANCHOR)
    # After 3; then the distance doubles from 8.
    assert due == [3, 19]


def test_a_machine_that_changed_is_looked_at_after_as_many_trials_again() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 5):
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id)
    note(confirmation, 1, 3.5, 300.0, purpose=Purpose.ANCHOR)
    assert confirmation.runs.change is not None
    for trial_id in range(5, 9):
        assert check(confirmation) is None
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id + 100)
    assert check(confirmation) is not None


def test_after_a_pause_the_anchor_is_measured_before_anything_new() -> None:
    confirmation = Confirmation()
    confirmation.pause()
    assert check(confirmation) is None  # nothing was measured before it
    note(confirmation, 1, 1.0, 0.0)
    note(confirmation, 2, 1.1, 60.0)
    confirmation.pause()
    anchor = check(confirmation)
    assert anchor is not None
    assert "after a pause" in anchor.why
    note(confirmation, 1, 1.0, 9000.0, purpose=Purpose.ANCHOR)
    assert check(confirmation) is None


def test_nothing_is_measured_again_where_nothing_is_confirmed() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 30):
        note(confirmation, trial_id, 1.0, 60.0 * trial_id)
    none = Confirm(repeats=0)
    assert confirmation.next_check(none, anchor_every=4) is None
    assert confirmation.next_repeat(none, anchor_every=4) is None
    assert confirmation.next_repeat(CONFIRM, anchor_every=0) is not None
    assert confirmation.next_check(CONFIRM, anchor_every=0) is None


def test_an_anchor_comes_before_what_is_confirmed_and_once() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 4):
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id)
    first = confirmation.next_repeat(CONFIRM, anchor_every=8)
    assert first is not None
    assert (first.trial_id, first.purpose) == (1, Purpose.ANCHOR)
    begin(confirmation, 1, Purpose.ANCHOR)
    assert confirmation.next_repeat(CONFIRM, anchor_every=8) is None
    note(confirmation, 1, 2.0, 300.0, purpose=Purpose.ANCHOR)
    # The anchor is the best, twice so, and nothing comes near it.
    assert confirmation.next_repeat(CONFIRM, anchor_every=8) is None
    confirmation.pause()
    # Nothing is wanted that the pause could have spoilt.
    assert confirmation.next_repeat(CONFIRM, anchor_every=8) is None


def test_nothing_is_confirmed_while_the_anchor_waits_for_another_repeat() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 4):
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id)
    begin(confirmation, 2, Purpose.PHYSICS)
    assert confirmation.next_repeat(CONFIRM, anchor_every=8) is None
    note(confirmation, 2, 3.0, 240.0, purpose=Purpose.PHYSICS)
    anchor = confirmation.next_repeat(CONFIRM, anchor_every=8)
    assert anchor is not None
    assert (anchor.purpose, anchor.why) == (
        Purpose.ANCHOR,
        "to see whether the machine has changed, after 3 measured trials",
    )


def test_an_anchor_under_way_is_no_doubt() -> None:
    confirmation = Confirmation()
    note(confirmation, 1, 1.0, 0.0)
    note(confirmation, 2, 1.1, 60.0)
    begin(confirmation, 1, Purpose.ANCHOR)
    begin(confirmation, 2, Purpose.DOUBT)
    assert [confirmation.was_doubted(trial_id) for trial_id in (1, 2)] == [False, True]


def test_anchors_leave_as_many_confirmations_to_come() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 4):
        note(confirmation, trial_id, 1.0, 60.0 * trial_id)
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=0) == 6
    note(confirmation, 1, 1.0, 240.0, purpose=Purpose.ANCHOR)
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=0) == 6
    note(confirmation, 1, 1.0, 300.0, purpose=Purpose.CONFIRMATION)
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=0) == 5
    assert confirmation.most_to_confirm(Confirm(repeats=0), anchor_every=0) == 0


def test_an_anchor_that_is_due_comes_on_top_of_the_confirmations() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 4):
        note(confirmation, trial_id, 1.0, 60.0 * trial_id)
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=8) == 7
    note(confirmation, 1, 1.0, 240.0, purpose=Purpose.ANCHOR)
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=8) == 6


def test_once_the_machine_has_changed_all_that_could_win_are_counted() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 6):
        note(confirmation, trial_id, 1.0, 60.0 * trial_id)
    note(confirmation, 1, 1.6, 360.0, purpose=Purpose.ANCHOR)
    note(confirmation, 1, 1.6, 420.0, purpose=Purpose.ANCHOR)
    assert confirmation.runs.change is not None
    verdict = confirmation._judge(CONFIRM)
    assert verdict is not None and len(verdict.tied) == 5
    # Two repeats of each, and three more of the three contenders.
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=0) == 5 * 2 + 3 * 3
    assert confirmation.most_repeats(CONFIRM, 5) == 19


def test_an_anchor_that_cannot_be_repeated_gives_way_once() -> None:
    confirmation = Confirmation()
    for trial_id in range(1, 6):
        note(confirmation, trial_id, 1.0 + trial_id, 60.0 * trial_id)
    for expected in (1, 2):
        anchor = check(confirmation)
        assert anchor is not None
        assert anchor.trial_id == expected
        begin(confirmation, expected, Purpose.ANCHOR)
        assert confirmation.fail(expected, FailureKind.OOM_GPU) is TrialEvent.OUT_OF_MEMORY
        del repeating(confirmation)[expected]
    assert check(confirmation) is None


def test_a_repeat_with_impossible_numbers_is_tried_twice_more_and_then_none_is_expected() -> None:
    confirmation = Confirmation()
    note(confirmation, 1, 1.0, 60.0)
    events = []
    for _ in range(3):
        found = confirmation.next_repeat(CONFIRM, anchor_every=0)
        assert found is not None and found.trial_id == 1
        assert confirmation.most_to_confirm(CONFIRM, anchor_every=0) > 0
        events.append(confirmation.fail(1, FailureKind.BAD_RESULT))
    assert events == [TrialEvent.REQUEUED, TrialEvent.REQUEUED, TrialEvent.FAILED]
    assert confirmation.next_repeat(CONFIRM, anchor_every=0) is None
    assert confirmation.most_to_confirm(CONFIRM, anchor_every=0) == 0


def test_what_contradicts_physics_is_measured_again_both_in_turn_and_once() -> None:
    confirmation = Confirmation()
    none, selective = (
        Layout(micro_batch_size=4, recompute=Recompute.parse(text))
        for text in ("none", "selective_attention")
    )
    note(confirmation, 1, 2.0, 0.0, of=none)
    note(confirmation, 2, 1.0, 60.0, of=selective)
    taken = []
    for at in (120.0, 180.0, 240.0, 300.0):
        again = check(confirmation, every=100)
        if again is None:
            break
        assert again.purpose is Purpose.PHYSICS
        assert "does less work" in again.why
        taken.append(again.trial_id)
        begin(confirmation, again.trial_id, again.purpose)
        note(
            confirmation,
            again.trial_id,
            {1: 2.0, 2: 1.0}[again.trial_id],
            at,
            of=again.layout,
            purpose=again.purpose,
        )
    # It still is so: then it is believed.
    assert taken == [1, 2]


def test_a_contradiction_on_a_busy_machine_is_measured_again_once_repeats_show_no_harm() -> None:
    """The layout with the least work ran 2.6 times slower once, while others took the cores.

    The load may explain that until a repeat shows that this program does not wait for cores. The
    verdict then takes the slow layout for slow, so physics has to ask for another run of it.
    """
    confirmation = Confirmation()
    layouts = {
        1: Layout(micro_batch_size=8),
        2: Layout(micro_batch_size=4, grad_accum_steps=2),
        3: Layout(micro_batch_size=4, grad_accum_steps=2, recompute=Recompute.parse("full")),
    }
    seconds = {1: 0.060, 2: 0.130, 3: 0.053}

    def run(trial_id: int, at: float, purpose: Purpose = Purpose.NEW) -> None:
        repeating(confirmation).pop(trial_id, None)
        taken = Run(
            step_seconds=seconds[trial_id],
            relative_confidence=0.005,
            load_sd=0.8,
            at=at,
            purpose=purpose,
        )
        confirmation.note(trial_id, layouts[trial_id], taken)

    for trial_id in layouts:
        run(trial_id, 60.0 * trial_id)
        assert check(confirmation, every=100) is None
    seconds[2] = 0.050
    taken = []
    while (again := confirmation.next_repeat(CONFIRM, anchor_every=8)) is not None:
        taken.append((again.trial_id, again.purpose))
        begin(confirmation, again.trial_id, again.purpose)
        run(again.trial_id, 240.0 + 60.0 * len(taken), again.purpose)
    assert taken[0] == (1, Purpose.ANCHOR)
    assert (2, Purpose.PHYSICS) in taken[:3]
    verdict = confirmation.verdict()
    assert verdict is not None and verdict.tied == (2,)


def test_of_a_contradiction_a_trial_that_fails_meanwhile_is_passed_over() -> None:
    confirmation = Confirmation()
    for trial_id, seconds, text in ((1, 2.0, "none"), (2, 1.0, "selective_attention")):
        of = Layout(micro_batch_size=4, recompute=Recompute.parse(text))
        note(confirmation, trial_id, seconds, 60.0 * trial_id, of=of)
    found = check(confirmation, every=100)
    assert found is not None and (found.trial_id, found.purpose) == (1, Purpose.PHYSICS)
    confirmation.fail(1, FailureKind.OOM_GPU)
    found = check(confirmation, every=100)
    assert found is not None and (found.trial_id, found.purpose) == (2, Purpose.PHYSICS)


def test_a_search_that_has_ended_wants_what_the_next_call_would_want() -> None:
    """The next call reads all runs from the store and compares all of them; by then the machine was
    seen to change.
    """
    none, full = (
        Layout(data_parallel_size=1),
        Layout(data_parallel_size=1, recompute=Recompute.parse("full")),
    )
    runs = [
        (1, none, 1.6, 0.0),
        (2, full, 1.5, 60.0),
        (3, layout(3), 3.0, 600.0),
        (1, none, 1.6, 660.0),
        (2, full, 0.95, 720.0),
    ]
    first = Confirmation()
    for trial_id, of, seconds, at in runs:
        first.next_check(CONFIRM, anchor_every=0)  # compares what is new
        note(
            first,
            trial_id,
            seconds,
            at,
            of=of,
            purpose=Purpose.NEW if first.num_runs(trial_id) == 0 else Purpose.CONFIRMATION,
        )
    then = Confirmation()
    for trial_id, of, seconds, at in runs:
        note(
            then,
            trial_id,
            seconds,
            at,
            of=of,
            purpose=Purpose.NEW if then.num_runs(trial_id) == 0 else Purpose.CONFIRMATION,
        )
    assert first.next_repeat(CONFIRM, anchor_every=0) == then.next_repeat(CONFIRM, anchor_every=0)


def test_numbers_are_told_as_the_machine_is_now() -> None:
    confirmation = Confirmation()
    note(confirmation, 1, 1.6, 0.0)
    note(confirmation, 2, 1.9, 60.0)
    note(confirmation, 3, 1.3, 600.0)
    note(confirmation, 1, 1.0, 660.0, purpose=Purpose.ANCHOR)
    note(confirmation, 1, 1.0, 720.0, purpose=Purpose.CONFIRMATION)
    best = confirmation.runs.best()
    assert best is not None
    assert best[0] == layout(1)
    assert abs(confirmation.runs.seconds_of(1) - 1.0) < 0.1
    assert confirmation.runs.seconds_of(2) < 1.9


def test_of_layouts_that_ended_together_the_smallest_trial_is_the_anchor() -> None:
    """As a later call reads them from the store."""
    confirmation = Confirmation()
    for trial_id, at in ((2, 60.0), (1, 60.0), (3, 120.0), (4, 180.0)):
        note(confirmation, trial_id, 1.0, at)
    anchor = check(confirmation)
    assert anchor is not None
    assert anchor.trial_id == 1


def test_the_best_of_a_spent_budget_is_repeated_once_whatever_else_is_due() -> None:
    confirmation = Confirmation()
    for trial_id, seconds in ((1, 3.0), (2, 1.0), (3, 2.0)):
        note(confirmation, trial_id, seconds, 60.0 * trial_id)
    anchor, best = (
        confirmation.next_repeat(CONFIRM, anchor_every=8),
        confirmation.repeat_of_best(CONFIRM),
    )
    assert anchor is not None
    assert best is not None
    assert (anchor.trial_id, best.trial_id, best.purpose) == (1, 2, Purpose.CONFIRMATION)
    assert confirmation.repeat_of_best(Confirm(repeats=0)) is None
    begin(confirmation, 2, Purpose.CONFIRMATION)
    assert confirmation.repeat_of_best(CONFIRM) is None
