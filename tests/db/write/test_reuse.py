"""Trials of another sweep become rows of the sweep that reuses them, on both databases."""

from __future__ import annotations

import pytest

from db import schema
from db.sql import readonly
from db.store import Store
from orchestrator.core.errors import LeaseLost
from tests.db.builders import Bench
from tests.db.sql import made_up_sweep


def test_trials_of_another_sweep_are_taken_over_with_all_their_numbers(
    store: Store, store_url: str
) -> None:
    drawn = made_up_sweep.write(store, "theirs", seed=1)
    measured = [trial.id for trial in drawn.of(drawn.cells[0]) if trial.counting is not None]
    mine = Bench.on(store, "mine")
    assert store.reuse(mine.cell_id, measured, epoch=mine.epoch) == len(measured)
    assert store.reuse(mine.cell_id, measured, epoch=mine.epoch) == 0
    columns = [
        f"{table.name}.{column.name}"
        for table in (schema.attempt, schema.measurement)
        for column in table.columns
        if column.name not in ("id", "trial_id", "attempt_id", "number", "epoch", "gpu_seconds")
    ]
    numbers = (
        "SELECT {source}, " + ", ".join(columns) + " FROM trial"
        " JOIN attempt ON attempt.trial_id = trial.id AND attempt.pooled"
        " JOIN measurement ON measurement.attempt_id = attempt.id"
        " WHERE {source} IN (" + ", ".join(map(str, measured)) + ") ORDER BY 1, attempt.number"
    )
    theirs, taken = (
        readonly.query(store_url, numbers.format(source=source)).rows
        for source in ("trial.id", "trial.reused_from")
    )
    assert len(taken) >= len(measured) and taken == theirs
    with pytest.raises(LeaseLost):
        store.reuse(mine.cell_id, measured, epoch=mine.epoch + 1)
    assert store.reusers(drawn.sweep_id) == {"mine": len(measured)}
    assert store.reused_by("mine") == frozenset(measured)
    # So the log tells which runs came before an invalidation.
    for row in store.trials(mine.sweep_id):
        (event,) = (one for one in store.trial(row.id).events if one.event == "measured")
        assert event.attempt == row.num_attempts


def test_max_trials_counts_what_the_sweep_launched_and_not_what_it_reused(store: Store) -> None:
    drawn = made_up_sweep.write(store, "theirs", seed=1)
    measured = [trial.id for trial in drawn.of(drawn.cells[0]) if trial.counting is not None]
    mine = Bench.on(store, "mine")
    store.reuse(mine.cell_id, measured, epoch=mine.epoch)
    (status,) = store.status(mine.sweep_id)
    assert status.num_trials["measured"] == len(measured) > 0 and status.num_launched == 0
    for size in (16, 32):
        mine.measure(size)
    mine.start(64)
    for sweep_id in (mine.sweep_id, drawn.sweep_id):
        for cell in store.status(sweep_id):
            of_cell = store.trials(sweep_id, cell_id=cell.cell.id)
            assert cell.num_launched == sum(one.was_launched for one in of_cell)
    (status,) = store.status(mine.sweep_id)
    assert status.num_launched == 3
