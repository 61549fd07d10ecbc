"""A trial has the runs of its cell's newest fingerprint, if it has any; others are kept apart."""

from __future__ import annotations

from dataclasses import replace

from db.store import Store
from db.write.writes import Ended, MeasuredEnd
from orchestrator.core.trial.fingerprint import Fingerprint
from tests.db.builders import (
    Bench,
    counted_statements,
    fingerprint,
    measurement,
    record_measurement,
    repeat,
    start_attempt,
    start_repeat,
)


def edited(digest: str) -> Fingerprint:
    return fingerprint().model_copy(update={"dirty_diff_digest": digest})


def end_of(
    attempt: tuple[int, int], code: Fingerprint, tokens_per_second_per_gpu: float = 1000.0
) -> Ended:
    trial_id, number = attempt
    taken = measurement(tokens_per_second_per_gpu)
    taken = replace(
        taken, step_time=replace(taken.step_time, median=500.0 / taken.tokens_per_second_per_gpu)
    )
    outcome = MeasuredEnd(measurement=taken)
    return Ended(trial_id=trial_id, attempt=number, outcome=outcome, facts={"fingerprint": code})


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


def test_an_attempt_that_began_before_an_edit_and_ends_after_it_changes_no_cell(
    store: Store,
) -> None:
    bench, old, new = Bench.on(store), edited("a"), edited("b")
    early, late, later = (bench.start(size) for size in (1, 2, 4))
    for attempt, code, is_current in ((late, new, True), (early, old, False), (later, new, True)):
        (recorded,) = store.record_ends([end_of(attempt, code)], epoch=bench.epoch)
        assert recorded.counts
        assert recorded.is_current is is_current
    rows = {t.id: t.is_current_fingerprint for t in store.trials(bench.sweep_id)}
    assert rows == {early[0]: False, late[0]: True, later[0]: True}


def test_so_it_is_if_both_are_written_together(store: Store) -> None:
    bench, old, new = Bench.on(store), edited("a"), edited("b")
    early, late = bench.start(1), bench.start(2)
    store.record_ends([end_of(late, new), end_of(early, old)], epoch=bench.epoch)
    rows = {t.id: t.is_current_fingerprint for t in store.trials(bench.sweep_id)}
    assert rows == {early[0]: False, late[0]: True}


def test_so_it_is_if_the_same_write_finds_the_software_of_the_new_code(store: Store) -> None:
    packages = (("numpy", "2.1"),)
    old, new = (edited(code).model_copy(update={"packages": packages}) for code in "ab")
    bench = Bench.on(store)
    early, late = bench.start(1), bench.start(2)
    partly_known = new.model_copy(update={"packages": ()})
    store.record_ends([end_of(late, partly_known)], epoch=bench.epoch)
    repeated = (late[0], start_repeat(store, late[0], bench.epoch, ["node-a"]))
    recorded = store.record_ends([end_of(early, old), end_of(repeated, new)], epoch=bench.epoch)
    assert [(one.counts, one.is_current) for one in recorded] == [(True, False), (True, True)]
    trials = {one.id: one for one in store.trials(bench.sweep_id)}
    assert [trials[i].is_current_fingerprint for i in (early[0], late[0])] == [False, True]
    assert trials[late[0]].num_measurements == 2


def test_of_several_ends_with_the_new_code_the_one_that_began_last_counts(store: Store) -> None:
    """They are written in the order of their ends: the one that began last is not the last."""
    bench, old, new = Bench.on(store), edited("a"), edited("b")
    first, early, late = (bench.start(size) for size in (1, 2, 4))
    ends = [end_of(late, new), end_of(first, new), end_of(early, old)]
    recorded = store.record_ends(ends, epoch=bench.epoch)
    assert [one.is_current for one in recorded] == [True, True, False]


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
