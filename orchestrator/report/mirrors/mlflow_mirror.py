"""Runs in MLflow: an experiment for each sweep, a run for each trial."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Any

from orchestrator.report.mirrors.tracker_run import TrackerRun

PACKAGE = "mlflow"
# Tags by which a run is found again.
KEY, VERSION, SWEEP = "layout_sweep.key", "layout_sweep.version", "layout_sweep.sweep"
PAGE = 1000
# MLflow itself waits for minutes; the next pass tries again.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def uri_of(place: str) -> str:
    """Return the tracking URI of a folder: a SQLite store in it, which is made if need be."""
    folder = Path(place).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


class MlflowMirror:
    """The runs of one sweep in a store or server of MLflow."""

    name = "mlflow"

    def __init__(self, client: Any, *, sweep: str, run_token: str, artifacts: Path | None) -> None:
        self._client = client
        self._sweep, self._run_token, self._artifacts = sweep, run_token, artifacts
        self._experiment: str | None = None
        self._runs: dict[str, str] = {}  # ids by key

    @classmethod
    def open(cls, uri: str, *, sweep: str, run_token: str, artifacts: Path | None) -> MlflowMirror:
        """`artifacts`: where a local store would keep files; None: the server says."""
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        # An extra, and it takes seconds.
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        return cls(client, sweep=sweep, run_token=run_token, artifacts=artifacts)

    def known(self) -> dict[str, str]:
        """Return the version of each run that is there, by its key."""
        found, token = {}, None
        self._experiment = self._experiment or self._find_experiment()
        while True:
            page = self._client.search_runs(
                [self._experiment],
                filter_string=f"tags.`{SWEEP}` = '{self._run_token}'",
                max_results=PAGE,
                page_token=token,
            )
            for run in page:
                tags = run.data.tags
                self._runs[tags[KEY]] = run.info.run_id
                # Without a version the run was not finished.
                found[tags[KEY]] = tags.get(VERSION, "")
            token = page.token
            if not token:
                return found

    def write(self, run: TrackerRun) -> None:
        """Create the run, or bring it up to date. Its version is written last."""
        from mlflow.entities import Metric, Param, RunTag

        assert self._experiment is not None, "known() comes first"
        run_id = self._runs.get(run.key)
        if run_id is None:
            created = self._client.create_run(
                self._experiment,
                start_time=_milliseconds(run.started_at),
                run_name=run.name,
                tags={KEY: run.key, SWEEP: self._run_token},
            )
            run_id = self._runs[run.key] = created.info.run_id
        at = _milliseconds(run.ended_at)
        self._client.log_batch(
            run_id,
            metrics=[Metric(name, value, at, 0) for name, value in run.metrics.items()],
            params=[Param(name, value) for name, value in run.params.items()],
            tags=[RunTag(name, value) for name, value in run.tags.items()],
        )
        self._client.set_terminated(
            run_id, status="FINISHED" if run.is_measured else "FAILED", end_time=at
        )
        self._client.set_tag(run_id, VERSION, run.version)

    def close(self) -> None:
        """Do nothing: MLflow keeps nothing open."""

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._sweep)
        if found is None:
            where = self._artifacts.as_uri() if self._artifacts is not None else None
            return str(self._client.create_experiment(self._sweep, artifact_location=where))
        return str(found.experiment_id)


def _milliseconds(moment: dt.datetime) -> int:
    known = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    return round(known.timestamp() * 1000)
