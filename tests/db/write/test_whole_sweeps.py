"""Sweeps are renamed and removed as a whole, on both databases."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from db import schema
from db.sql import readonly
from db.store import Store
from orchestrator.core.errors import SweepInUse, UsageInvalid
from orchestrator.core.trial.lifecycle import TrialEvent
from tests.db.builders import (
    Bench,
    failure,
    layout,
    measurement,
    record_failure,
    record_measurement,
)
from tests.db.sql import made_up_sweep


def rows(store: Store) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table."""
    return {
        name: store._database.read(
            lambda connection, table=table: sorted(
                tuple(map(str, row)) for row in connection.execute(sa.select(table))
            )
        )
        for name, table in schema.metadata.tables.items()
    }


def test_a_removed_sweep_leaves_every_row_of_the_others(store: Store, store_url: str) -> None:
    kept = made_up_sweep.write(store, "kept", seed=1)
    before = rows(store)
    gone = made_up_sweep.write(store, "gone", seed=2)
    bench = Bench.on(store, "proofs")
    proof, number = bench.start(4)
    record_failure(
        store, proof, number, epoch=bench.epoch, failure=failure(), event=TrialEvent.OUT_OF_MEMORY
    )
    bench.prune([8, 16], condemned_by=proof)
    bench.measure(1)
    profile = store.begin_profile(proof, epoch=bench.epoch)
    assert profile == 1
    store.release(bench.sweep_id, bench.epoch)
    for sweep_id, epoch in ((gone.sweep_id, 1), (bench.sweep_id, None)):
        if epoch is not None:
            store.release(sweep_id, epoch)
        store.remove(sweep_id)
    after = rows(store)
    # Models and fingerprints are everybody's.
    for name in before.keys() - {"model", "fingerprint"}:
        assert after[name] == before[name], name
    assert kept.trials and len(store.sweeps()) == 1
    with pytest.raises(UsageInvalid, match="there is no sweep with id"):
        store.remove(gone.sweep_id)


def test_a_rename_changes_the_name_and_nothing_else(store: Store, store_url: str) -> None:
    spec = '{"name":"old","model":"llama-tiny","note":"old"}'
    sweep_id = store.ensure_sweep("old", spec, {"precision": "bf16"})
    store.ensure_sweep("taken", "{}", {})
    before = store.sweep_named("old")
    store.rename(sweep_id, "new")
    row = store.sweep_named("new")
    assert row.spec_json == '{"name":"new","model":"llama-tiny","note":"old"}'
    assert (row.id, row.state, row.run_token) == (before.id, before.state, before.run_token)
    with pytest.raises(UsageInvalid, match="exists already; take another name"):
        store.rename(sweep_id, "taken")
    # An answer was lost, and the write is tried again.
    store.rename(sweep_id, "new")
    assert [each.name for each in store.sweeps()] == ["taken", "new"]


def test_who_works_on_a_sweep_keeps_it(store: Store, store_url: str) -> None:
    bench = Bench.on(store, "mine")
    trial_id, number = bench.start()
    with Store.open(store_url) as other:
        with pytest.raises(SweepInUse):
            other.rename(bench.sweep_id, "x")
        with pytest.raises(SweepInUse):
            other.remove(bench.sweep_id)
    record_measurement(store, trial_id, number, epoch=bench.epoch, measurement=measurement())
    assert readonly.query(store_url, "SELECT layout FROM v_best").rows == [(layout().key,)]
