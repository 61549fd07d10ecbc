"""When the database cannot be reached, read or written: one clear line, no secret, nothing lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from db.connection import url as urls
from db.connection.engine import Change, Database
from db.sql import readonly
from db.store import Store
from db.write import changes
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from tests.db.builders import (
    CONDITIONS,
    Bench,
    begin_trial,
    failure,
    fingerprint,
    layout,
    losing_answers,
    measurement,
    record_failure,
    record_measurement,
)

SECRET = "s3cr3t%zz"


def refusal(url: str) -> str:
    with pytest.raises(SweepError) as caught:
        Store.open(url)
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "cannot be read. It should look like sqlite:///"),
        ("mysql://u@h/d", "'mysql' is not supported. Use sqlite:///"),
        ("sqlite://", "a SQLite store is a plain file"),
        ("sqlite:///:memory:", "a SQLite store is a plain file"),
        ("sqlite:////tmp/x.sqlite?mode=ro", "option 'mode' is unknown"),
        ("postgresql://u@127.0.0.1:1/d", "refused"),
        ("postgresql://u@no-such-host.invalid/d", "no-such-host.invalid"),
    ],
)
def test_a_url_that_leads_nowhere_gets_one_line(url: str, says: str) -> None:
    assert says in refusal(url)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{SECRET}@127.0.0.1:1/d",
        f"postgres://user:{SECRET}@no-such-host.invalid/d",
        f"postgresql://127.0.0.1:1/d?user=u&password={SECRET}",
        f"postgresql://user:{SECRET}@127.0.0.1:notaport/d",
        f"mysql://user:{SECRET}@h/d",
        f"user:{SECRET}@h/d",
        f"sqlite://user:{SECRET}@h/d",
    ],
)
def test_no_password_is_ever_shown(
    url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for ask in (Store.open, lambda u: readonly.query(u, "SELECT 1")):
        # Whichever it is, it must keep the secret.
        with pytest.raises(Exception) as caught:
            ask(url)
        shown = f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
        assert "s3cr3t" not in shown
    assert "s3cr3t" not in caplog.text
    assert "s3cr3t" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("text", "password", "host"),
    [
        ("postgresql://u:p@ss@127.0.0.1:1/d", "p@ss", "127.0.0.1"),
        ("postgresql://u:p@s@s@host/d", "p@s@s", "host"),
        ("postgresql://u:p%40ss@host/d", "p@ss", "host"),
        ("postgresql://u:p/q:r?s@host/d", "p/q:r?s", "host"),
        ("postgresql://u:p@[::1]:5432/d", "p", "::1"),
    ],
)
def test_an_at_sign_in_a_password_is_no_part_of_the_host(
    text: str, password: str, host: str
) -> None:
    url = urls.resolve(text)
    assert (url.password, url.host) == (password, host)
    assert "ss@" not in urls.display(url)


def test_a_path_that_is_given_for_a_url_is_told_as_one(tmp_path: Path) -> None:
    """It holds no password: those of URLs follow a colon."""
    with pytest.raises(UsageInvalid) as caught:
        urls.resolve("trials.db")
    assert f"for the file 'trials.db' it is sqlite:///{tmp_path}/trials.db" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["postgresql://u:p@s/cret@host/d", "postgresql://u:p@h:s/cret@host/d"]
)
def test_a_url_whose_password_has_no_clear_end_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(SweepError, match="write @ as %40") as caught:
        urls.resolve(text)
    assert "cret" not in str(caught.value)


def test_a_password_of_one_letter_leaves_the_words_of_a_message_alone() -> None:
    message = refusal("postgresql://u:e@127.0.0.1:1/d")
    assert "***" not in message and "Connection refused" in message


def test_a_driver_that_echoes_a_malformed_password_is_not_repeated() -> None:
    url = urls.resolve("postgresql://u:s3cr3t%25@h/d?sslpassword=t0ps3cret")
    assert (
        urls.redact('invalid percent-encoded token: "s3cr3t%" t0ps3cret', url)
        == 'invalid percent-encoded token: "***" ***'
    )


def test_a_wrong_database_is_said_with_how_to_have_it_made(postgresql_server: str) -> None:
    message = refusal(postgresql_server.replace("/postgres?", "/no_such_database?"))
    assert 'database "no_such_database" does not exist' in message
    assert message.endswith("have it made on the server: createdb")


def test_a_wrong_user_is_said_with_how_to_have_it_made(postgresql_server: str) -> None:
    message = refusal(postgresql_server.replace("//postgres:", "//nobody_here:"))
    assert "nobody_here" in message
    assert message.endswith("have it made on the server: createuser")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("FATAL:  the database system is starting up", "the same command again in a moment"),
        ("FATAL:  the database system is in recovery mode", "the same command again in a moment"),
        (
            'FATAL:  too many connections for database "sweeps"',
            "raise max_connections on the server",
        ),
        ('FATAL:  too many connections for role "me"', "raise max_connections on the server"),
        (
            'FATAL:  permission denied for database "sweeps"',
            "Role me lacks CONNECT on database sweeps: GRANT CONNECT ON DATABASE sweeps TO me",
        ),
        (
            'FATAL:  role "me" is not permitted to log in',
            "Role me lacks LOGIN: ALTER ROLE me LOGIN",
        ),
        ("FATAL:  remaining slots are for others", ""),
    ],
)
def test_a_server_that_refuses_is_not_told_to_make_what_it_has(said: str, advice: str) -> None:
    database = Database(urls.resolve("postgresql://me@db.example/sweeps"))
    message = database._explain(OperationalError("", None, Exception(said)))
    assert message == (f"{said}. {message.removeprefix(said + '. ')}" if advice else said)
    assert message.endswith(advice)


def test_a_server_that_does_not_run_is_said_with_what_to_look_at() -> None:
    pytest.importorskip("psycopg")
    message = refusal("postgresql://u@127.0.0.1:1/d")
    assert message.endswith("Is PostgreSQL running there, and are host and port of the URL right?")


def test_a_missing_driver_is_said_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "pip install '.[postgres]' in the cloned folder" in refusal(
        "postgresql://u@127.0.0.1:1/d"
    )


def test_postgres_urls_of_every_spelling_are_understood() -> None:
    for text in ("postgres://u@h/d", "postgresql://u@h/d", "postgresql+psycopg://u@h/d"):
        assert urls.resolve(text).drivername == "postgresql+psycopg"


def test_without_a_url_the_environment_decides_and_then_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWEEP_DB", raising=False)
    with Store.open(None) as store:
        assert store.path == tmp_path / ".sweep" / "sweep.sqlite"
    monkeypatch.setenv("SWEEP_DB", "sqlite:///other/place.sqlite")
    with Store.open(None) as store:
        assert store.path == tmp_path / "other" / "place.sqlite"
        assert store.url == f"sqlite:///{tmp_path}/other/place.sqlite"


def test_a_file_that_is_no_database_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "notes.sqlite"
    file.write_text("these are my notes, not a database\n" * 100)
    for to_read in (False, True):
        with pytest.raises(UsageInvalid, match="is not a SQLite database: name another") as refused:
            Store.open(f"sqlite:///{file}", to_read=to_read)
        assert str(file) in str(refused.value)
    assert file.read_text().startswith("these are my notes")


def test_a_damaged_file_is_said_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.sqlite"
    with Store.open(url) as store:
        bench = Bench.on(store)
        for size in range(1, 60):
            bench.measure(size)
    content = bytearray((tmp_path / "s.sqlite").read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    (tmp_path / "s.sqlite").write_bytes(content)
    with (
        pytest.raises(StoreUnavailable, match=r"is damaged|not a SQLite database"),
        Store.open(url) as store,
    ):
        store.trials(1)


@pytest.mark.parametrize("magic", urls.NETWORK_FILE_SYSTEMS)
def test_sqlite_on_a_file_system_that_hosts_share_is_refused_unless_asked_for(
    magic: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "file_system_magic", lambda folder: magic)
    message = refusal(f"sqlite:///{tmp_path}/new/s.sqlite")
    assert f"lies on {urls.NETWORK_FILE_SYSTEMS[magic]}" in message
    assert "use PostgreSQL" in message
    assert not (tmp_path / "new").exists()
    with Store.open(f"sqlite:///{tmp_path}/new/s.sqlite?unsafe=1") as store:
        Bench.on(store).measure()
    assert not list((tmp_path / "new").glob("*-wal"))


def test_the_kernel_tells_what_file_system_a_folder_is_on() -> None:
    assert urls.file_system_magic(Path("/proc")) == 0x9FA0  # PROC_SUPER_MAGIC


def _in_child(work: Callable[..., None], *arguments: object) -> str:
    """What a forked child sends: its limits and user are its own."""
    inbox, outbox = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=work, args=(*arguments, outbox), daemon=True
    )
    process.start()
    outbox.close()
    try:
        return str(inbox.recv())
    finally:
        process.join(20)
        assert process.exitcode == 0


def _open_as_nobody(url: str, outbox: Connection) -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        Store.open(url).ensure_sweep("a", "{}", {})
        outbox.send("written")
    except StoreUnavailable as exc:
        outbox.send(str(exc))


def test_of_a_path_only_the_last_folder_is_created(tmp_path: Path) -> None:
    """The default is `.sweep` in a folder that exists; a mistyped path makes no new store."""
    with Store.open(f"sqlite:///{tmp_path}/new/s.sqlite"):
        assert (tmp_path / "new" / "s.sqlite").is_file()
    with pytest.raises(UsageInvalid, match=f"there is no folder {tmp_path}/none") as refused:
        Store.open(f"sqlite:///{tmp_path}/none/such/s.sqlite")
    assert str(refused.value).endswith(f"mkdir -p {tmp_path}/none/such")
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_said_in_one_line() -> None:
    # Not below tmp_path, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="sweep-read-only-"))
    try:
        Store.open(f"sqlite:///{folder}/s.sqlite").close()
        folder.chmod(0o555)
        (folder / "s.sqlite").chmod(0o444)
        for url in (
            f"sqlite:///{folder}/s.sqlite",
            f"sqlite:///{folder}/new.sqlite",
            f"sqlite:///{folder}/new/s.sqlite",
        ):
            message = _in_child(_open_as_nobody, url)
            assert "SWEEP_DB" in message, message
            assert "\n" not in message
    finally:
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_a_store_on_a_read_only_file_system_is_refused_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLite cannot open a folder either.
    database = Database(sa.make_url(f"sqlite:///{tmp_path}"))
    with pytest.raises(StoreUnavailable, match="does not exist or is not yours to write"):
        database.read(lambda _: None)
    mounted = SimpleNamespace(f_flag=os.statvfs(tmp_path).f_flag | os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _: mounted)
    with pytest.raises(StoreUnavailable, match="is on a read-only file system"):
        database.read(lambda _: None)


def _fill_the_disk(url: str, outbox: Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    acked = []
    with Store.open(url) as store:
        bench = Bench.on(store)
        size = Path(store.path or "").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 200_000, size + 200_000))
        try:
            for number in range(1, 100_000):
                acked.append(bench.measure(number))
        except StoreUnavailable as exc:
            outbox.send((acked, str(exc)))


def test_a_full_disk_is_said_in_one_line_and_loses_nothing(sqlite_url: str) -> None:
    Store.open(sqlite_url).close()
    inbox, outbox = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_fill_the_disk, args=(sqlite_url, outbox), daemon=True
    )
    process.start()
    assert inbox.poll(30)
    acked, message = inbox.recv()
    process.join(10)
    assert "Free some space, then run the same command: nothing acknowledged is lost" in message
    assert "\n" not in message
    with Store.open(sqlite_url) as store:
        measured = {
            row.id
            for row in store.trials(store.sweep_named("tiny").id)
            if row.state is TrialState.MEASURED
        }
        assert acked
        assert set(acked) <= measured
        assert Bench.on(store).measure(200_000)


def test_a_reader_with_an_old_snapshot_does_not_hold_up_writers(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)
        reader = sqlite3.connect(store.path or "", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM trial").fetchall()
        for size in range(1, 20):
            bench.measure(size)
        assert reader.execute("SELECT count(*) FROM trial").fetchone() == (0,)
        reader.close()
        assert len(store.trials(bench.sweep_id)) == 19


def test_connections_that_the_server_ends_cost_a_retry_and_nothing_else(
    postgresql_url: str,
) -> None:
    import psycopg

    with (
        Store.open(postgresql_url) as store,
        psycopg.connect(postgresql_url, autocommit=True) as killer,
    ):
        bench = Bench.on(store)
        over = threading.Event()
        num_ended = 0

        def end_connections() -> None:
            nonlocal num_ended
            while not over.wait(random.uniform(0.05, 0.15)):
                num_ended += killer.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                    "application_name = 'layout-sweep' AND datname = current_database()"
                ).rowcount

        thread = threading.Thread(target=end_connections)
        thread.start()
        ids: list[int] = []
        # A fast store is done before much has happened to it.
        while len(ids) < 25 or (num_ended < 3 and len(ids) < 2000):
            trial_id, attempt = begin_trial(
                store, bench.cell_id, layout(len(ids) + 1), epoch=bench.epoch
            )
            record_measurement(
                store,
                trial_id,
                attempt,
                epoch=bench.epoch,
                measurement=measurement(),
                fingerprint=fingerprint(),
            )
            ids.append(trial_id)
        over.set()
        thread.join()
        assert num_ended >= 3
        rows = store.trials(bench.sweep_id)
        assert [row.id for row in rows] == ids
        assert all(row.state is TrialState.MEASURED and row.num_attempts == 1 for row in rows)
        assert len(store.events(bench.sweep_id)) == 4 * len(ids)


def test_a_commit_whose_answer_is_lost_is_not_done_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's error comes after the commit, so that the write is tried again."""
    bench = Bench.on(store)
    monkeypatch.setattr(Database, "write", losing_answers(Database.write))
    assert (
        store.acquire(bench.sweep_id, host="again", pid=1) == bench.epoch + 2
    )  # our own lease, found again
    again = Bench(store, bench.sweep_id, bench.cell_id, bench.epoch + 2)
    trial_id = again.measure()
    again.prune([7], condemned_by=trial_id)
    assert [e.event for e in store.events(bench.sweep_id)] == [
        "added",
        "gang_placed",
        "first_step",
        "measured",
        "added",
        "pruned",
    ]
    _, attempt = begin_trial(store, bench.cell_id, layout(8), epoch=again.epoch)
    assert attempt == 1
    assert [e.event for e in store.events(bench.sweep_id)][6:] == ["added", "gang_placed"]
    assert store.ensure_sweep("tiny", "{}", CONDITIONS) == bench.sweep_id


def test_a_trial_whose_first_try_was_rolled_back_is_begun_by_the_second(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deadlock(Exception):
        sqlstate = "40P01"

    bench = Bench.on(store)
    begin, tries = changes.begin, 0

    def rolled_back_once(*args: Any, **kwargs: Any) -> list[tuple[int, int]]:
        nonlocal tries
        begun = begin(*args, **kwargs)
        tries += 1
        if tries == 1:
            raise OperationalError("INSERT", {}, Deadlock())
        return begun

    monkeypatch.setattr(changes, "begin", rolled_back_once)
    trial_id, attempt = begin_trial(store, bench.cell_id, layout(2), epoch=bench.epoch)
    assert (tries, attempt) == (2, 1)
    assert [(e.event, e.attempt) for e in store.events(bench.sweep_id)] == [
        ("added", None),
        ("gang_placed", 1),
    ]
    assert store.trial(trial_id).trial.num_attempts == 1


def test_an_orchestrator_that_sleeps_within_a_transaction_does_not_keep_its_successor_out(
    postgresql_url: str,
) -> None:
    with Store.open(postgresql_url) as store:
        asked = store._database.read(
            lambda connection: connection.exec_driver_sql(
                "SHOW idle_in_transaction_session_timeout"
            ).scalar_one()
        )
    # By then the server lets go of the sweep's row; a take-over is promised within 30 s.
    assert asked == "20s"


def test_a_deadlock_or_a_serialization_failure_is_tried_again(postgresql_url: str) -> None:
    class Deadlock(Exception):
        sqlstate = "40P01"

    with Store.open(postgresql_url) as store:
        tries = []

        def work(connection: sa.Connection, change: Change) -> str:
            tries.append(change)
            if len(tries) < 4:
                raise OperationalError("UPDATE", {}, Deadlock())
            return "done"

        assert store._database.write(work) == "done"
        assert [c.is_retry for c in tries] == [False, True, True, True]
        assert len({c.id for c in tries}) == 1


def test_a_result_is_flushed_to_disk_and_the_rest_is_not(sqlite_url: str) -> None:
    # Values of PRAGMA synchronous: only FULL flushes a commit in the journal before it returns.
    normal, full = (
        1,
        2,
    )
    seen: list[int] = []
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)

        @sa.event.listens_for(store._database.engine, "commit")
        def ask(connection: sa.Connection) -> None:
            seen.append(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())

        (measured, first), (failed, second) = bench.start(1), bench.start(2)
        assert seen == [normal] * 2
        record_measurement(store, measured, first, epoch=bench.epoch, measurement=measurement())
        record_failure(
            store,
            failed,
            second,
            epoch=bench.epoch,
            failure=failure(),
            event=TrialEvent.OUT_OF_MEMORY,
        )
        bench.prune([3])
    assert seen[2:] == [full, full, normal]


def test_writers_wait_for_each_other(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)
        other = sqlite3.connect(store.path or "", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.3, lambda: other.execute("ROLLBACK")).start()
        before = time.monotonic()
        bench.add()
        assert time.monotonic() - before >= 0.2
        other.close()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("deleted", "was deleted while it was in use"),
        ("replaced", "was replaced by another file while it was in use"),
    ],
)
def test_a_file_that_is_another_than_the_one_that_was_opened_takes_no_result(
    sqlite_url: str, what: str, says: str
) -> None:
    with Store.open(sqlite_url) as store:
        bench = Bench.on(store)
        bench.measure()
        file = store.path
        assert file is not None
        copy = file.with_name("copy")
        with sqlite3.connect(file) as source, sqlite3.connect(copy) as target:
            source.backup(target)
        target.close()
        source.close()
        trial_id, attempt = bench.start(2)
        file.unlink()
        if what == "replaced":
            copy.rename(file)
        for write in (
            lambda: store.renew(bench.sweep_id, bench.epoch),
            lambda: record_measurement(
                store, trial_id, attempt, epoch=bench.epoch, measurement=measurement()
            ),
        ):
            with pytest.raises(StoreUnavailable, match=says) as caught:
                write()
            assert "\n" not in str(caught.value)
