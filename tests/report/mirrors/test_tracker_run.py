"""What a run in a tracker holds of a trial."""

from __future__ import annotations

from db.store import Store
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from tests.db.builders import Bench, failure, record_failure
from tests.report.mirrors.test_mirroring import runs


def fail(bench: Bench, size: int, kind: FailureKind, event: TrialEvent) -> int:
    trial_id, attempt = bench.start(size)
    record_failure(
        bench.store, trial_id, attempt, epoch=bench.epoch, failure=failure(kind), event=event
    )
    return trial_id


def test_a_run_holds_the_layout_the_numbers_and_how_the_trial_ended(
    sqlite_store: Store,
) -> None:
    bench = Bench.on(sqlite_store)
    measured = bench.measure(1, 1234.0)
    failed = fail(bench, 2, FailureKind.USER_ERROR, TrialEvent.FAILED)
    too_large = fail(bench, 4, FailureKind.OOM_GPU, TrialEvent.OUT_OF_MEMORY)
    bench.prune([8])
    bench.start(16)
    bench.add(32)
    found = {run.trial_id: run for run in runs(bench)}
    # Neither what was never launched nor what has not ended.
    assert list(found) == [measured, failed, too_large]
    run = found[measured]
    assert run.params["micro_batch_size"] == "1" and run.params["model"] == "llama-tiny"
    assert run.metrics["tokens_per_second_per_gpu"] == 1234.0
    assert run.metrics["peak_memory_bytes"] > 0 and run.metrics["mfu"] > 0
    assert (run.tags["state"], run.tags["sweep"]) == ("measured", "tiny")
    assert run.tags["trial_id"] == str(measured) and run.is_measured
    assert run.started_at <= run.ended_at
    assert found[failed].tags["failure_kind"] == "user_error" and not found[failed].is_measured
    assert "tokens_per_second_per_gpu" not in found[too_large].metrics
    assert len({run.key for run in found.values()}) == 3
