"""The ledger of attempts: what is computed from it after each event."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from db.write.writes import NewAttempt, NewTrial
from orchestrator.cluster.contract import Finished, Placed, Progressed
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Phase
from orchestrator.core.trial.purpose import Purpose
from orchestrator.sweep.attempts import Attempt, Attempts
from tests.sweep.test_loop import spec

CELL = spec(gpus=1).cells()[0]
LAYOUT = Layout(micro_batch_size=1)


def decide(attempts: Attempts, begins: NewTrial | NewAttempt, *, cell_id: int = 1) -> Attempt:
    return attempts.decide(
        cell_id=cell_id,
        cell=CELL,
        layout=LAYOUT,
        nodes=("a",),
        begins=begins,
        predicted=None,
        expected_gpu_seconds=None,
        now=1.0,
    )


def new(attempts: Attempts, *, cell_id: int = 1) -> Attempt:
    return decide(attempts, NewTrial(cell_id=cell_id, layout=LAYOUT), cell_id=cell_id)


def repeat(attempts: Attempts, trial_id: int, purpose: Purpose = Purpose.ANCHOR) -> Attempt:
    return decide(attempts, NewAttempt(trial_id=trial_id, purpose=purpose))


def finish(attempts: Attempts, attempt: Attempt) -> None:
    end = Finished(trial_id=attempt.trial_id, reports=(), failure=None, gpu_seconds=1.0)
    attempts.hear(end)
    assert attempt.end is end


def test_an_attempt_counts_as_launching_from_the_decision_on() -> None:
    attempts = Attempts()
    attempt = new(attempts)
    assert (len(attempts), list(attempts.running), attempts.decided) == (1, [], [attempt])
    assert attempts.num_in(TrialState.LAUNCHING) == 1
    assert attempts.of_cell(1).new == {attempt.id}
    attempts.start(attempt, 7, 1, now=5.0)
    assert (attempts.decided, list(attempts.trials)) == ([], [7])
    assert (attempt.trial_id, attempt.number, attempt.since) == (7, 1, 5.0)


def test_a_first_step_counts_once_it_is_in_the_store() -> None:
    attempts = Attempts()
    attempt = new(attempts)
    attempts.start(attempt, 7, 1, now=0.0)
    attempts.hear(Placed(trial_id=7, nodes=["a"]))
    attempts.hear(Progressed(trial_id=7, phase=Phase.FIRST_STEP, step=0))
    assert not attempt.made_first_step
    attempts.hear(Progressed(trial_id=7, phase=Phase.STEADY, step=3))
    assert attempt.made_first_step
    assert attempt.step == 3
    assert attempts.num_in(TrialState.RUNNING) == 0
    attempts.note_first_step_stored(attempt)
    counts = [attempts.num_in(one) for one in (TrialState.LAUNCHING, TrialState.RUNNING)]
    assert counts == [0, 1]


def test_an_attempt_that_ended_stays_until_its_end_is_in_the_store() -> None:
    attempts = Attempts()
    attempt = new(attempts)
    attempts.start(attempt, 7, 1, now=0.0)
    finish(attempts, attempt)
    assert (attempts.ended, list(attempts.running)) == ([attempt], [attempt])
    attempts.close(attempt, now=20.0)
    assert (len(attempts), attempts.ended, attempts.num_recorded) == (0, [], 1)
    assert attempts.of_cell(1).new == set()


def test_a_repeat_changes_no_state_of_its_trial_and_is_known_by_its_purpose() -> None:
    attempts = Attempts()
    attempt = repeat(attempts, 7, Purpose.PHYSICS)
    assert attempt.is_repeat
    assert attempts.of_cell(1).repeats == {7: Purpose.PHYSICS}
    assert attempts.num_in(TrialState.LAUNCHING) == 0
    attempts.start(attempt, 7, 2, now=0.0)
    attempts.hear(Progressed(trial_id=7, phase=Phase.STEADY, step=3))
    assert not attempt.made_first_step


@given(st.lists(st.sampled_from(["new", "retry", "repeat", "start", "step", "end", "close"])))
def test_what_is_computed_is_what_a_count_of_all_attempts_gives(events: list[str]) -> None:
    attempts, trial_id = Attempts(), 0
    for event in events:
        decided = list(attempts.decided)
        waiting = [one for one in attempts.running if one.end is None]
        if event == "new":
            new(attempts, cell_id=1 + len(attempts) % 2)
        elif event in ("retry", "repeat"):
            trial_id += 1
            purpose = Purpose.RETRY if event == "retry" else Purpose.ANCHOR
            repeat(attempts, trial_id * 1000, purpose)
        elif event == "start" and decided:
            trial_id += 1
            begins = decided[0].begins
            known = begins.trial_id if isinstance(begins, NewAttempt) else trial_id
            attempts.start(decided[0], known, 1, now=0.0)
        elif event == "step" and waiting and not waiting[0].is_repeat:
            if not waiting[0].is_first_step_stored:
                attempts.note_first_step_stored(waiting[0])
        elif event == "end" and waiting:
            finish(attempts, waiting[0])
        elif event == "close" and attempts.ended:
            attempts.close(attempts.ended[0], now=20.0)
        everything = list(attempts)
        assert len(attempts) == len(everything)
        new_ones = [one for one in everything if not one.is_repeat]
        stepped = sum(one.is_first_step_stored for one in new_ones)
        assert attempts.num_in(TrialState.RUNNING) == stepped
        assert attempts.num_in(TrialState.LAUNCHING) == len(new_ones) - stepped
        by_cell = Counter(one.cell_id for one in new_ones)
        assert all(len(attempts.of_cell(cell).new) == by_cell[cell] for cell in (1, 2))
        assert len(attempts.of_cell(1).repeats) == len(everything) - len(new_ones)
