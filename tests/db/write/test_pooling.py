"""A trial has the runs of its cell's newest fingerprint, if it has any; others are kept apart."""

from __future__ import annotations

from db.store import Store
from tests.db.builders import (
    Bench,
    counted_statements,
    end_of,
    fingerprint,
    measurement,
    record_measurement,
    repeat,
    start_attempt,
    start_repeat,
)


def test_a_repeat_counts_once_its_cell_is_measured_with_its_software(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    bench.measure(4, torch="9.9")
    row = store.trial(trial_id)
    assert row.trial.is_current_fingerprint
    assert (row.trial.tokens_per_second_per_gpu, row.trial.num_measurements) == (900.0, 1)
    assert [(a.superseded, a.pooled) for a in row.attempts] == [(True, False), (False, True)]
    # With the next measurement of the software before, its first run counts again.
    bench.measure(8)
    row = store.trial(trial_id)
    assert row.trial.is_current_fingerprint
    assert (row.trial.tokens_per_second_per_gpu, row.trial.num_measurements) == (1000.0, 1)
    assert [(a.superseded, a.pooled) for a in row.attempts] == [(False, True), (True, False)]


def test_a_repeat_with_the_software_of_its_cell_replaces_runs_with_another(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    assert repeat(bench, trial_id, 950.0, 0.52)
    bench.measure(4, torch="9.9")
    assert repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    assert repeat(bench, trial_id, 800.0, 0.6, torch="9.9")
    row = store.trial(trial_id)
    assert row.trial.is_current_fingerprint
    assert (row.trial.tokens_per_second_per_gpu, row.trial.num_measurements) == (800.0, 2)
    assert [a.pooled for a in row.attempts] == [False, False, True, True]
    assert [r.step_seconds for r in store.repeats(bench.cell_id)[trial_id].runs] == [0.55, 0.6]


def test_a_cell_that_gets_two_fingerprints_in_one_write_has_the_runs_of_the_last(
    store: Store,
) -> None:
    bench, old, new = Bench.on(store), fingerprint(), fingerprint("9.9")
    trial_id = bench.measure(1)
    repeated = (trial_id, start_repeat(store, trial_id, bench.epoch, ["node-a"]))
    first, last = bench.start(2), bench.start(4)
    ends = [end_of(first, new), end_of(repeated, new, 900.0), end_of(last, old)]
    recorded = store.record_ends(ends, epoch=bench.epoch)
    assert [one.counts for one in recorded] == [True, False, True]
    row = store.trial(trial_id)
    assert row.trial.is_current_fingerprint
    assert (row.trial.tokens_per_second_per_gpu, row.trial.num_measurements) == (1000.0, 1)
    assert [(a.superseded, a.pooled) for a in row.attempts] == [(False, True), (True, False)]


def test_trials_whose_runs_are_others_now_take_no_more_statements_than_one(store: Store) -> None:
    """20,000 trials took longer than the lease lasts."""
    counts = []
    for num in (1, 5):
        bench = Bench.on(store, f"of-{num}")
        for trial_id in [bench.measure(2**i) for i in range(num)]:
            assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
        with counted_statements(store) as found:
            bench.measure(64, torch="9.9")
        assert [t.num_measurements for t in store.trials(bench.sweep_id)] == [1] * (num + 1)
        assert all(t.is_current_fingerprint for t in store.trials(bench.sweep_id))
        counts.append(len(found))
    assert counts[0] == counts[1]


def test_a_trial_whose_runs_are_others_now_was_updated(store: Store) -> None:
    """Mirrors look for trials that were updated."""
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    before = store.trial(trial_id).trial.updated_at
    bench.measure(4, torch="9.9")
    assert store.trial(trial_id).trial.updated_at > before


def test_a_run_with_other_software_that_another_followed_ends_no_confirmation(
    store: Store,
) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    assert store.repeats(bench.cell_id)[trial_id].others
    assert repeat(bench, trial_id, 980.0, 0.51)
    assert not store.repeats(bench.cell_id)[trial_id].others


def test_a_run_that_was_taken_back_counts_with_no_software_again(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    store.release(bench.sweep_id, bench.epoch)
    assert store.invalidate(f"trial_id = {trial_id}") == 1
    epoch = store.acquire(bench.sweep_id, host="h", pid=1)
    again = Bench(store, bench.sweep_id, bench.cell_id, epoch)
    attempt = start_attempt(store, trial_id, epoch)
    assert record_measurement(
        store,
        trial_id,
        attempt,
        epoch=epoch,
        measurement=measurement(1100.0),
        fingerprint=fingerprint(),
    )
    again.measure(4, torch="9.9")
    row = store.trial(trial_id)
    assert row.trial.is_current_fingerprint is False
    assert [a.pooled for a in row.attempts] == [False, False, True]
