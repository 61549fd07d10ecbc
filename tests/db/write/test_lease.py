"""One owner at a time: take-over, stale owners, and owners that are killed or stopped."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from db.read.rows import Holder
from db.store import Store
from db.types import StopRequest, SweepState
from db.write.writes import Ended, MeasuredEnd, NewTrial
from orchestrator.core.errors import LeaseLost, SweepInUse
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.reserved_time import Leased
from tests.db.builders import (
    CONDITIONS,
    Bench,
    add_trial,
    cell,
    layout,
    measurement,
    record_failure,
    record_measurement,
    start_attempt,
)

NUM_KILLS = 10  # thousands in `make chaos`
AT_ONCE = 3  # trials written together


def test_the_second_orchestrator_is_told_who_holds_the_sweep(store: Store, store_url: str) -> None:
    sweep_id = store.ensure_sweep("a", "{}", CONDITIONS)
    assert store.acquire(sweep_id, host="node-7", pid=4321) == 1
    with (
        Store.open(store_url) as other,
        pytest.raises(
            SweepInUse,
            match=r"held by host node-7, pid 4321, since .* its lease ends in (30|2\d) s",
        ),
    ):
        other.acquire(sweep_id, host="node-8", pid=1)
    holder = store.sweep_named("a").holder
    assert holder is not None
    assert (holder.host, holder.pid) == ("node-7", 4321)


def test_a_lease_that_has_ended_is_taken_and_its_owner_can_write_nothing_more(
    store: Store, store_url: str
) -> None:
    stale = Bench.on(store)
    trial_id, number = stale.start()
    store.renew(stale.sweep_id, stale.epoch, ttl_seconds=0.05)
    time.sleep(0.1)
    with Store.open(store_url) as other:
        epoch = other.acquire(stale.sweep_id, host="other", pid=1)
        assert epoch == stale.epoch + 1
        before = other.trial(trial_id), other.events(stale.sweep_id), other.cells(stale.sweep_id)
        for write in _every_write(stale, trial_id, number):
            with pytest.raises(
                LeaseLost, match="lease of epoch 1 is lost; now held by host other, pid 1, epoch 2"
            ):
                write()
        assert (
            other.trial(trial_id),
            other.events(stale.sweep_id),
            other.cells(stale.sweep_id),
        ) == before


def _every_write(bench: Bench, trial_id: int, number: int) -> Iterator[Callable[[], object]]:
    from tests.db.builders import cell, failure

    store, epoch, leased = bench.store, bench.epoch, Leased(reserved=8.0, idle=0.0, capacity=8.0)
    yield lambda: store.begin_session(bench.sweep_id, epoch, num_gpus=8, leased=leased)
    yield lambda: store.renew(bench.sweep_id, epoch, leased=leased)
    yield lambda: store.release(bench.sweep_id, epoch)
    yield lambda: store.mark_lost(bench.sweep_id, epoch)
    yield lambda: store.ensure_cell(bench.sweep_id, cell(num_gpus=4), epoch)
    yield lambda: add_trial(store, bench.cell_id, layout(9), epoch=epoch)
    yield lambda: bench.prune([9])
    yield lambda: store.free_pruned(bench.cell_id, [layout(9)], epoch=epoch)
    yield lambda: store.requeue_ended_early(bench.sweep_id, [trial_id], epoch=epoch)
    yield lambda: store.begin_trials(
        [NewTrial(cell_id=bench.cell_id, layout=layout(9))], epoch=epoch
    )
    yield lambda: start_attempt(store, trial_id, epoch, ["n"])
    yield lambda: store.note_first_steps([(trial_id, number)], epoch=epoch)
    yield lambda: record_measurement(
        store, trial_id, number, epoch=epoch, measurement=measurement()
    )
    yield lambda: store.record_ends(
        [Ended(trial_id=trial_id, attempt=number, outcome=MeasuredEnd(measurement=measurement()))],
        epoch=epoch,
    )
    yield lambda: record_failure(
        store, trial_id, number, epoch=epoch, failure=failure(), event=TrialEvent.OUT_OF_MEMORY
    )


def test_a_lease_that_has_ended_goes_on_where_nobody_came(store: Store) -> None:
    bench = Bench.on(store)
    store.renew(bench.sweep_id, bench.epoch, ttl_seconds=0.01)
    time.sleep(0.05)
    # The machine slept, and nobody else took the sweep: its result is good.
    bench.measure()
    assert store.renew(bench.sweep_id, bench.epoch) is None


def test_a_released_sweep_is_free_and_its_old_epoch_is_void(store: Store, store_url: str) -> None:
    bench = Bench.on(store)
    store.release(bench.sweep_id, bench.epoch, SweepState.FINISHED)
    row = store.sweep_named("tiny")
    assert (row.state, row.holder) == (SweepState.FINISHED, None)
    with pytest.raises(LeaseLost, match="without an orchestrator"):
        bench.add()
    with Store.open(store_url) as other:
        assert other.acquire(bench.sweep_id, host="other", pid=1) == bench.epoch + 1


def test_takeover_by_order_replaces_a_living_owner(store: Store, store_url: str) -> None:
    bench = Bench.on(store)
    with Store.open(store_url) as other:
        other.acquire(bench.sweep_id, host="other", pid=1, takeover=True)
    with pytest.raises(LeaseLost):
        bench.add()


def test_a_stop_asked_for_by_another_process_is_heard_at_the_next_renewal(
    store: Store, store_url: str
) -> None:
    bench = Bench.on(store)
    with Store.open(store_url) as other:
        assert other.request_stop(bench.sweep_id, StopRequest.DRAIN)
    assert store.renew(bench.sweep_id, bench.epoch) is StopRequest.DRAIN
    store.release(bench.sweep_id, bench.epoch)
    assert not store.request_stop(bench.sweep_id, StopRequest.CANCEL)
    again = Bench.on(store)
    assert store.renew(again.sweep_id, again.epoch) is None


def test_a_caller_may_judge_the_holder_itself(store: Store, store_url: str) -> None:
    sweep_id = store.ensure_sweep("a", "{}", CONDITIONS)
    store.acquire(sweep_id, host="gone", pid=7)
    seen: list[Holder] = []
    with Store.open(store_url) as other:
        assert (
            other.acquire(
                sweep_id, host="here", pid=8, holder_is_dead=lambda holder: not seen.append(holder)
            )
            == 2
        )
    assert [(h.host, h.pid) for h in seen] == [("gone", 7)]


def test_the_clock_of_a_client_does_not_matter(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_id = store.ensure_sweep("a", "{}", CONDITIONS)
    store.acquire(sweep_id, host="node-7", pid=1)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with Store.open(store_url) as other, pytest.raises(SweepInUse):
        other.acquire(sweep_id, host="node-8", pid=1)


def _measure_for_ever(url: str, seed: int, acks: Connection) -> None:
    """Takes the sweep before its last owner's lease has ended, and reports recorded results."""
    with Store.open(url) as store:
        bench = Bench.on(store)
        store.mark_lost(bench.sweep_id, bench.epoch)
        waiting = [row.id for row in store.trials(bench.sweep_id) if row.state is TrialState.QUEUED]
        for size in range(1, 1_000_000):
            begun = [
                (trial_id, start_attempt(store, trial_id, bench.epoch, ["node-a"]))
                for trial_id in waiting
            ]
            waiting = []
            sizes = [seed * 1_000_000 + AT_ONCE * size + i for i in range(AT_ONCE)]
            begun += store.begin_trials(
                [NewTrial(cell_id=bench.cell_id, layout=layout(size)) for size in sizes],
                epoch=bench.epoch,
            )
            store.note_first_steps(begun[1:], epoch=bench.epoch)
            ends = [
                Ended(
                    trial_id=trial_id,
                    attempt=number,
                    outcome=MeasuredEnd(measurement=measurement(float(trial_id))),
                )
                for trial_id, number in begun
            ]
            store.record_ends(ends, epoch=bench.epoch)
            for attempt in begun:
                acks.send(attempt)


@contextmanager
def _process(
    target: Callable[..., None], *arguments: object
) -> Iterator[multiprocessing.process.BaseProcess]:
    process = multiprocessing.get_context("fork").Process(
        target=target, args=arguments, daemon=True
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)
        assert not process.is_alive()


def test_no_acknowledged_result_is_lost_or_doubled_when_its_orchestrator_is_killed(
    store_url: str,
) -> None:
    Store.open(store_url).close()
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    acked: set[tuple[int, int]] = set()
    for kill in range(NUM_KILLS):
        inbox, outbox = multiprocessing.Pipe(duplex=False)
        with _process(_measure_for_ever, store_url, kill, outbox) as process:
            outbox.close()
            assert inbox.poll(20), "the next orchestrator did not go on at once"
            time.sleep(moments.uniform(0, 0.08))
            process.kill()
            process.join()
            try:
                while True:
                    acked.add(inbox.recv())
            except (EOFError, OSError):
                pass
    with Store.open(store_url) as store:
        (sweep,) = store.sweeps()
        rows = {row.id: row for row in store.trials(sweep.id)}
        details = {trial_id: store.trial(trial_id) for trial_id, _ in acked}
        assert len(acked) >= NUM_KILLS
        assert len({trial_id for trial_id, _ in acked}) == len(acked), "measured twice"
        for trial_id, number in acked:
            assert rows[trial_id].state is TrialState.MEASURED
            assert rows[trial_id].tokens_per_second_per_gpu == float(trial_id)
            counting = [
                a.number
                for a in details[trial_id].attempts
                if a.measurement is not None and not a.superseded
            ]
            assert counting == [number]
        assert sum(row.state not in (TrialState.MEASURED,) for row in rows.values()) <= AT_ONCE
        if store.path:
            with sqlite3.connect(store.path) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def _renew_and_write(url: str, told: Connection, stopped: Connection) -> None:
    with Store.open(url) as store:
        sweep_id = store.ensure_sweep("tiny", "{}", CONDITIONS)
        epoch = store.acquire(sweep_id, host=socket.gethostname(), pid=os.getpid(), ttl_seconds=0.3)
        bench = Bench(store, sweep_id, store.cells(sweep_id)[0].id, epoch)
        trial_id, number = bench.start()
        told.send((trial_id, number, epoch))
        stopped.recv()
        try:
            record_measurement(store, trial_id, number, epoch=epoch, measurement=measurement(6.66))
            told.send("written")
        except LeaseLost as exc:
            told.send(str(exc))


def test_an_orchestrator_that_slept_past_its_lease_writes_nothing(
    store: Store, store_url: str
) -> None:
    bench = Bench.on(store)
    store.release(bench.sweep_id, bench.epoch)
    told, outbox = multiprocessing.Pipe(duplex=False)
    inbox, go_on = multiprocessing.Pipe(duplex=False)
    with _process(_renew_and_write, store_url, outbox, inbox) as process:
        assert told.poll(20)
        trial_id, number, old_epoch = told.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        go_on.send("wake up")
        time.sleep(0.4)
        epoch = store.acquire(bench.sweep_id, host="other", pid=1)
        assert epoch == old_epoch + 1
        assert [row.id for row in store.mark_lost(bench.sweep_id, epoch)] == [trial_id]
        os.kill(process.pid, signal.SIGCONT)
        assert told.poll(20)
        assert "lease of epoch" in told.recv()
    assert store.trial(trial_id).attempts[number - 1].measurement is None
    assert store.trial(trial_id).trial.state is TrialState.QUEUED


def test_a_refused_owner_gives_a_new_sweep_back_as_if_it_had_never_come_and_a_known_one_as_it_was(
    store: Store,
) -> None:
    sweep_id = store.ensure_sweep("new", "{}", CONDITIONS)
    before = store.sweep_named("new")
    epoch = store.acquire(sweep_id, host="h", pid=1)
    store.ensure_cell(sweep_id, cell(), epoch)
    store.give_back(before, epoch)
    assert store.sweeps() == []

    bench = Bench.on(store, "known")
    bench.measure()
    store.release(bench.sweep_id, bench.epoch, SweepState.FINISHED)
    before = store.sweep_named("known")
    epoch = store.acquire(
        bench.sweep_id, host="h", pid=1, spec_json='{"gpus": 64}', conditions=CONDITIONS
    )
    assert store.sweep_named("known").spec_json == '{"gpus": 64}'
    store.give_back(before, epoch)
    after = store.sweep_named("known")
    assert (after.state, after.spec_json, after.holder) == (SweepState.FINISHED, "{}", None)
    assert len(store.trials(bench.sweep_id)) == 1
    with pytest.raises(LeaseLost):
        store.give_back(before, epoch)


def test_an_owner_that_has_launched_anything_was_not_refused(store: Store) -> None:
    bench = Bench.on(store)
    before = store.sweep_named("tiny")
    bench.start()
    store.give_back(before, bench.epoch)
    assert store.sweep_named("tiny").state is SweepState.STOPPED
