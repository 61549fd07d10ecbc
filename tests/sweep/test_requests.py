"""What people ask of a sweep, running or not: layouts measured next, trials measured again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from db.store import Store
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.sweep import lease
from orchestrator.sweep.progress import StopReason
from tests.sweep.test_loop import fast, run, spec

Script = Callable[[TrialRequest], float | FailureKind]


@pytest.fixture
def store(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(lease, "RENEW_SECONDS", -1.0)
    return sqlite_store


def one_cell(**search: object) -> SweepSpec:
    return spec(
        gpus=[1], axes={"micro_batch_size": [1, 2, 4, 8], "recompute": "none"}, search=search
    )


def asking(what: Callable[[TrialRequest], None], *, at: int) -> Script:
    """Run trials, and ask for something while the trial of this number runs first."""
    is_asked: list[bool] = []

    def script(request: TrialRequest) -> float | FailureKind:
        if request.trial_id == at and not is_asked:
            is_asked.append(True)
            what(request)
        return fast(request)

    return script


def micro_batches(started: list[tuple[Layout, int]]) -> list[int]:
    return [one.micro_batch_size for one, _ in started]


def known(store: Store, micro_batch_size: int) -> Layout:
    """The layout of the cell with this micro-batch size, as the search names it."""
    like = store.trials(1)[0].layout
    share = 8 // micro_batch_size
    return replace(like, micro_batch_size=micro_batch_size, grad_accum_steps=share)


def test_a_layout_that_is_asked_for_is_measured_next(store: Store) -> None:
    given = one_cell(strategy="exhaustive")
    order = micro_batches(run(store, fast, spec=given)[1].started)
    last = order[-1]

    def ask(_: TrialRequest) -> None:
        cell = store.cells(store.sweep_named("again").id)[0]
        trial_id, state, waits = store.enqueue(cell.id, known(store, last))
        assert (trial_id, state, waits) == (6, TrialState.QUEUED, True)

    again = given.model_copy(update={"name": "again"})
    result, scheduler = run(store, asking(ask, at=5), spec=again)
    assert micro_batches(scheduler.started) == [order[0], last, *order[1:-1]]
    assert result.counts[TrialState.MEASURED] == 4
    assert [one.event for one in store.trial(6).events][:2] == ["added", "enqueued"]


def test_a_layout_beyond_max_trials_is_measured_if_it_is_asked_for(store: Store) -> None:
    limited = one_cell(max_trials=2)

    def ask(_: TrialRequest) -> None:
        tried = {one.layout.micro_batch_size for one in store.trials(1)}
        untried = next(size for size in (1, 2, 4, 8) if size not in tried)
        assert store.enqueue(1, known(store, untried))[2]

    result, scheduler = run(store, asking(ask, at=2), spec=limited)
    assert len(scheduler.started) == 3
    assert result.stopped[limited.cells()[0]] is StopReason.TRIALS


def test_what_nobody_takes_up_waits_for_the_next_call(store: Store) -> None:
    limited = one_cell(max_trials=1)
    run(store, fast, spec=limited)
    untried = 8 if store.trials(1)[0].layout.micro_batch_size != 8 else 4
    trial_id, _, waits = store.enqueue(1, known(store, untried))
    assert waits
    _, scheduler = run(store, fast, spec=limited)
    assert micro_batches(scheduler.started) == [untried]
    (trial,) = store.trials_by_id([trial_id])
    assert trial.state is TrialState.MEASURED and trial.why == "asked for: sweep enqueue"
    assert run(store, fast, spec=limited)[1].started == []


def test_a_trial_is_measured_again_while_the_sweep_runs(store: Store) -> None:
    def ask(_: TrialRequest) -> None:
        assert store.ask_to_retry(1, 1)

    result, scheduler = run(store, asking(ask, at=2), spec=one_cell())
    assert len(scheduler.started) == 5
    detail = store.trial(1)
    assert [one.superseded for one in detail.attempts] == [True, False]
    assert [one.event for one in detail.events].count("retry_asked") == 1
    assert result.counts == {**dict.fromkeys(result.counts, 0), TrialState.MEASURED: 4}
    # The next call does not measure it once more.
    assert run(store, fast, spec=one_cell())[1].started == []


def test_a_failed_trial_gets_another_attempt_when_it_is_asked_for(store: Store) -> None:
    times: list[int] = []

    def script(request: TrialRequest) -> float | FailureKind:
        if request.trial_id == 1 and not times:
            times.append(1)
            return FailureKind.USER_ERROR
        if request.trial_id == 3:
            store.ask_to_retry(1, 1)
        return fast(request)

    result, _ = run(store, script, spec=one_cell())
    assert result.counts[TrialState.MEASURED] == 4 and not result.counts.get(TrialState.FAILED)


def test_layouts_that_an_out_of_memory_ruled_out_wait_again_with_it(store: Store) -> None:
    is_small: list[bool] = []

    def script(request: TrialRequest) -> float | FailureKind:
        if request.layout.micro_batch_size > 1 and not is_small:
            return FailureKind.OOM_GPU
        return fast(request)

    run(store, script, spec=one_cell(dominance="trusted"))
    states = [one.state for one in store.trials(1)]
    assert TrialState.PRUNED in states or states.count(TrialState.OUT_OF_MEMORY) > 1
    is_small.append(True)
    for one in store.trials(1):
        if one.state is TrialState.OUT_OF_MEMORY:
            assert store.ask_to_retry(1, one.id)
    result, _ = run(store, script, spec=one_cell(dominance="trusted"))
    assert result.counts[TrialState.MEASURED] == 4


def test_nothing_is_asked_of_a_trial_that_waits_or_runs(store: Store) -> None:
    def ask(request: TrialRequest) -> None:
        assert not store.ask_to_retry(1, request.trial_id)
        layout = store.trials_by_id([request.trial_id])[0].layout
        trial_id, state, waits = store.enqueue(1, layout)
        assert (trial_id, waits) == (request.trial_id, False)
        assert state in (TrialState.LAUNCHING, TrialState.RUNNING)

    result, _ = run(store, asking(ask, at=1), spec=one_cell())
    assert result.counts[TrialState.MEASURED] == 4
