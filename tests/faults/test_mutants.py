"""The harness itself: three mistakes that such programs are made with, each put into the product on purpose, and each seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from db import changes, lease, records, schema
from db.changes import _Standing
from db.schema import SweepState, now
from db.store import Store
from orchestrator.core.errors import SweepHeld
from orchestrator.core.lifecycle import TrialEvent, TrialState
from orchestrator.core.measurement import Measurement
from orchestrator.core.protocol import GpuUsage
from tests.faults import small_sweep
from tests.faults.crash_points import die_everywhere, fresh_sqlite
from tests.faults.rivals import pauses, races

pytestmark = pytest.mark.timeout(300)


def claims_by_select_and_then_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep is looked at in one transaction, and taken in another."""

    def acquire(self: Store, sweep_id: int, *, host: str, pid: int, ttl_seconds: float, **_: Any) -> int:
        sweep = schema.sweep
        row = self._database.read(
            lambda connection: connection.execute(sa.select(sweep, now().label("now")).where(sweep.c.id == sweep_id)).one()
        )
        holder = lease.live_holder(row)
        if holder is not None and not lease.holder_is_gone(holder):
            raise SweepHeld("held")
        values = {
            "state": SweepState.RUNNING,
            "owner_host": host,
            "owner_pid": pid,
            "owner_namespace": lease.process_namespace(),
            "owner_token": self._token,
            "owner_since": now(),
            "owner_epoch": row.owner_epoch + 1,
            "lease_until": now(ttl_seconds),
        }
        self._database.write(lambda connection, _: connection.execute(sa.update(sweep).where(sweep.c.id == sweep_id).values(**values)))
        return int(row.owner_epoch) + 1

    monkeypatch.setattr(Store, "acquire", acquire)


def writes_the_state_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a transaction each: a trial is measured for a moment, without a number."""

    def record_measurement(
        self: Store, trial_id: int, attempt: int, *, epoch: int, measurement: Measurement, gpu: GpuUsage, memory_by_part: Any, **_: Any
    ) -> bool:
        self._database.write(
            lambda connection, change: changes.transition(connection, change, trial_id, TrialEvent.MEASURED, epoch, attempt, None)
        )

        def result(connection: sa.Connection, _: Any) -> None:
            table = schema.attempt
            of = (table.c.trial_id == trial_id, table.c.number == attempt)
            attempt_id = connection.execute(sa.select(table.c.id).where(*of)).scalar_one()
            columns = records.measurement_columns(measurement, gpu, memory_by_part)
            connection.execute(sa.insert(schema.measurement), {"attempt_id": attempt_id, **columns})
            connection.execute(sa.update(table).where(*of).values(pooled=True))

        self._database.write(result)
        return True

    monkeypatch.setattr(Store, "record_measurement", record_measurement)


def writes_whatever_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that was replaced goes on writing."""

    def standing(connection: sa.Connection, trial_id: int, epoch: int) -> _Standing:
        row = connection.execute(changes._STANDING, {"trial_id": trial_id}).one()
        return _Standing(trial_id, row.sweep_id, row.cell_id, TrialState(row.state), row.num_attempts)

    def fence_cell(connection: sa.Connection, cell_id: int, epoch: int) -> int:
        return int(connection.execute(sa.select(schema.cell.c.sweep_id).where(schema.cell.c.id == cell_id)).scalar_one())

    monkeypatch.setattr(lease, "_is_owner", lambda sweep_id, epoch: (schema.sweep.c.id == sweep_id,))
    monkeypatch.setattr(changes, "_standing", standing)
    monkeypatch.setattr(changes, "_fence_cell", fence_cell)


def die(folder: Path) -> list[str]:
    of = small_sweep.spec(gpus=[1], search={"strategy": "exhaustive", "confirm": {"repeats": 0}})
    return list(die_everywhere(of, num_trials=6, fresh=fresh_sqlite(folder), folder=folder, every=6).complaints)


def race(folder: Path) -> list[str]:
    return races(fresh_sqlite(folder), folder, count=5).complaints


def pause(folder: Path) -> list[str]:
    return pauses(fresh_sqlite(folder), folder, count=8, seed=3).complaints


@pytest.mark.parametrize(
    ("mutant", "harness", "says"),
    [
        (claims_by_select_and_then_update, race, "launched 2 times|ended with 1"),
        (writes_the_state_before_the_result, die, "measured without a measurement"),
        (writes_whatever_the_epoch, pause, "was written after epoch|ended with 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_made_on_purpose_is_seen(
    mutant: Callable[[pytest.MonkeyPatch], None],
    harness: Callable[[Path], list[str]],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    mutant(monkeypatch)
    complaints = harness(tmp_path)
    assert any(re.search(says, text) for text in complaints), complaints
