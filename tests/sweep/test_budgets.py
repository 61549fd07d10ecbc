"""Budgets of what is held: what they count, what they let start, and how a sweep ends that has
spent one.
"""

from __future__ import annotations

import pytest

from db.store import Store
from db.types import SweepState
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.core.trial.reserved_time import ReservedGpuSeconds
from orchestrator.sweep.finished import finished_before
from orchestrator.sweep.progress import StopReason
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_loop import CODE, fast, run, spec

HOUR = 3600.0
DOLLAR_A_SECOND = {"price_per_gpu_hour": HOUR}


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def total(store: Store) -> ReservedGpuSeconds:
    return store.reserved(store.sweep_named("t").id).total


def test_leases_that_stand_idle_are_spent_too(store: Store) -> None:
    scheduler = FakeScheduler(fast)
    scheduler.idle_gpu_seconds = 4.5
    result, _ = run(
        store, fast, spec=spec(gpus=1, search={"max_gpu_hours": 6 / HOUR}), scheduler=scheduler
    )
    assert set(result.stopped.values()) == {StopReason.GPU_HOURS}
    # 1 GPU-second each: a second would make it 6.5.
    assert len(scheduler.started) == 1
    assert (total(store).idle, total(store).reserved) == (4.5, 5.5)


def test_a_limit_of_money_ends_a_sweep_like_one_of_hours(store: Store) -> None:
    result, scheduler = run(
        store, fast, spec=spec(gpus=1, search={"max_cost": 3.0}, **DOLLAR_A_SECOND)
    )
    assert set(result.stopped.values()) == {StopReason.COST}
    assert result.finished
    assert len(scheduler.started) == 3
    assert store.sweep_named("t").state is SweepState.FINISHED


def test_the_next_call_says_that_the_budget_is_spent_without_asking_a_cluster(store: Store) -> None:
    wanted = spec(
        gpus=1, search={"max_cost": 3.0}, device="cpu", gpus_per_node=2, **DOLLAR_A_SECOND
    )
    run(store, fast, spec=wanted)
    again = finished_before(
        wanted, store, code=lambda: CODE, program_version="test", this_host=None
    )
    assert again is not None
    assert set(again.stopped.values()) == {StopReason.COST}
    # And one that does ask hears the same.
    result, scheduler = run(store, fast, spec=wanted)
    assert (set(result.stopped.values()), scheduler.started) == ({StopReason.COST}, [])


def test_a_limit_of_money_without_a_price_is_refused_before_anything_is_started(
    store: Store,
) -> None:
    scheduler = FakeScheduler(fast)
    with pytest.raises(UsageInvalid, match="price_per_gpu_hour"):
        run(store, fast, spec=spec(gpus=1, search={"max_cost": 3.0}), scheduler=scheduler)
    assert (scheduler.started, scheduler.closed) == ([], True)
    assert store.sweeps() == [], "refused before its first launch, it leaves no sweep"


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("budget", [0.5, 3.0, 7.9, 11.0])
def test_a_budget_is_passed_by_no_more_than_one_trial_before_anything_was_known(
    store: Store, slots: int, budget: float
) -> None:
    """A usual launch alone, which is what is guessed, would pass it: so the first shows what one
    holds, however many slots there are.
    """
    scheduler = FakeScheduler(fast, slots=slots, device=Device.CUDA, seconds=lambda _: 2.0)
    result, _ = run(
        store, fast, spec=spec(gpus=1, search={"max_gpu_hours": budget / HOUR}), scheduler=scheduler
    )
    assert total(store).reserved <= max(budget, 2.0)
    # And what fits is used: all six layouts hold 12.
    assert total(store).reserved > min(budget, 12.0) - 2.0
    assert set(result.stopped.values()) == {StopReason.GPU_HOURS}


@pytest.mark.parametrize("budget", [9.0, 11.0, 13.0, 15.0, 17.0])
def test_trials_that_start_together_pass_a_budget_no_more_than_one_after_another(
    store: Store, budget: float
) -> None:
    """Where a gang of two GPUs ends, two of one GPU start in its place."""

    def call(**search: float) -> None:
        scheduler = FakeScheduler(fast, slots=2, device=Device.CUDA, seconds=lambda _: 2.0)
        run(store, fast, spec=spec(search=search), scheduler=scheduler)

    call(max_trials=1)
    # What a trial of each cell holds is known now, also to another call.
    assert total(store).reserved == 2.0 + 4.0
    call(max_gpu_hours=budget / HOUR)
    assert budget - 2.0 < total(store).reserved <= budget


def test_a_budget_that_the_next_trial_of_one_cell_would_pass_is_still_there_for_another(
    store: Store,
) -> None:
    def seconds(request: TrialRequest) -> float:
        return 5.0 if request.layout.world_size == 2 else 0.5  # 10 and 0.5 GPU-seconds

    chosen = spec(search={"max_gpu_hours": 18 / HOUR})
    result, scheduler = run(
        store, fast, spec=chosen, scheduler=FakeScheduler(fast, seconds=seconds)
    )
    sizes = [layout.world_size for layout, _ in scheduler.started]
    # 3 + 10; a second of the large ones would make it 23.
    assert (sizes.count(1), sizes.count(2)) == (
        6,
        1,
    )
    assert {cell.num_gpus: reason for cell, reason in result.stopped.items()} == {
        1: StopReason.EXHAUSTED,
        2: StopReason.GPU_HOURS,
    }


def test_a_trial_that_must_wait_for_what_runs_is_started_when_that_reserved_less(
    store: Store,
) -> None:
    order: list[int] = []

    def seconds(request: TrialRequest) -> float:
        order.append(request.trial_id)
        return 3.0 if len(order) == 1 else 0.1

    scheduler = FakeScheduler(fast, slots=2, device=Device.CUDA, seconds=seconds)
    # After the first trial, the third one is expected to take 3 as well, which leaves nothing for
    # others. When it has taken 0.1, all others fit into the budget.
    result, _ = run(
        store, fast, spec=spec(gpus=1, search={"max_gpu_hours": 6.15 / HOUR}), scheduler=scheduler
    )
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert len(scheduler.started) == 6


def test_a_cell_waits_for_what_another_cell_runs_too(store: Store) -> None:
    large: list[int] = []

    def seconds(request: TrialRequest) -> float:
        if request.layout.world_size == 1:
            return 1.0
        large.append(request.trial_id)
        return 4.0 if len(large) == 1 else 0.1

    scheduler = FakeScheduler(fast, nodes={"a": 2, "b": 1}, device=Device.CUDA, seconds=seconds)
    # The second large trial is expected to take 8 like the first one, which leaves nothing for a
    # small one. It takes 0.2, and all twelve take 15 together.
    result, _ = run(
        store,
        fast,
        spec=spec(gpus_per_node=2, search={"max_gpu_hours": 18.5 / HOUR}),
        scheduler=scheduler,
    )
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert total(store).reserved == pytest.approx(6 * 1.0 + 8.0 + 5 * 0.2)


def test_what_waits_for_another_attempt_is_not_started_beyond_a_budget_either(store: Store) -> None:
    first = spec(gpus=1, search={"max_trials": 2})
    run(store, fast, spec=first)
    sweep_id = store.sweep_named("t").id
    store.invalidate("state = 'measured'")
    result, scheduler = run(
        store, fast, spec=spec(gpus=1, search={"max_gpu_hours": 3.5 / HOUR})
    )  # 2 are reserved already
    assert len(scheduler.started) == 1
    assert set(result.stopped.values()) == {StopReason.GPU_HOURS}
    assert result.counts[TrialState.QUEUED] == 1
    assert store.reserved(sweep_id).total == ReservedGpuSeconds(failed=2.0, useful=1.0)


def test_a_larger_budget_goes_on_and_counts_what_was_reserved(store: Store) -> None:
    run(store, fast, spec=spec(gpus=1, search={"max_gpu_hours": 2 / HOUR}))
    _, scheduler = run(store, fast, spec=spec(gpus=1, search={"max_gpu_hours": 5 / HOUR}))
    assert len(scheduler.started) == 3
    assert total(store).reserved == 5.0


def test_every_session_says_what_its_gangs_reserved_and_why_it_ended(store: Store) -> None:
    scheduler = FakeScheduler(fast, slots=4)
    scheduler.idle_gpu_seconds = 2.0
    run(
        store,
        fast,
        spec=spec(gpus=1, search={"max_trials": 3}, **DOLLAR_A_SECOND),
        scheduler=scheduler,
    )
    session = store.newest_session(store.sweep_named("t").id)
    assert session is not None
    assert (session.num_gpus, session.price_per_gpu_hour, session.stop_reasons) == (
        4,
        HOUR,
        ("max_trials reached",),
    )
    assert session.ended_at is not None
    found = total(store)
    assert (found.useful + found.warmup + found.startup, found.idle, found.under_way) == (
        3.0,
        2.0,
        0.0,
    )
