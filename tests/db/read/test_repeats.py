"""Repeats that failed or have other code than their trial, on SQLite and PostgreSQL."""

from __future__ import annotations

import random

import pytest

from db.read.repeats import _newest_counting
from db.read.rows import FailedRepeatRow, OtherRepeat
from db.store import Store
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.lifecycle import TrialEvent
from tests.db.builders import (
    Bench,
    failure,
    fingerprint,
    measurement,
    record_failure,
    record_measurement,
    repeat,
    start_repeat,
)

CODE = fingerprint()
EDITED = CODE.model_copy(update={"dirty_diff_digest": "files:b"})
# It ended before a rank reported its software.
NO_STACK = CODE.model_copy(update={"stack": Stack()})


def fail(
    bench: Bench,
    trial_id: int,
    code: Fingerprint | None,
    kind: FailureKind = FailureKind.BAD_RESULT,
) -> None:
    """A repeat of a trial fails."""
    record_failure(
        bench.store,
        trial_id,
        start_repeat(bench.store, trial_id, bench.epoch),
        epoch=bench.epoch,
        failure=failure(kind, message="its steps slowed down"),
        event=TrialEvent.REQUEUED,
        fingerprint=code,
    )


def run_with(bench: Bench, trial_id: int, code: Fingerprint) -> bool:
    """A repeat of a trial is measured. Return whether it counts."""
    return record_measurement(
        bench.store,
        trial_id,
        start_repeat(bench.store, trial_id, bench.epoch),
        epoch=bench.epoch,
        measurement=measurement(),
        fingerprint=code,
    )


def test_failed_repeats_are_found_but_no_cancelled_ones(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure()
    for kind in (FailureKind.BAD_RESULT, FailureKind.CANCELLED):
        fail(bench, trial_id, None, kind)
    assert store.failed_repeats([trial_id]) == [
        FailedRepeatRow(
            cell_id=bench.cell_id,
            trial_id=trial_id,
            attempt=2,
            failure_kind=FailureKind.BAD_RESULT,
            failure_message="its steps slowed down",
        )
    ]
    other = bench.measure(2)
    fail(bench, other, None)
    found = store.failed_repeats([other, trial_id])
    assert [row.trial_id for row in found] == [trial_id, other]
    assert [row.trial_id for row in store.failed_repeats([other])] == [other]
    assert store.failed_repeats([]) == []


def test_a_failure_with_other_code_counts_only_until_the_cell_is_measured_again(
    store: Store,
) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure()
    for code in (None, NO_STACK, CODE, EDITED):
        fail(bench, trial_id, code)
    found = store.repeats(bench.cell_id)[trial_id]
    assert dict(found.failures) == {FailureKind.BAD_RESULT: 3}
    assert found.fingerprint == CODE
    edited = OtherRepeat(fingerprint=EDITED, failure_kind=FailureKind.BAD_RESULT)
    assert found.others == (edited,)
    assert [row.attempt for row in store.failed_repeats([trial_id])] == [2, 3, 4, 5]
    bench.measure(2)
    found = store.repeats(bench.cell_id)[trial_id]
    assert (dict(found.failures), found.others) == ({FailureKind.BAD_RESULT: 3}, ())
    assert [row.attempt for row in store.failed_repeats([trial_id])] == [2, 3, 4]


def test_a_failure_from_before_the_runs_that_count_now_is_none_of_theirs(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure()
    fail(bench, trial_id, CODE)
    assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    bench.measure(2, torch="9.9")
    assert store.repeats(bench.cell_id) == {}
    assert store.failed_repeats([trial_id]) == []


def test_a_repeat_with_other_code_matters_until_a_run_of_its_cell_counts(store: Store) -> None:
    bench = Bench.on(store)
    first, second = bench.measure(1), bench.measure(2)
    assert not run_with(bench, first, EDITED)
    apart = OtherRepeat(fingerprint=EDITED, failure_kind=None)
    assert store.repeats(bench.cell_id)[first].others == (apart,)
    # After the edit was taken back, another trial is repeated.
    assert run_with(bench, second, CODE)
    found = store.repeats(bench.cell_id)
    assert (found[first].others, found[second].others) == ((), ())


@pytest.mark.parametrize("seed", range(4))
def test_the_newest_run_that_counts_is_that_of_the_counts_by_fingerprint(
    store: Store, seed: int
) -> None:
    """Two statements say which runs count: one for a sweep, and one for some of its cells."""
    chance = random.Random(seed)
    names = ("tiny", "other")
    benches = [Bench.on(store, name) for name in names]
    trials: dict[int, list[int]] = {bench.cell_id: [] for bench in benches}
    seen = set[int | None]()
    for size in range(1, 16):
        bench = chance.choice(benches)
        known, torch = trials[bench.cell_id], chance.choice(["2.13.0", "2.13.0", "9.9"])
        match chance.choice(["measure", "measure", "repeat", "fail", "invalidate"]):
            case "repeat" if known:
                repeat(bench, chance.choice(known), 900.0, 0.55, torch=torch)
            case "fail" if known:
                fail(bench, chance.choice(known), CODE)
            case "invalidate" if known:
                trial_id = known.pop(chance.randrange(len(known)))
                assert store.invalidate(f"trial_id = {trial_id}") == 1
                # It ends the lease.
                benches = [Bench.on(store, name) for name in names]
            case _:
                known.append(bench.measure(size, torch=torch))
        for each in benches:
            (counts,) = store.fingerprint_counts(each.sweep_id)
            newest = store._read(_newest_counting, [each.cell_id])
            assert newest.get(each.cell_id) == counts.newest_attempt_id
            seen.add(counts.newest_attempt_id)
    assert len(seen) > 5
