"""The GPU time that each call reserved adds up; a kill leaves seconds uncounted."""

from __future__ import annotations

import random

import pytest
import sqlalchemy as sa

from db import schema
from db.store import Store
from db.types import SweepState, now
from db.write.writes import StoppedCell
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.reserved_time import Leased, ReservedGpuSeconds
from tests.db.builders import (
    Bench,
    cell,
    failure,
    fingerprint,
    measurement,
    record_failure,
    record_measurement,
    start_repeat,
)

GPUS = cell().num_gpus
NOTHING = Leased(reserved=0.0, idle=0.0, capacity=0.0)


@pytest.fixture
def bench(store: Store) -> Bench:
    """A sweep whose owner has begun a session of 8 slots."""
    found = Bench.on(store)
    store.begin_session(
        found.sweep_id, found.epoch, num_gpus=8, price_per_gpu_hour=2.0, leased=NOTHING
    )
    return found


def leased(reserved: float, idle: float, capacity: float | None = 100.0) -> Leased:
    return Leased(reserved=reserved, idle=idle, capacity=capacity)


def total(bench: Bench) -> ReservedGpuSeconds:
    return bench.store.reserved(bench.sweep_id).total


def set_time(
    store: Store, table: str, column: str, seconds_from_now: float, where: str = "1 = 1"
) -> None:
    statement = (
        sa.update(schema.metadata.tables[table])
        .where(sa.text(where))
        .values({column: now(seconds_from_now)})
    )
    store._database.write(lambda connection, change: connection.execute(statement))


def end_at_random(bench: Bench, chance: random.Random, micro_batch_size: int) -> float:
    """An attempt that ends in one of all ways, and what it held."""
    trial_id, number = bench.start(micro_batch_size)
    gpu_seconds = chance.uniform(0.0, 1000.0)
    kind = chance.choice([*[None] * 10, *FailureKind])
    if kind is None:
        timed = chance.uniform(0.0, gpu_seconds / GPUS)
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=measurement(),
            fingerprint=fingerprint(chance.choice(["2.12.0", "2.13.0"])),
            gpu_seconds=gpu_seconds,
            timed_seconds=timed,
            warmup_seconds=chance.choice([None, gpu_seconds / GPUS - timed]),
        )
    else:
        event = (
            TrialEvent.OUT_OF_MEMORY
            if kind in OUT_OF_MEMORY_KINDS
            else chance.choice([TrialEvent.FAILED, TrialEvent.REQUEUED])
        )
        record_failure(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            failure=failure(kind),
            event=event,
            gpu_seconds=gpu_seconds,
        )
    return gpu_seconds


@pytest.mark.parametrize("seed", range(3))
def test_the_view_splits_every_attempt_as_the_core_does_and_loses_nothing(
    bench: Bench, seed: int
) -> None:
    chance = random.Random(seed)
    ended = [end_at_random(bench, chance, size) for size in range(1, 41)]
    bench.store.release(bench.sweep_id, bench.epoch, leased=leased(sum(ended) + 70.0, 70.0))
    assert bench.store.invalidate("trial_id % 3 = 0 AND state = 'measured'") > 0
    by_core = ReservedGpuSeconds(idle=70.0)
    for trial in bench.store.trials(bench.sweep_id):
        for attempt in bench.store.trial(trial.id).attempts:
            reserved = attempt.reserved(GPUS)
            assert reserved is not None
            by_core += reserved
    found = bench.store.reserved(bench.sweep_id)
    assert found.total.parts == pytest.approx(by_core.parts)
    assert found.total.reserved == pytest.approx(sum(ended) + 70.0)
    assert sum(part.reserved for part in found.by_cell.values()) == pytest.approx(sum(ended))
    assert (
        min(found.total.failed, found.total.out_of_memory, found.total.lost, found.total.useful) > 0
    ), "a part was not tried"


def test_what_runs_is_in_flight_until_it_has_ended(bench: Bench) -> None:
    trial_id, number = bench.start(1)
    bench.store.renew(bench.sweep_id, bench.epoch, leased=leased(30.0, 10.0))
    assert total(bench) == ReservedGpuSeconds(under_way=20.0, idle=10.0)
    record_measurement(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        measurement=measurement(),
        gpu_seconds=24.0,
        timed_seconds=12.0,
    )
    # 4 of them since it was last seen.
    assert total(bench) == ReservedGpuSeconds(useful=24.0, idle=10.0)
    bench.store.release(
        bench.sweep_id,
        bench.epoch,
        SweepState.FINISHED,
        leased=leased(36.0, 12.0, 50.0),
        stopped=[StoppedCell(cell=cell(), reason="max_cost reached", num_untried=7)],
    )
    found = bench.store.reserved(bench.sweep_id)
    assert (found.total, found.capacity) == (ReservedGpuSeconds(useful=24.0, idle=12.0), 50.0)
    session = bench.store.newest_session(bench.sweep_id)
    assert session is not None
    assert (session.num_gpus, session.price_per_gpu_hour, session.stop_reasons) == (
        8,
        2.0,
        ("max_cost reached",),
    )
    assert session.ended_at is not None
    (row,) = bench.store.cells(bench.sweep_id)
    assert (row.stop_reason, row.num_untried) == ("max_cost reached", 7)


def test_sessions_add_up_and_each_is_told_once(bench: Bench) -> None:
    # The answer to the first was lost.
    bench.store.begin_session(bench.sweep_id, bench.epoch, num_gpus=8, leased=NOTHING)
    bench.store.release(bench.sweep_id, bench.epoch, leased=leased(5.0, 5.0, 10.0))
    again = Bench.on(bench.store)
    bench.store.begin_session(again.sweep_id, again.epoch, num_gpus=8, leased=NOTHING)
    bench.store.release(again.sweep_id, again.epoch, leased=leased(7.0, 7.0, 20.0))
    found = bench.store.reserved(bench.sweep_id)
    assert (found.total, found.capacity) == (ReservedGpuSeconds(idle=12.0), 30.0)


def test_a_killed_owner_held_its_gpus_until_its_last_renewal_or_word(bench: Bench) -> None:
    store = bench.store
    trial_id, _ = bench.start(1)
    store.renew(bench.sweep_id, bench.epoch, leased=leased(100.0, 40.0))
    set_time(store, "attempt", "started_at", -60.0)
    set_time(store, "event", "at", -60.0)
    set_time(store, "session", "seen_at", -30.0)
    epoch = store.acquire(bench.sweep_id, host="elsewhere", pid=1, takeover=True)
    store.mark_lost(bench.sweep_id, epoch)
    assert store.trial(trial_id).attempts[0].gpu_seconds == pytest.approx(
        30.0 * GPUS, abs=5.0
    )  # not the 60 s until now
    found = total(bench)
    assert found.lost == store.trial(trial_id).attempts[0].gpu_seconds
    assert (found.under_way, found.idle) == (0.0, 40.0)
    assert store.reserved(bench.sweep_id).capacity == 100.0  # as it was last seen


def test_what_an_owner_wrote_after_its_last_renewal_shows_that_it_lived(bench: Bench) -> None:
    store = bench.store
    trial_id, _ = bench.start(1)
    set_time(store, "attempt", "started_at", -60.0)
    set_time(store, "session", "seen_at", -60.0)
    set_time(store, "event", "at", -60.0)
    set_time(store, "event", "at", -10.0, f"event = 'gang_placed' AND trial_id = {trial_id}")
    epoch = store.acquire(bench.sweep_id, host="elsewhere", pid=1, takeover=True)
    store.mark_lost(bench.sweep_id, epoch)
    assert store.trial(trial_id).attempts[0].gpu_seconds == pytest.approx(50.0 * GPUS, abs=5.0)
    assert store.reserved(bench.sweep_id).capacity == pytest.approx(50.0 * 8, abs=20.0)


def test_an_owner_that_gave_the_sweep_back_with_trials_in_flight_held_them_until_then(
    bench: Bench,
) -> None:
    store = bench.store
    trial_id, _ = bench.start(1)
    store.release(bench.sweep_id, bench.epoch, leased=leased(20.0, 0.0))
    set_time(store, "attempt", "started_at", -100.0)
    set_time(store, "session", "ended_at", -40.0)
    epoch = store.acquire(bench.sweep_id, host="elsewhere", pid=1)
    store.mark_lost(bench.sweep_id, epoch)
    assert store.trial(trial_id).attempts[0].gpu_seconds == pytest.approx(60.0 * GPUS, abs=5.0)


def test_repeats_of_one_trial_are_all_useful_and_one_of_another_stack_is_not(bench: Bench) -> None:
    # 4 GPU-seconds, of which nobody said what they went into.
    trial_id = bench.measure()
    for torch, timed in (("2.13.0", 3.0), ("2.9.0", 3.0)):
        number = start_repeat(bench.store, trial_id, bench.epoch, ["n"])
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=measurement(),
            fingerprint=fingerprint(torch),
            gpu_seconds=10.0,
            timed_seconds=timed,
            warmup_seconds=1.0,
        )
    assert total(bench) == ReservedGpuSeconds(
        useful=6.0, warmup=2.0, startup=4.0 + 2.0, failed=10.0
    )
