"""Reading without the right to write: another user's SQLite file, and PostgreSQL with SELECT."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from db.sql import readonly
from db.store import Store
from orchestrator.core.errors import SweepError
from tests.db.builders import Bench

NOBODY = 65534


@pytest.fixture
def foreign_file() -> Iterator[Path]:
    """A store in a folder that others may only read, outside tmp_path, which they cannot enter."""
    with tempfile.TemporaryDirectory(prefix="sweep-foreign-") as name:
        folder = Path(name)
        file = folder / "s.sqlite"
        with Store.open(f"sqlite:///{file}") as store:
            Bench.on(store).measure()
        file.chmod(0o644)
        folder.chmod(0o555)
        yield file
        folder.chmod(0o755)


def as_nobody(file: Path) -> dict[str, object]:
    """The numbers of trials (asked in two ways) and models in a store without write access."""
    inbox, outbox = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_look, args=(f"sqlite:///{file}", outbox), daemon=True
    )
    process.start()
    outbox.close()
    try:
        found: dict[str, object] = inbox.recv()
        return found
    finally:
        process.join(20)


def _look(url: str, outbox: Connection) -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        with Store.open(url, to_read=True) as store:
            sweep = store.sweep_named("tiny")
            trials, status = len(store.trials(sweep.id)), len(store.status(sweep.id))
        (models,) = readonly.query(url, "SELECT count(*) FROM model").rows[0]
        outbox.send({"trials": trials, "cells": status, "models": models})
    except SweepError as exc:
        outbox.send({"refused": str(exc)})


def _written_to(file: Path, *, left: str) -> None:
    """Have a process write a second model and die in the midst of its work."""
    process = os.fork()
    if process == 0:
        connection = sqlite3.connect(file, isolation_level=None)
        connection.execute(_MODEL)
        os._exit(0)
    os.waitpid(process, 0)
    if left == "log":
        Path(f"{file}-shm").unlink()


_MODEL = (
    "INSERT INTO model (digest, name, num_layers, hidden_size, num_attention_heads, "
    "num_key_value_heads, ffn_hidden_size, vocab_size,"
    " tied_embeddings, num_parameters) VALUES ('other', 'other', 1, 1, 1, 1, 1, 1, 0, 1)"
)


def test_a_file_at_rest_is_read(foreign_file: Path) -> None:
    assert as_nobody(foreign_file) == {"trials": 1, "cells": 1, "models": 1}
    assert [path.name for path in foreign_file.parent.iterdir()] == ["s.sqlite"]


def test_what_a_running_writer_has_written_is_seen(foreign_file: Path) -> None:
    foreign_file.parent.chmod(0o755)
    connection = sqlite3.connect(foreign_file, isolation_level=None)
    connection.execute(_MODEL)
    foreign_file.parent.chmod(0o555)
    assert as_nobody(foreign_file) == {"trials": 1, "cells": 1, "models": 2}
    connection.close()


@pytest.mark.parametrize("left", ["log and shared memory", "log"])
def test_what_a_dead_writer_left_in_its_log_is_seen(foreign_file: Path, left: str) -> None:
    foreign_file.parent.chmod(0o755)
    _written_to(foreign_file, left=left)
    foreign_file.parent.chmod(0o555)
    files = sorted(foreign_file.parent.iterdir())
    copies = set(Path(tempfile.gettempdir()).glob("sweep-copy-*"))
    assert as_nobody(foreign_file) == {"trials": 1, "cells": 1, "models": 2}
    assert sorted(foreign_file.parent.iterdir()) == files
    assert set(Path(tempfile.gettempdir()).glob("sweep-copy-*")) <= copies


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk that is then full")
@pytest.mark.parametrize("left", ["nothing", "empty files", "log"])
def test_a_store_on_a_full_disk_is_read(tmp_path: Path, left: str) -> None:
    file = tmp_path / "s.sqlite"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with Store.open(f"sqlite:///{file}") as store:
            Bench.on(store).measure()
        if left == "log":
            _written_to(file, left=left)
        # What is tried in vain on a full disk leaves these.
        for end in ("-wal", "-shm") if left == "empty files" else ():
            Path(f"{file}{end}").touch()
        with suppress(OSError), (tmp_path / "fill").open("wb", buffering=0) as fill:
            while fill.write(bytes(512)):
                pass
        for _ in range(2):
            with Store.open(f"sqlite:///{file}", to_read=True) as store:
                assert len(store.trials(store.sweep_named("tiny").id)) == 1
            (models,) = readonly.query(f"sqlite:///{file}", "SELECT count(*) FROM model").rows[0]
            assert models == (2 if left == "log" else 1)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become somebody who may not read the file"
)
def test_a_file_that_may_not_be_read_is_said_in_one_line(foreign_file: Path) -> None:
    foreign_file.chmod(0o600)
    message = str(as_nobody(foreign_file).get("refused", "it was read"))
    assert "s.sqlite is not yours to read" in message
    assert "\n" not in message


def test_looking_at_an_empty_server_makes_nothing(postgresql_url: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    with pytest.raises(SweepError, match="there is no store at"):
        Store.open(postgresql_url, to_read=True)
    with psycopg.connect(postgresql_url) as connection:
        assert connection.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        ).fetchone() == (0,)


def test_a_role_that_may_only_select_reads_all_and_writes_nothing(postgresql_url: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    with Store.open(postgresql_url) as store:
        bench = Bench.on(store)
        trial_id = bench.measure()
    url = postgresql_url.replace("//postgres:@", "//select_only@")
    with psycopg.connect(postgresql_url, autocommit=True) as server:
        server.execute("CREATE ROLE select_only LOGIN")
        server.execute("GRANT USAGE ON SCHEMA public TO select_only")
        server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO select_only")
        try:
            with Store.open(url, to_read=True) as store:
                sweep = store.sweep_named("tiny")
                assert [one.id for one in store.trials(sweep.id)] == [trial_id]
                assert len(store.status(sweep.id)) == 1
                assert store.trial(trial_id).trial.state == "measured"
                assert store.best(sweep.id)[bench.cell_id][0].id == trial_id
            assert readonly.query(url, "SELECT count(*) FROM v_trial").rows == [(1,)]
            with pytest.raises(SweepError, match="GRANT"), Store.open(url) as store:
                Bench.on(store).measure()
        finally:
            server.execute("DROP OWNED BY select_only")
            server.execute("DROP ROLE select_only")
