"""Which code and software the numbers of a cell have, on SQLite and PostgreSQL."""

from __future__ import annotations

from db.read.rows import FingerprintCounts
from db.store import Store
from tests.db.builders import (
    Bench,
    fingerprint,
    measurement,
    record_measurement,
    start_repeat,
)


def test_earlier_numbers_and_newer_repeats_are_counted_by_cell(store: Store) -> None:
    bench = Bench.on(store)
    empty = Bench.on(store, "empty")
    for size in (1, 2):
        bench.measure(size, torch="2.9.0")
    trial_id = bench.measure(4)
    attempt = start_repeat(store, trial_id, bench.epoch, ["node-a"])
    assert not record_measurement(
        store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=measurement(1000.0),
        fingerprint=fingerprint("9.9"),
    )
    (found,) = store.fingerprint_counts(bench.sweep_id)
    assert found == FingerprintCounts(
        cell_id=bench.cell_id,
        num_current=1,
        digest=fingerprint().digest,
        earlier=((fingerprint("2.9.0").digest, 2),),
        num_apart=1,
        apart_digest=fingerprint("9.9").digest,
        newest_attempt_id=found.newest_attempt_id,
    )
    assert found.num_earlier == 2
    before = found.newest_attempt_id
    # A later run with the code of the cell follows the one that is kept apart.
    bench.measure(8)
    (found,) = store.fingerprint_counts(bench.sweep_id)
    assert (found.num_current, found.num_apart) == (2, 0)
    assert (found.newest_attempt_id or 0) > (before or 0) > 0
    (nothing,) = store.fingerprint_counts(empty.sweep_id)
    assert (nothing.num_current, nothing.num_earlier, nothing.newest_attempt_id) == (0, 0, None)
