"""Runs in a real store of MLflow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.report.mirrors.mirroring import Mirroring
from orchestrator.report.mirrors.mlflow_mirror import MlflowMirror, uri_of
from tests.db.builders import Bench
from tests.report.mirrors.test_mirroring import runs

pytest.importorskip("mlflow", reason="MLflow is not installed: pip install -e '.[mlflow]'")


@pytest.fixture
def client(tmp_path: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri_of(str(tmp_path / "mlruns")))


def opened(tmp_path: Path) -> MlflowMirror:
    return MlflowMirror.open(
        uri_of(str(tmp_path / "mlruns")), sweep="tiny", run_token="abc", artifacts=tmp_path
    )


def test_a_trial_is_one_run_also_if_it_is_measured_again(
    sqlite_store: Store, tmp_path: Path, client: Any
) -> None:
    bench = Bench.on(sqlite_store)
    measured = bench.measure(1, 1234.0)
    bench.measure(2)
    found = runs(bench)
    assert Mirroring("mlflow", lambda: opened(tmp_path), str).catch_up(found).num_written == 2
    # A new process; one of the runs has changed.
    changed = [replace(found[0], version="2", metrics={"mfu": 0.5}), found[1]]
    again = Mirroring("mlflow", lambda: opened(tmp_path), str)
    assert again.catch_up(changed).num_written == 1
    experiment = client.get_experiment_by_name("tiny")
    stored = client.search_runs([experiment.experiment_id])
    assert len(stored) == 2
    run = next(one for one in stored if one.data.tags["trial_id"] == str(measured))
    assert run.data.params["micro_batch_size"] == "1"
    assert run.data.metrics["tokens_per_second_per_gpu"] == 1234.0
    assert run.data.metrics["mfu"] == 0.5
    assert (run.data.tags["state"], run.info.status) == ("measured", "FINISHED")
    assert run.info.end_time == round(found[0].ended_at.timestamp() * 1000)


def test_a_run_that_was_begun_is_finished_and_not_begun_again(
    sqlite_store: Store, tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench.on(sqlite_store)
    bench.measure(1)
    mirror = opened(tmp_path)
    mirror.known()

    def lost(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(mirror._client, "log_batch", lost)
    with pytest.raises(ConnectionError):
        mirror.write(runs(bench)[0])
    assert Mirroring("mlflow", lambda: opened(tmp_path), str).catch_up(runs(bench)).num_written == 1
    experiment = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["mfu"] > 0 and run.info.status == "FINISHED"
