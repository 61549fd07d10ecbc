"""A client's clock jumps by hours: leases hold, and no duration is negative."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.errors import SweepInUse
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import TrialRequest
from tests.faults import small_sweep
from tests.faults.history import Log, judge
from tests.faults.witness import WitnessedStore
from tests.sweep.fake_scheduler import FakeScheduler

HOUR = 3600.0


def test_a_clock_that_jumps_changes_no_lease_and_no_duration(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, real = random.Random(7), time.time
    monkeypatch.setattr(time, "time", lambda: real() + chance.uniform(-HOUR, HOUR))
    refused: list[str] = []

    def ending(request: TrialRequest) -> float | FailureKind:
        with Store.open(store_url) as other, pytest.raises(SweepInUse) as caught:
            other.acquire(other.sweep_named(small_sweep.NAME).id, host="another", pid=1)
        refused.append(str(caught.value))
        return small_sweep.ending(request)

    log = Log(tmp_path / "seen.jsonl")
    with WitnessedStore.seen_by(log, store_url) as store:
        small_sweep.run(store, open_scheduler=lambda: FakeScheduler(ending))
        assert (
            judge(
                store, small_sweep.NAME, log.entries(), num_trials=small_sweep.NUM_TRIALS
            ).complaints
            == []
        )
        details = [
            store.trial(trial.id) for trial in store.trials(store.sweep_named(small_sweep.NAME).id)
        ]
    assert len(refused) >= small_sweep.NUM_TRIALS - 2, (
        "a lease ended early, by the clock of who asked"
    )
    for attempt in (attempt for detail in details for attempt in detail.attempts):
        assert attempt.ended_at is not None and attempt.ended_at >= attempt.started_at
        assert attempt.gpu_seconds is not None and attempt.gpu_seconds >= 0
