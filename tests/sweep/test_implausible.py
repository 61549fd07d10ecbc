"""Numbers of a user's program that cannot be true: they are stored, marked, and never win."""

from __future__ import annotations

from typing import Any

import pytest

from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import (
    CountedLines,
    LinesRead,
    ProgramSeen,
    RankResult,
    TrialRequest,
)
from orchestrator.sweep.finished import finished_before
from tests.sweep.test_loop import CODE, run, spec

NAME = "t"


def foreign(*, repeats: int = 0, **changes: Any) -> SweepSpec:
    """One cell with six layouts of a user's program."""
    options = {"argv": ["train"]}
    plan = {"warmup_steps": 2, "min_steps": 8, "max_steps": 12}
    return spec(
        repeats=repeats,
        gpus=1,
        workload={"name": "command", "options": options},
        measurement=plan,
        **changes,
    )


def told(request: TrialRequest, *, pace: float = 1.0, factor: float = 1.0) -> RankResult:
    """A result whose lines came `pace` times as slowly as they tell."""
    layout = request.layout
    seconds = factor * (1.0 + 0.1 / layout.micro_batch_size + 0.01 * len(layout.key))
    steps = [seconds * (1 + 0.00123 * (number % 5)) for number in range(14)]
    ends = [pace * sum(steps[: number + 1]) for number in range(14)]
    reads = [
        LinesRead(after=end - 0.05, at=end, num_steps=number + 1) for number, end in enumerate(ends)
    ]
    return RankResult(
        warmup_seconds=steps[:2],
        step_seconds=steps[2:],
        stack=Stack(torch="2.13.0"),
        seen=ProgramSeen(seconds=ends[-1] + 1, reads=reads),
    )


def test_a_number_that_cannot_be_true_is_marked_and_does_not_win(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        is_wrong = request.layout.micro_batch_size == 4
        return told(request, pace=100.0, factor=0.01) if is_wrong else told(request)

    result, _ = run(store, script, spec=foreign(repeats=1))
    trials = store.trials(store.sweep_named(NAME).id)
    marked = [trial for trial in trials if trial.implausible is not None]
    assert {trial.layout.micro_batch_size for trial in marked} == {4}
    for trial in marked:
        assert trial.state is TrialState.MEASURED and trial.confident is False
        assert "torch.cuda.synchronize()" in (trial.implausible or "")
        assert trial.num_attempts == 1, "nothing confirms it"
    (cell_best,) = store.best(store.sweep_named(NAME).id, 10).values()
    assert {trial.layout.micro_batch_size for trial in cell_best} == {1, 2}
    (tied,) = result.tied.values()
    assert {layout.micro_batch_size for layout in tied} <= {1, 2}


def test_another_call_goes_on_without_what_cannot_be_true(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        is_wrong = request.layout.micro_batch_size == 4
        return told(request, pace=100.0, factor=0.01) if is_wrong else told(request)

    run(store, script, spec=foreign())
    _, scheduler = run(store, script, spec=foreign(repeats=1))
    assert scheduler.started and all(one.micro_batch_size != 4 for one, _ in scheduler.started)


def test_steps_that_took_longer_than_the_program_are_a_bad_result(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        is_wrong = request.layout.micro_batch_size == 4
        return told(request, pace=0.001, factor=1000.0) if is_wrong else told(request)

    run(store, script, spec=foreign())
    failed = [t for t in store.trials(store.sweep_named(NAME).id) if t.state is TrialState.FAILED]
    assert {trial.layout.micro_batch_size for trial in failed} == {4}
    assert {trial.failure_kind for trial in failed} == {FailureKind.BAD_RESULT}
    assert all("milliseconds? Seconds are" in (trial.failure_message or "") for trial in failed)


def test_a_sweep_stops_after_five_trials_that_tell_nothing_true(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="numbers that cannot be true, the first: its lines"):
        run(store, lambda request: told(request, pace=50.0), spec=foreign())
    assert len(store.trials(store.sweep_named(NAME).id)) == 5


def test_a_repeat_that_cannot_be_true_leaves_the_first_run_as_it_was(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        return told(request, pace=9.0 if request.attempt > 1 else 1.0)

    run(store, script, spec=foreign(repeats=1))
    trials = store.trials(store.sweep_named(NAME).id)
    assert all(trial.implausible is None for trial in trials)
    repeated = [trial for trial in trials if trial.num_attempts > 1]
    assert repeated
    assert {trial.failure_kind for trial in repeated} == {FailureKind.BAD_RESULT}


def test_a_repeat_that_a_slow_machine_spoilt_is_taken_again(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        return told(request, pace=9.0 if request.attempt == 2 else 1.0)

    run(store, script, spec=foreign(repeats=1))
    trials = store.trials(store.sweep_named(NAME).id)
    repeated = [trial for trial in trials if trial.num_attempts > 1]
    assert repeated
    assert all(trial.num_measurements == trial.num_attempts - 1 > 1 for trial in repeated)


def test_the_same_number_for_every_layout_is_marked_for_all_of_them(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        same = request.model_copy(update={"layout": request.layout.__class__()})
        return told(same)

    result, _ = run(store, script, spec=foreign(repeats=1))
    trials = store.trials(store.sweep_named(NAME).id)
    measured = [trial for trial in trials if trial.state is TrialState.MEASURED]
    assert len(measured) == 6
    assert all("does the program use its arguments" in (t.implausible or "") for t in measured)
    assert store.best(store.sweep_named(NAME).id) == {}
    assert not any(result.tied.values())


def counting(store: Store, is_wrong: bool, **changes: Any) -> list[tuple[int, bool]]:
    """The micro-batches of each trial's step, and whether its lines were counted."""
    found = []

    def script(request: TrialRequest) -> RankResult:
        accumulated, counts = request.layout.grad_accum_steps, request.measurement.counts_lines
        found.append((accumulated, counts))
        result = told(request)
        if not counts:
            return result
        asked = request.measurement.warmup_steps + request.measurement.max_steps
        num = asked * (accumulated if is_wrong else 1)
        assert result.seen is not None
        seen = {"counted": CountedLines(num_asked=asked, num_written=num)}
        return result.model_copy(update={"seen": result.seen.model_copy(update=seen)})

    run(store, script, spec=foreign(**changes))
    return found


def test_lines_are_counted_until_one_trial_shows_that_a_line_is_a_step(store: Store) -> None:
    found = counting(store, is_wrong=False)
    accumulated = [one for one, _ in found]
    first_with_several = next(place for place, one in enumerate(accumulated) if one > 1)
    counted = {0, first_with_several}
    assert [counts for _, counts in found] == [place in counted for place in range(len(found))]


def test_a_line_for_each_micro_batch_is_found_in_every_trial(store: Store) -> None:
    with pytest.raises(UsageInvalid, match=r"one for each of the .* micro-batches of a step"):
        counting(
            store,
            is_wrong=True,
            axes={"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]},
        )
    trials = store.trials(store.sweep_named(NAME).id)
    assert {trial.implausible is None for trial in trials if trial.layout.grad_accum_steps > 1} == {
        False
    }


def test_repeats_and_other_workloads_are_not_counted(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        assert request.attempt == 1 or not request.measurement.counts_lines
        return told(request)

    run(store, script, spec=foreign(repeats=1))

    def other(request: TrialRequest) -> float:
        assert not request.measurement.counts_lines
        return 1.0 / request.layout.micro_batch_size

    run(store, other, spec=spec(name="other"))


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def test_a_cell_without_true_numbers_is_told_by_the_next_call_as_by_the_first(
    store: Store,
) -> None:
    def script(request: TrialRequest) -> RankResult:
        is_wrong = request.layout.world_size == 2
        return told(request, pace=100.0, factor=0.01) if is_wrong else told(request)

    changes: dict[str, Any] = {"gpus": [1, 2], "device": "cpu", "gpus_per_node": 2}
    file = SweepSpec.model_validate(foreign().model_dump() | changes)
    first, _ = run(store, script, spec=file)
    again = finished_before(
        file, store, code=lambda: CODE, program_version=CODE.orchestrator_version, this_host="here"
    )
    assert again is not None and any(first.implausible.values())
    assert again.implausible == first.implausible
