"""Records have the names of the SQL columns, in the order in which CSV gives them."""

from __future__ import annotations

import os
from typing import Any

from db.sql import readonly
from db.store import Store
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.report import records
from tests.db.builders import Bench, failure, record_failure


def test_the_record_of_a_trial_has_the_columns_of_csv_in_their_order(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)
    detail = sqlite_store.trial(bench.measure(2))
    record = records.trial_record(detail.trial, detail.cell, detail.sweep_name)
    assert tuple(record) == records.TRIAL_COLUMNS
    assert (record["trial_id"], record["sweep"], record["state"]) == (1, "tiny", "measured")
    assert record["micro_batch_size"] == 2
    assert record["options"] is None, "a layout without options has an empty column"


def test_the_columns_of_a_trial_are_columns_of_v_trial(
    sqlite_store: Store, sqlite_url: str
) -> None:
    view = readonly.own_query(sqlite_url, "SELECT * FROM v_trial LIMIT 0").columns
    assert set(records.TRIAL_COLUMNS) <= set(view)


def test_an_attempt_that_failed_is_told_with_its_failure_and_what_it_reserved(
    sqlite_store: Store,
) -> None:
    bench = Bench.on(sqlite_store)
    trial_id, attempt = bench.start(1)
    record_failure(
        sqlite_store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        failure=failure(message="no such file"),
        event=TrialEvent.FAILED,
        gpu_seconds=20.0,
    )
    record = records.detail_record(sqlite_store.trial(trial_id))
    (told,) = record["attempts"]
    assert told["failure"]["message"] == "no such file"
    assert told["measurement"] is None
    assert sum(told["gpu_seconds_by_part"].values()) == told["gpu_seconds"] == 20.0
    assert [event["to_state"] for event in record["events"]][-1] == TrialState.FAILED


def test_the_record_of_a_cell_counts_every_state_and_holds_its_best(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)
    bench.measure(1)
    bench.add(2)
    reserved = sqlite_store.reserved(bench.sweep_id)
    (status,) = sqlite_store.status(bench.sweep_id)
    record = records.cell_status_record(status, "tiny", reserved.by_cell[bench.cell_id])
    assert record["num_trials"].keys() == set(TrialState)
    assert sum(record["num_trials"].values()) == 2
    assert record["best"]["trial_id"] == 1
    assert record.items() >= records.cell_record(status.cell).items()


def test_money_is_reserved_time_by_the_price_and_unknown_without_one(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)
    bench.measure()
    reserved = sqlite_store.reserved(bench.sweep_id)
    hours = reserved.total.reserved / 3600
    assert records.reserved_record(reserved, 36.0)["dollars"] == 36.0 * hours
    assert records.reserved_record(reserved, None)["dollars"] is None


def test_a_sweep_names_who_works_on_it_and_nobody_afterwards(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)

    def record() -> dict[str, Any]:
        return records.sweep_record(sqlite_store.sweep_named("tiny"))

    assert record()["holder"]["pid"] == os.getpid()
    sqlite_store.release(bench.sweep_id, bench.epoch)
    assert record()["holder"] is None
