"""`sweep db grant-reader` creates a role that can only read, and shows no password."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from db.store import Store
from tests.cli.conftest import Sweep
from tests.db.builders import Bench

psycopg = pytest.importorskip("psycopg")


@pytest.fixture
def server(
    quick_imports: None, postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psycopg.Connection]:
    """The server's keeper, with a store of one trial that the command uses."""
    with Store.open(postgresql_url) as filled:
        Bench.on(filled).measure()
    monkeypatch.setenv("SWEEP_DB", postgresql_url)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


def test_a_reader_is_granted_named_and_told_of_without_its_password(
    server: psycopg.Connection, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        server.execute("DROP OWNED BY cli_reader")
        server.execute("DROP ROLE cli_reader")


def test_a_reader_that_nobody_logs_in_as_is_to_be_named(
    server: psycopg.Connection, sweep: Sweep
) -> None:
    sweep("db", "grant-reader")
    try:
        told = sweep("doctor", code=1)[0]
        assert "`sweep sql` logs in as postgres and then sets role sweep_reader" in told
        assert "put the URL of sweep_reader into SWEEP_DB_READER" in told
        assert "have a role created" not in told
    finally:
        server.execute("DROP OWNED BY sweep_reader")
        server.execute("DROP ROLE sweep_reader")


def test_a_sqlite_file_needs_no_reader(quick_imports: None, store: Store, sweep: Sweep) -> None:
    assert "`sweep sql` opens it read-only" in sweep("db", "grant-reader", code=2)[1]
    assert "sql reader" not in sweep("doctor", code=1)[0]
