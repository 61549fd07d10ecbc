"""What lies in a spool, and what of it counts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from db.store import Store
from db.types import AttemptState
from orchestrator.cluster.contract import Finished
from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult
from orchestrator.sweep.recovery import Recovery
from orchestrator.sweep.spool import Spool, Spooled
from tests.db.builders import (
    Bench,
    failure,
    measurement,
    record_failure,
    record_measurement,
    start_attempt,
    start_repeat,
)


def end_of(trial_id: int, seconds: float = 1.0) -> Finished:
    ranks = [
        RankOutcome(rank=rank, exit_code=0, result=RankResult(step_seconds=[seconds] * 6))
        for rank in range(2)
    ]
    return Finished(
        trial_id=trial_id,
        reports=[NodeReport(node="here", ranks=ranks)],
        failure=None,
        gpu_seconds=2.0,
    )


def recovery(bench: Bench, *, not_passed: str | None = None) -> Recovery:
    plan = MeasurementPlan(warmup_steps=1, min_steps=2, max_steps=9, relative_confidence=0.5)
    code = Fingerprint(orchestrator_version="test")
    return Recovery(
        store=bench.store,
        sweep_id=bench.sweep_id,
        epoch=bench.epoch,
        plan=plan,
        code=code,
        device_name=None,
        not_passed=not_passed,
    )


def test_a_spooled_end_counts_only_for_an_attempt_that_nobody_gave_up(
    store: Store, tmp_path: Path
) -> None:
    bench = Bench.on(store)
    (waits, first), (given_up, second) = bench.start(1), bench.start(2)
    spool = Spool(tmp_path / "spool")
    spool.keep(Spooled(attempt=second, end=end_of(given_up)))
    # A later orchestrator, on a machine without this spool.
    other = Bench.on(store)
    assert [trial.id for trial in store.mark_lost(other.sweep_id, other.epoch)] == [waits, given_up]
    third = start_attempt(store, given_up, other.epoch)
    again, fourth = other.start(3)
    spool.keep(Spooled(attempt=fourth, end=end_of(again)))
    later = Bench.on(store)
    assert recovery(later).take_up(Spool(tmp_path / "spool")) == 2
    assert store.trial(again).trial.state is TrialState.MEASURED
    late = store.trial(given_up)
    assert (late.trial.state, late.trial.num_attempts) == (TrialState.LAUNCHING, third)
    assert (
        late.attempts[second - 1].superseded and late.attempts[second - 1].measurement is not None
    )
    assert list((tmp_path / "spool").iterdir()) == []
    assert first == 1


def test_a_failure_that_was_spooled_is_judged_like_any_other(store: Store, tmp_path: Path) -> None:
    bench = Bench.on(store)
    ids = [bench.start(size) for size in (1, 2, 4)]
    kinds = (FailureKind.OOM_GPU, FailureKind.NODE_LOST, FailureKind.CANCELLED)
    spool = Spool(tmp_path / "spool")
    for (trial_id, attempt), kind in zip(ids, kinds, strict=True):
        end = Finished(trial_id=trial_id, reports=[], failure=failure(kind), gpu_seconds=1.0)
        spool.keep(Spooled(attempt=attempt, end=end))
    later = Bench.on(store)
    assert recovery(later).take_up(Spool(tmp_path / "spool")) == 3
    states = [store.trial(trial_id).trial.state for trial_id, _ in ids]
    assert states == [TrialState.OUT_OF_MEMORY, TrialState.QUEUED, TrialState.QUEUED]
    assert store.mark_lost(later.sweep_id, later.epoch) == []


def test_a_spooled_repeat_counts_with_repeats_as_while_the_sweep_runs(
    store: Store, tmp_path: Path
) -> None:
    """Its first attempt and the repeat both lost their node: a first failure of a repeat."""
    bench = Bench.on(store)
    trial_id, first = bench.start(1)
    lost = failure(FailureKind.NODE_LOST)
    requeued = TrialEvent.REQUEUED
    for _ in range(POLICIES[FailureKind.NODE_LOST].max_retries):
        record_failure(store, trial_id, first, epoch=bench.epoch, failure=lost, event=requeued)
        first = start_attempt(store, trial_id, bench.epoch)
    record_measurement(store, trial_id, first, epoch=bench.epoch, measurement=measurement())
    number = start_repeat(store, trial_id, bench.epoch)
    end = Finished(trial_id=trial_id, reports=[], failure=lost, gpu_seconds=1.0)
    Spool(tmp_path / "spool").keep(Spooled(attempt=number, end=end))
    later = Bench.on(store)
    assert recovery(later).take_up(Spool(tmp_path / "spool")) == 1
    found = store.trial(trial_id)
    assert found.trial.state is TrialState.MEASURED
    assert found.attempts[number - 1].state is AttemptState.REQUEUED


def test_a_spooled_measurement_has_the_date_of_its_end(store: Store, tmp_path: Path) -> None:
    bench = Bench.on(store)
    trial_id, number = bench.start(1)
    at = dt.datetime(2026, 11, 20, 12, 30, tzinfo=dt.UTC)
    Spool(tmp_path / "spool").keep(Spooled(attempt=number, end=end_of(trial_id), at=at))
    recovery(Bench.on(store)).take_up(Spool(tmp_path / "spool"))
    assert store.trial(trial_id).trial.measured_at == at


def test_a_spooled_measurement_says_what_may_not_reach_the_program(
    store: Store, tmp_path: Path
) -> None:
    trial_id, number = Bench.on(store).start(1)
    Spool(tmp_path / "spool").keep(Spooled(attempt=number, end=end_of(trial_id)))
    later = recovery(Bench.on(store), not_passed="mbs may not reach the program")
    later.take_up(Spool(tmp_path / "spool"))
    unchecked = store.trial(trial_id).trial.unchecked
    assert unchecked is not None and unchecked.endswith("mbs may not reach the program")


def test_what_the_store_refuses_is_set_aside_and_said_and_the_rest_is_written_down(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench.on(store)
    (beyond, first), (well, second) = bench.start(1), bench.start(2)
    no_column_holds_it = failure(FailureKind.USER_ERROR, step=2**70)
    spool = Spool(tmp_path / "spool")
    spool.keep(
        Spooled(
            attempt=first,
            end=Finished(trial_id=beyond, reports=[], failure=no_column_holds_it, gpu_seconds=1.0),
        )
    )
    spool.keep(Spooled(attempt=1, end=end_of(2**70)))
    spool.keep(Spooled(attempt=1, end=end_of(4711)))
    spool.keep(Spooled(attempt=second, end=end_of(well)))
    later = Bench.on(store)
    assert recovery(later).take_up(Spool(tmp_path / "spool")) == 1
    assert store.trial(well).trial.state is TrialState.MEASURED
    aside = {file.name for file in (tmp_path / "spool").iterdir()}
    assert aside == {
        f"trial-{beyond}-attempt-1.refused",
        "trial-4711-attempt-1.refused",
        f"trial-{2**70}-attempt-1.refused",
    }
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "set aside as" in text and "\n" not in text]) == 3
    assert recovery(later).take_up(Spool(tmp_path / "spool")) == 0
    assert [trial.id for trial in store.mark_lost(later.sweep_id, later.epoch)] == [beyond], (
        "whose trial it is waits again"
    )
