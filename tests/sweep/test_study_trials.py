"""What an Optuna study shows of stored trials."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from db.sql import readonly
from db.store import Store
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.search.optuna_storage import StudyState, export_study
from orchestrator.sweep.study_trials import NOT_ENDED, OTHER_SOFTWARE, study_trials
from tests.db.builders import Bench, failure, measurement, record_failure, record_measurement

TOKENS = Objective.TOKENS_PER_SECOND_PER_GPU
PRICE = 2.5  # dollars of a GPU-hour


@pytest.fixture
def bench(sqlite_store: Store) -> Bench:
    """A trial of every kind that a study tells apart, by micro-batch size."""
    bench = Bench.on(sqlite_store)
    bench.measure(1, 500.0, torch="2.9.0")
    for size, changes in (
        (2, {}),
        (4, {"implausible": "faster than light"}),
        (8, {"step_seconds_bound": 0.4}),
    ):
        trial_id, number = bench.start(size)
        record_measurement(
            sqlite_store, trial_id, number, epoch=bench.epoch, measurement=measurement(**changes)
        )
    for size, kind, event in (
        (16, FailureKind.OOM_GPU, TrialEvent.OUT_OF_MEMORY),
        (32, FailureKind.USER_ERROR, TrialEvent.FAILED),
        (64, FailureKind.XID, TrialEvent.FAILED),
    ):
        trial_id, number = bench.start(size)
        record_failure(
            sqlite_store, trial_id, number, epoch=bench.epoch, failure=failure(kind), event=event
        )
    bench.prune([128])
    bench.start(256)
    # The newest measurement tells the fingerprint of the cell.
    bench.measure(512, 800.0)
    return bench


def shown(
    bench: Bench, objectives: Sequence[Objective] = (TOKENS,)
) -> tuple[list[Any], dict[str, int]]:
    store = bench.store
    spans = store.attempt_spans(bench.cell_id)
    return study_trials(store.trials(bench.sweep_id), spans, objectives, price_per_gpu_hour=PRICE)


def test_failures_fail_and_condemned_layouts_are_pruned_without_a_value(bench: Bench) -> None:
    trials, left_out = shown(bench)
    by_size = {trial.layout.micro_batch_size: trial for trial in trials}
    assert {size: (trial.state, trial.values) for size, trial in by_size.items()} == {
        16: (StudyState.FAIL, None),
        32: (StudyState.FAIL, None),
        64: (StudyState.FAIL, None),
        128: (StudyState.PRUNED, None),
        512: (StudyState.COMPLETE, (800.0,)),
    }
    assert left_out == {OTHER_SOFTWARE: 4, NOT_ENDED: 1}
    assert by_size[64].attributes["failure_kind"] == "xid"
    assert by_size[512].attributes["relative_confidence"] == 0.015
    assert "failure_kind" not in by_size[512].attributes


def test_what_cannot_be_true_fails_and_what_was_ended_early_is_pruned(
    sqlite_store: Store,
) -> None:
    bench = Bench.on(sqlite_store)
    for size, changes in ((4, {"implausible": "too fast"}), (8, {"step_seconds_bound": 0.4})):
        trial_id, number = bench.start(size)
        record_measurement(
            sqlite_store, trial_id, number, epoch=bench.epoch, measurement=measurement(**changes)
        )
    trials, left_out = shown(bench)
    assert [(trial.state, trial.values) for trial in trials] == [
        (StudyState.FAIL, None),
        (StudyState.PRUNED, None),
    ]
    assert (trials[0].attributes["implausible"], left_out) == ("too fast", {})


def test_optuna_dashboard_answers_what_sql_does(
    bench: Bench, sqlite_url: str, tmp_path: Path
) -> None:
    dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    import optuna

    storage = f"sqlite:///{tmp_path}/optuna.db"
    trials, left_out = shown(bench)
    export_study(
        storage, "tiny/cell", trials, objectives=[TOKENS], attributes={"left_out": left_out}
    )
    app = dashboard.wsgi(optuna.storages.RDBStorage(storage))

    (study,) = get(app, "/api/studies")["study_summaries"]
    assert (study["study_name"], study["directions"]) == ("tiny/cell", ["maximize"])
    answer = get(app, f"/api/studies/{study['study_id']}")
    found = {
        attributes["trial_id"]: (trial, attributes)
        for trial in answer["trials"]
        for attributes in [{a["key"]: plain(a["value"]) for a in trial["user_attrs"]}]
    }
    rows = readonly.query(
        sqlite_url,
        "SELECT trial_id, state, layout, tokens_per_second_per_gpu, mfu, relative_confidence,"
        " peak_memory_allocated_bytes, micro_batch_size, failure_kind FROM v_trial"
        " WHERE state IN ('out_of_memory', 'failed', 'pruned') OR is_current_fingerprint",
    ).rows
    assert len(rows) == len(found) == 5
    states = {"measured": "Complete", "pruned": "Pruned", "out_of_memory": "Fail", "failed": "Fail"}
    for trial_id, state, layout, speed, mfu, confidence, memory, size, kind in rows:
        trial, attributes = found[trial_id]
        assert (trial["state"], attributes["layout"]) == (states[state], layout)
        assert trial.get("values") == (None if speed is None else [speed])
        assert attributes.get("mfu") == mfu
        assert attributes.get("relative_confidence") == confidence
        assert attributes.get("peak_memory_allocated_bytes") == memory
        assert attributes.get("failure_kind") == kind
        params = {param["name"]: param["param_internal_value"] for param in trial["params"]}
        assert params["micro_batch_size"] == size


def test_several_objectives_are_as_many_directions_and_agree_with_sql(
    bench: Bench, sqlite_url: str, tmp_path: Path
) -> None:
    """A layout without one of them is left out, and that is said."""
    dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    import optuna

    trial_id, number = bench.start(1024)
    record_measurement(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        measurement=measurement(900.0),
        gpu=GpuUsage(power_watts=675.0),
    )
    objectives = (
        TOKENS,
        Objective.MEMORY_HEADROOM,
        Objective.DOLLARS_PER_BILLION_TOKENS,
        Objective.JOULES_PER_TOKEN,
    )
    trials, left_out = shown(bench, objectives)
    assert left_out["measured without joules_per_token"] == 1  # of micro-batch size 512
    storage = f"sqlite:///{tmp_path}/optuna.db"
    export_study(storage, "cell", trials, objectives=objectives, attributes={})
    app = dashboard.wsgi(optuna.storages.RDBStorage(storage))
    (study,) = get(app, "/api/studies")["study_summaries"]
    assert study["directions"] == ["maximize", "maximize", "minimize", "minimize"]
    found = get(app, f"/api/studies/{study['study_id']}")
    assert found["objective_names"] == [objective.value for objective in objectives]
    (told,) = [trial["values"] for trial in found["trials"] if trial["state"] == "Complete"]
    sql = (
        "SELECT tokens_per_second_per_gpu,"
        " 1 - 1.0 * peak_memory_reserved_bytes / device_memory_bytes,"
        f" 1e9 / tokens_per_second_per_gpu / 3600 * {PRICE}, joules_per_token"
        f" FROM v_trial WHERE trial_id = {trial_id}"
    )
    assert told == pytest.approx(list(readonly.query(sqlite_url, sql).rows[0]))


def plain(text: str) -> Any:
    """An attribute as the dashboard gives it: numbers as JSON, texts as they are."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def get(app: Any, path: str) -> Any:
    """The JSON that a WSGI program answers, without a server."""
    statuses: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": io.StringIO(),
        "wsgi.url_scheme": "http",
    }
    body = b"".join(app(environment, lambda status, headers, exc=None: statuses.append(status)))
    assert statuses == ["200 OK"], body
    return json.loads(body)
