"""The commands that change what the store says, and the one that checks the machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from db.schema import SCHEMA_VERSION
from db.store import Store
from db.types import StopRequest
from orchestrator import cli
from orchestrator.cli import console_log, machine_checks
from orchestrator.core.machines.check import Status
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.node import exposure as exposure_look
from tests.db.builders import Bench

Sweep = Callable[..., tuple[str, str]]


@pytest.fixture
def store(
    sqlite_store: Store, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Store:
    monkeypatch.setenv("SWEEP_DB", sqlite_url)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    return sqlite_store


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str]) -> Iterator[Sweep]:
    loggers = [logging.getLogger(name) for name in console_log.PROJECT_LOGGERS]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert cli.main(arguments) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return out, err

    yield run
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_cancel_reaches_the_orchestrator_that_holds_the_sweep(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    out, _ = sweep("cancel", "--drain")
    assert "running trials may finish" in out
    assert store.renew(bench.sweep_id, bench.epoch) is StopRequest.DRAIN
    out, _ = sweep("cancel", "tiny", "--json")
    found = json.loads(out)
    assert (found["accepted"], found["request"]) == (True, "cancel")
    assert store.renew(bench.sweep_id, bench.epoch) is StopRequest.CANCEL
    assert "asked to cancel" in sweep("status")[0]


def test_cancel_says_so_where_nobody_works(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    store.release(bench.sweep_id, bench.epoch)
    assert "Nobody works on sweep tiny" in sweep("cancel")[0]
    assert json.loads(sweep("cancel", "--json")[0])["accepted"] is False


def test_invalidate_counts_asks_and_touches_only_what_matches(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    old, new = bench.measure(1, torch="2.9.0"), bench.measure(2)
    store.release(bench.sweep_id, bench.epoch)
    _, err = sweep(
        "invalidate", "--where", "not is_current_fingerprint", code=2
    )  # stdin is no terminal: nobody can answer
    assert "1 matching trial: 1 measured" in err
    assert "say --yes" in err
    assert store.trial(old).trial.state is TrialState.MEASURED
    out, _ = sweep("invalidate", "--where", "not is_current_fingerprint", "--yes")
    assert "1 trial will be measured again" in out
    assert store.trial(old).trial.state is TrialState.QUEUED
    assert store.trial(new).trial.state is TrialState.MEASURED
    assert "nothing was changed" in sweep("invalidate", "--where", "trial_id = 999")[0]


def test_invalidate_can_be_kept_to_one_sweep(store: Store, sweep: Sweep) -> None:
    benches = [Bench.on(store, name) for name in ("one", "two")]
    trials = [bench.measure() for bench in benches]
    for bench in benches:
        store.release(bench.sweep_id, bench.epoch)
    found = json.loads(
        sweep("invalidate", "--where", "mfu > 0.1", "--sweep", "two", "--yes", "--json")[0]
    )
    assert (found["matched"], found["num_invalidated"]) == ({"measured": 1}, 1)
    assert [store.trial(trial).trial.state for trial in trials] == [
        TrialState.MEASURED,
        TrialState.QUEUED,
    ]


@pytest.mark.parametrize(
    "where",
    [
        "nope = 1",
        "1=1) or (1=1",
        "trial_id = 1; delete from trial",
        "1=1 --",
        "trial_id in (select load_extension('x'))",
        "",
    ],
)
def test_a_condition_can_only_be_a_condition(store: Store, sweep: Sweep, where: str) -> None:
    bench = Bench.on(store)
    trial = bench.measure()
    bench.add(2)
    store.release(bench.sweep_id, bench.epoch)
    assert cli.main(["invalidate", "--where", where, "--yes"]) in (0, 2)
    assert len(store.trials(bench.sweep_id)) == 2
    assert store.trial(trial).trial.state in (TrialState.MEASURED, TrialState.QUEUED)


def test_invalidate_is_refused_while_an_orchestrator_works(store: Store, sweep: Sweep) -> None:
    Bench.on(store).measure()
    _, err = sweep("invalidate", "--where", "mfu > 0", "--yes", code=5)
    assert "held by host" in err


def test_db_upgrade_of_a_current_database_changes_nothing(store: Store, sweep: Sweep) -> None:
    assert "already" in sweep("db", "upgrade")[0]
    found = json.loads(sweep("db", "upgrade", "--json")[0])
    assert found["version_before"] == found["version_after"]


@pytest.fixture
def quick_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and Ray take seconds to import; here they are absent, which doctor has to bear."""
    real = machine_checks.start
    monkeypatch.setattr(
        machine_checks, "start", lambda program: real("raise ImportError('No module named x')")
    )


def test_doctor_says_of_every_check_what_it_found(
    quick_imports: None, store: Store, sweep: Sweep
) -> None:
    out, _ = sweep("doctor", "--json", code=1)
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"] is False
    assert (checks["ray"]["status"], checks["torch"]["status"]) == ("fail", "fail")
    assert "No module named x" in checks["ray"]["found"]
    assert all(
        checks[name]["status"] == "ok"
        for name in ("python", "packages", "database", "ports", "/proc", "clock")
    )
    assert {"gpus", "ray access", "SWEEP_HOME", "open files"} <= checks.keys()
    assert f"schema {SCHEMA_VERSION}" in checks["database"]["found"]


def test_doctor_says_what_ranks_see_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setattr(
        exposure_look, "secrets_of_raylets", lambda: {7: ["AWS_SECRET_ACCESS_KEY", "SWEEP_DB"]}
    )
    own, others = machine_checks.environment("auto")
    assert (
        own.status is Status.OK
        and "HF_TOKEN" in own.found
        and "`ray start` was called" in own.found
    )
    assert (
        others.status is Status.WARN
        and "the Ray of process 7 was started with AWS_SECRET_ACCESS_KEY, SWEEP_DB" in others.found
    )
    assert "env -u AWS_SECRET_ACCESS_KEY -u SWEEP_DB ray start" in others.advice
    assert "canary" not in f"{own} {others}"


def test_doctor_advises_where_the_database_or_the_home_cannot_be_used(
    quick_imports: None, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SWEEP_DB", "postgresql://me:c4nary@127.0.0.1:1/none")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("db.connection.engine.PATIENCE_SECONDS", 0.2)
    out, err = sweep("doctor", code=1)
    assert "c4nary" not in out + err
    assert "fail  database" in out
    assert "fail  SWEEP_HOME" in out
    assert "choose another place" in out


def test_doctor_fails_where_others_can_read_the_cluster_s_token(
    quick_imports: None, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("c4nary" * 8)
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c4nary" * 8)
    found = json.loads(sweep("doctor", "--json", code=1)[0])["checks"]
    # Whatever else runs on this machine is told too.
    checks = [
        check
        for check in found
        if check["name"] == "ray access"
        and ("RAY_AUTH_TOKEN" in check["found"] or str(token) in check["found"])
    ]
    assert [check["status"] for check in checks] == ["fail", "warn"]
    assert f"chmod 600 {token}" in checks[0]["advice"]
    assert "every program started here inherits it" in checks[1]["found"]
    assert "c4nary" not in json.dumps(checks)


def test_doctor_makes_no_database(quick_imports: None, sweep: Sweep, tmp_path: Path) -> None:
    out, _ = sweep("doctor", "--db", f"sqlite:///{tmp_path}/new/sweep.sqlite", code=1)
    assert "created by the first `sweep run`" in out
    assert not (tmp_path / "new").exists()


def test_doctor_says_where_neither_database_nor_home_can_be_made(
    quick_imports: None, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write there by the permissions of the folder, and nobody in fact."""
    monkeypatch.setenv("SWEEP_HOME", "/proc/none/home")
    out, _ = sweep("doctor", "--db", "sqlite:////proc/none/sweep.sqlite", code=1)
    assert "sqlite:////proc/none/sweep.sqlite cannot be created: /proc is not writable" in " ".join(
        out.split()
    )
    assert "fail  SWEEP_HOME" in out


def test_doctor_finds_an_older_schema(
    quick_imports: None, store: Store, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.schema.SCHEMA_VERSION", "9999")
    out, _ = sweep("doctor", code=1)
    assert "this program needs 9999" in out
    assert "sweep db upgrade" in out


def test_a_reader_is_granted_named_and_told_of_without_its_password(
    quick_imports: None,
    postgresql_url: str,
    sweep: Sweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    psycopg = pytest.importorskip("psycopg")
    with Store.open(postgresql_url) as filled:
        Bench.on(filled).measure()
    monkeypatch.setenv("SWEEP_DB", postgresql_url)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    try:
        assert (
            "only this program's own check of each statement keeps it from writing"
            in sweep("doctor", code=1)[0]
        )
        out, err = sweep("db", "grant-reader", "--role", "cli_reader")
        file = tmp_path / "home" / "cli_reader.pgpass"
        password = file.read_text().strip().rpartition(":")[2]
        assert file.stat().st_mode & 0o777 == 0o600
        assert len(password) >= 32
        assert password not in out + err
        assert "Role cli_reader was created: it may connect, and select from " in out
        again = json.loads(sweep("db", "grant-reader", "--role", "cli_reader", "--json")[0])
        assert (again["is_new"], again["password_file"]) == (False, None)
        assert file.read_text().strip().endswith(password)
        assert f"export SWEEP_DB_READER='{again['url']}'" in out
        monkeypatch.setenv("SWEEP_DB_READER", again["url"])
        assert "cli_reader" in sweep("sql", "select session_user, count(*) from v_trial")[0]
        assert (
            "`sweep sql` runs as role cli_reader, which can only select"
            in sweep("doctor", code=1)[0]
        )
    finally:
        with psycopg.connect(postgresql_url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY cli_reader")
            connection.execute("DROP ROLE cli_reader")


def test_doctor_tells_of_a_url_that_cannot_be_read_and_goes_on(
    quick_imports: None, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", "nonsense")
    out, _ = sweep("doctor", code=1)
    assert "the database URL cannot be read" in out
    assert "open files" in out
    monkeypatch.setenv("SWEEP_DB", "postgresql://me@127.0.0.1:1/none")
    monkeypatch.setenv("SWEEP_DB_READER", "nonsense")
    out, _ = sweep("doctor", code=1)
    assert "SWEEP_DB_READER: the database URL cannot be read" in out
    assert "open files" in out


def test_a_sqlite_file_needs_no_reader(quick_imports: None, store: Store, sweep: Sweep) -> None:
    assert "`sweep sql` opens it read-only" in sweep("db", "grant-reader", code=2)[1]
    assert "sql reader" not in sweep("doctor", code=1)[0]
