"""`sweep best` shows below a table what would decide a tie, and which repeats failed."""

from __future__ import annotations

from db.store import Store
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.report.pages.headline import headlines
from orchestrator.report.sweep_rows import read_rows
from tests.cli.conftest import Sweep
from tests.db.builders import (
    Bench,
    failure,
    fingerprint,
    measurement,
    record_failure,
    record_measurement,
    start_repeat,
)


def test_best_shows_it_below_the_tie(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    for micro_batch_size in (1, 2):
        trial_id, attempt = bench.start(micro_batch_size)
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=measurement(1000.0),
            fingerprint=fingerprint(),
        )
    lines = sweep("best")[0].splitlines()
    place = next(n for n, line in enumerate(lines) if "No single winner" in line)
    assert "take trial 1, the simplest of them" in lines[place + 1]


def test_best_names_the_repeats_of_a_leading_trial_that_failed(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(1)
    for _ in range(2):
        record_failure(
            store,
            trial_id,
            start_repeat(store, trial_id, bench.epoch),
            epoch=bench.epoch,
            failure=failure(FailureKind.BAD_RESULT, message="its steps slowed down"),
            event=TrialEvent.REQUEUED,
        )
    said = (
        f"2 repeats of trial {trial_id} failed, so only 1 run counts (the last with bad_result:"
        " its steps slowed down)"
    )
    assert said in sweep("best")[0]
    assert said in sweep("best", "--pareto")[0]
    (row,) = store.sweeps()
    (head,) = headlines([read_rows(store, row)])
    assert said in head.remarks
