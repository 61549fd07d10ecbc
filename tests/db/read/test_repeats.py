"""Repeats that failed or have other code than their trial, on SQLite and PostgreSQL."""

from __future__ import annotations

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
