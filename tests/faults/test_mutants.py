"""The harness itself: it detects three typical mistakes, each put into the product."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from db import schema
from db.connection.engine import Change
from db.read import records
from db.read.holder import holder_is_gone, live_holder, process_namespace
from db.store import Store
from db.types import AttemptState, SweepState, now
from db.write import batch, changes, event_log, lease
from db.write.writes import Ended, MeasuredEnd, Recorded
from orchestrator.core.errors import SweepInUse
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from tests.faults import small_sweep
from tests.faults.crash_points import die_everywhere, small_play
from tests.faults.fresh_stores import fresh_sqlite
from tests.faults.rivals import pauses, races

pytestmark = pytest.mark.timeout(900)

# The kernel's scheduler decides whether a round shows the mistake, so rounds are repeated until one
# does.
MOST_ROUNDS = 40


def claims_by_select_and_then_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep is looked at in one transaction, and taken in another."""

    def acquire(
        self: Store, sweep_id: int, *, host: str, pid: int, ttl_seconds: float, **_: Any
    ) -> int:
        sweep = schema.sweep
        row = self._database.read(
            lambda connection: connection.execute(
                sa.select(sweep, now().label("now")).where(sweep.c.id == sweep_id)
            ).one()
        )
        holder = live_holder(row)
        if holder is not None and not holder_is_gone(holder):
            raise SweepInUse("held")
        # So that rivals meet here on any machine.
        time.sleep(0.05)
        values = {
            "state": SweepState.RUNNING,
            "owner_host": host,
            "owner_pid": pid,
            "owner_namespace": process_namespace(),
            "owner_token": self._token,
            "owner_since": now(),
            "owner_epoch": row.owner_epoch + 1,
            "lease_until": now(ttl_seconds),
        }
        self._database.write(
            lambda connection, _: connection.execute(
                sa.update(sweep).where(sweep.c.id == sweep_id).values(**values)
            )
        )
        return int(row.owner_epoch) + 1

    monkeypatch.setattr(Store, "acquire", acquire)


def writes_the_state_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a transaction each: a trial is measured for a moment, without a number."""
    in_one = Store.record_ends

    def record_ends(self: Store, ends: Sequence[Ended], *, epoch: int) -> list[Recorded]:
        return [recorded for end in ends for recorded in record(self, end, epoch)]

    def record(self: Store, end: Ended, epoch: int) -> list[Recorded]:
        outcome = end.outcome
        if not isinstance(outcome, MeasuredEnd):
            return in_one(self, [end], epoch=epoch)
        if self.trial(end.trial_id).trial.state is TrialState.LAUNCHING:
            self.note_first_steps([(end.trial_id, end.attempt)], epoch=epoch)
        table = schema.attempt
        of = (table.c.trial_id == end.trial_id, table.c.number == end.attempt)

        def state(connection: sa.Connection, change: Change) -> None:
            trials = batch.Batch(connection, change, [end.trial_id], epoch)
            done = event_log.done_before(connection, change, [end.trial_id], {TrialEvent.MEASURED})
            if not done:
                trials.advance(end.trial_id, TrialEvent.MEASURED)
                trials.write()
                connection.execute(
                    sa.update(table).where(*of).values(state=AttemptState.MEASURED, ended_at=now())
                )

        def result(connection: sa.Connection, _: Any) -> None:
            attempt_id = connection.execute(sa.select(table.c.id).where(*of)).scalar_one()
            columns = records.measurement_columns(
                outcome.measurement, outcome.gpu, outcome.memory_by_part
            )
            connection.execute(sa.insert(schema.measurement), {"attempt_id": attempt_id, **columns})
            connection.execute(sa.update(table).where(*of).values(pooled=True))

        self._database.write(state)
        self._database.write(result)
        found = end.facts.get("fingerprint")
        return [Recorded(state=TrialState.MEASURED, counts=True, fingerprint=found)]

    monkeypatch.setattr(Store, "record_ends", record_ends)


def writes_whatever_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that was replaced goes on writing, as if the epoch were its own."""
    standings, fence_cells = batch._trials_now, changes._fence_cells

    def newest(connection: sa.Connection) -> int:
        return int(
            connection.execute(sa.select(sa.func.max(schema.sweep.c.owner_epoch))).scalar_one()
        )

    monkeypatch.setattr(
        lease, "_is_owner", lambda sweep_id, epoch: (schema.sweep.c.id == sweep_id,)
    )
    monkeypatch.setattr(
        batch,
        "_trials_now",
        lambda connection, ids, _: standings(connection, ids, newest(connection)),
    )
    monkeypatch.setattr(
        changes,
        "_fence_cells",
        lambda connection, ids, _: fence_cells(connection, ids, newest(connection)),
    )


def die(folder: Path) -> list[str]:
    of = small_sweep.spec(gpus=[1], search={"strategy": "exhaustive", "confirm": {"repeats": 0}})
    return list(
        die_everywhere(
            small_play(of, num_trials=6),
            fresh=fresh_sqlite(folder),
            folder=folder,
            every=6,
            copied=True,
        ).complaints
    )


def race(folder: Path) -> list[str]:
    complaints = (
        races(fresh_sqlite(folder), folder, count=5).complaints for _ in range(MOST_ROUNDS // 5)
    )
    return next(filter(None, complaints), [])


def pause(folder: Path) -> list[str]:
    complaints = (
        pauses(fresh_sqlite(folder), folder, count=5, seed=seed).complaints
        for seed in range(MOST_ROUNDS // 5)
    )
    return next(filter(None, complaints), [])


@pytest.mark.long
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
