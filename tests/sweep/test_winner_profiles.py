"""`measurement.profile: winners`: each cell's fastest layout is profiled once, within budgets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import RankResult, TrialRequest
from orchestrator.core.trial.rank_profile import ProfilePlan
from orchestrator.core.trial.trace_split import Part
from orchestrator.sweep.finished import finished_before
from orchestrator.sweep.profiling import profile_trial
from orchestrator.sweep.progress import Stop, StopReason, SweepResult
from orchestrator.sweep.run import run_sweep
from tests.core.trial.rank_profiles import rank_profile
from tests.sweep.fake_scheduler import FakeScheduler

CODE = Fingerprint(orchestrator_version="test")
FOUND = rank_profile({Part.EXPOSED_DP: 400_000}, is_slowest=True)


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def spec(profile: str = "winners", **changes: Any) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-tiny",
            "sequence_length": 64,
            "global_batch_size": 8,
            "precision": "fp32",
            "device": "cpu",
            "gpus": [1, 2],
            "gpus_per_node": 2,
            "axes": {"micro_batch_size": [1, 2, 4], "recompute": ["none"]},
            "measurement": {"profile": profile},
            "search": {"confirm": {"repeats": 0}},
        }
        | changes
    )


def script(request: TrialRequest) -> float | RankResult | FailureKind:
    """The larger the micro-batch, the faster."""
    seconds = 1.0 / request.layout.micro_batch_size
    if request.profile is None:
        return seconds
    return RankResult(step_seconds=[seconds], profile=FOUND)


def run(
    store: Store, asked: SweepSpec, scheduler: FakeScheduler | None = None, **more: Any
) -> tuple[SweepResult, FakeScheduler]:
    chosen = scheduler or FakeScheduler(script)
    result = run_sweep(
        asked,
        store=store,
        open_scheduler=lambda: chosen,
        code=CODE,
        hardware=lambda _: None,
        clock=time.monotonic,
        **more,
    )
    return result, chosen


def profiled(store: Store) -> dict[int, list[str]]:
    """The states of the profiles of each trial that has some, by its micro-batch size."""
    trials = store.trials(store.sweep_named("t").id)
    found = {one.id: [row.state for row in store.trial(one.id).profiles] for one in trials}
    return {trial: states for trial, states in found.items() if states}


def test_the_winner_of_each_cell_is_profiled_once_after_all_measurements(store: Store) -> None:
    result, scheduler = run(store, spec())
    assert result.finished
    winners = {trial.id for best in store.best(result.sweep_id).values() for trial in best[:1]}
    assert profiled(store) == {trial_id: ["done"] for trial_id in winners}
    assert [layout.micro_batch_size for layout, _ in scheduler.started[-2:]] == [4, 4]
    assert len(scheduler.started) == 6 + 2
    # The same command finds nothing left to do.
    assert finished_again(store, spec()) is not None


def finished_again(store: Store, asked: SweepSpec) -> SweepResult | None:
    return finished_before(
        asked, store, code=lambda: CODE, program_version="test", this_host="here"
    )


def test_no_trial_and_no_measurement_knows_of_a_profile(store: Store) -> None:
    run(store, spec("none"))
    sweep_id = store.sweep_named("t").id
    before, reserved = store.trials(sweep_id), store.reserved(sweep_id).total
    assert reserved.profile == 0.0
    _, scheduler = run(store, spec())
    after = store.trials(sweep_id)
    assert after == before
    total = store.reserved(sweep_id).total
    # One second of one GPU, and one of two.
    assert total.profile == 3.0
    assert total.reserved == pytest.approx(reserved.reserved + 3.0)
    assert len(scheduler.started) == 2


def test_a_sweep_that_ended_is_taken_up_for_its_profiles_alone(store: Store) -> None:
    result, _ = run(store, spec("none"))
    assert profiled(store) == {}
    assert finished_again(store, spec("none")) is not None
    assert finished_again(store, spec()) is None
    again, scheduler = run(store, spec())
    assert again.counts == result.counts
    assert len(scheduler.started) == 2
    assert len(profiled(store)) == 2


def test_the_profile_of_a_winner_has_advice_from_what_was_measured(store: Store) -> None:
    run(store, spec(gpus=2))
    (trial_id,) = profiled(store)
    (row,) = store.trial(trial_id).profiles
    assert row.ranks[0].parts[Part.EXPOSED_DP] == 400_000
    assert "40% of the step is exposed communication" in row.advice[0]
    assert row.epoch is not None


def test_a_profile_that_fails_changes_no_trial_and_is_not_repeated(store: Store) -> None:
    def failing(request: TrialRequest) -> float | RankResult | FailureKind:
        return script(request) if request.profile is None else FailureKind.OOM_GPU

    result, _ = run(store, spec(gpus=2), FakeScheduler(failing))
    assert result.counts[TrialState.MEASURED] == 3
    assert list(profiled(store).values()) == [["failed"]]
    assert finished_again(store, spec(gpus=2)) is not None


def test_a_spent_budget_leaves_no_room_for_a_profile(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    # Three trials of two GPUs and one second each, and not another second.
    asked = spec(gpus=2, search={"confirm": {"repeats": 0}, "max_gpu_hours": 7.0 / 3600})
    result, scheduler = run(store, asked)
    assert profiled(store) == {}
    assert scheduler.leased().reserved <= 7.0
    assert "is not profiled: max_gpu_hours reached" in caplog.text
    assert result.counts[TrialState.MEASURED] >= 1


def test_a_request_to_stop_ends_the_profiles(store: Store) -> None:
    started: list[bool] = []

    def noting(request: TrialRequest) -> float | RankResult | FailureKind:
        started.append(request.profile is not None)
        return script(request)

    def stop() -> Stop:
        return Stop.DRAIN if True in started else Stop.GO_ON

    result, _ = run(store, spec(), FakeScheduler(noting), stop=stop)
    assert result.stopped and StopReason.INTERRUPTED not in result.stopped.values()
    assert started.count(True) == 1
    # The exit code is that of a stop, also if nothing but profiles was left.
    assert result.interrupted


def test_a_cancelled_profile_names_what_takes_it_and_the_same_command_does(store: Store) -> None:
    def cancelled(request: TrialRequest) -> float | RankResult | FailureKind:
        return script(request) if request.profile is None else FailureKind.CANCELLED

    run(store, spec(gpus=2), FakeScheduler(cancelled))
    (trial_id,) = profiled(store)
    (row,) = store.trial(trial_id).profiles
    assert row.failure_message == (
        f"the profile was cancelled before it ended; `sweep profile {trial_id}` takes it, and so"
        " does the next `sweep run` if its file asks for profiles"
    )
    assert finished_again(store, spec(gpus=2)) is None
    run(store, spec(gpus=2))
    assert profiled(store) == {trial_id: ["failed", "done"]}


def test_a_workload_that_trains_nothing_is_not_profiled(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    asked = spec(workload="synthetic", gpus=2, device="auto")
    run(store, asked)
    assert profiled(store) == {}
    assert "measurement.profile: winners is ignored: workload synthetic" in caplog.text
    trial = store.trials(store.sweep_named("t").id)[0]
    with pytest.raises(UsageInvalid, match="there is nothing to profile"):
        profile_trial(
            store.trial(trial.id),
            asked,
            ProfilePlan(),
            scheduler=FakeScheduler(script),
            store=store,
        )
