"""Anybody's SQL cannot change or create anything, on either database, as a superuser too."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from db.schema import VIEWS
from db.sql import bounded_answer, readonly
from db.sql.bounded_answer import Bounds
from db.sql.sql_text import NamesInStatement
from db.store import Store
from orchestrator.core.errors import StoreUnavailable, UsageInvalid
from tests.db.builders import Bench

# {out} is a file that no attack may make.
ATTACKS = (
    "DELETE FROM trial",
    "UPDATE trial SET state = 'measured'",
    "INSERT INTO model (digest, name) VALUES ('x', 'y')",
    "DROP TABLE measurement",
    "DROP VIEW v_best",
    "CREATE TABLE evil (a int)",
    "CREATE TEMP TABLE evil (a int)",
    "CREATE VIEW evil AS SELECT 1",
    "CREATE INDEX evil ON trial (why)",
    "ALTER TABLE trial ADD COLUMN evil int",
    "TRUNCATE trial",
    "WITH gone AS (DELETE FROM trial RETURNING id) SELECT * FROM gone",
    "SELECT 1; DELETE FROM trial",
    "SELECT 1; COMMIT; DELETE FROM trial",
    "COMMIT; DELETE FROM trial",
    "ROLLBACK; DELETE FROM trial; COMMIT",
    "SET TRANSACTION READ WRITE; DELETE FROM trial",
    "BEGIN; DELETE FROM trial; COMMIT",
    "/* harmless */ DELETE FROM trial",
    "-- harmless\nDELETE FROM trial",
    "EXPLAIN ANALYZE DELETE FROM trial",
    "SELECT * INTO evil FROM trial",
    "REPLACE INTO model (digest) VALUES ('x')",
    "VACUUM",
    "VACUUM INTO '{out}'",
    "ATTACH DATABASE '{out}' AS evil",
    "ATTACH '{out}' AS evil; CREATE TABLE evil.t (a)",
    "DETACH main",
    "PRAGMA query_only = 0",
    "PRAGMA query_only(0)",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA user_version = 7",
    "PRAGMA writable_schema = 1",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "PRAGMA temp_store_directory = '/tmp'",
    "SELECT load_extension('/tmp/evil.so')",
    "SELECT writefile('{out}', 'x')",
    "SELECT edit('x', 'touch {out}')",
    "SELECT fts3_tokenizer('simple')",
    "REINDEX",
    "ANALYZE",
    "SAVEPOINT evil",
    "COPY trial TO '{out}'",
    "COPY (SELECT 1) TO PROGRAM 'touch {out}'",
    "COPY trial FROM PROGRAM 'touch {out}'",
    "SELECT pg_read_file('/etc/passwd')",
    "SELECT pg_catalog.pg_read_file('/etc/passwd')",
    "SELECT \"pg_read_file\"('/etc/passwd')",
    "SELECT pg_read_file/* hidden */('/etc/passwd')",
    "SELECT U&\"\\0070g_read_file\"('/etc/passwd')",
    "SELECT pg_ls_dir('/')",
    "SELECT lo_export(lo_creat(-1), '{out}')",
    "SELECT lo_from_bytea(0, 'x')",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity",
    "SELECT pg_reload_conf()",
    "SELECT rolpassword FROM pg_authid",
    "SELECT set_config('transaction_read_only', 'off', false)",
    "SELECT set_config('role', 'none', false), query_to_xml('delete from trial', true, true, '')",
    "SELECT query_to_xml('reset role; copy (select 1) to program ''touch {out}''', true, true, '')",
    "SELECT 1 AS a, database_to_xml(true, true, '')",
    "SELECT dblink('', 'delete from trial')",
    "SELECT nextval('trial_id_seq')",
    "SELECT setval('trial_id_seq', 1)",
    "SELECT pg_advisory_lock(1)",
    "SELECT ts_stat('delete from trial')",
    "SELECT E'\\'', query_to_xml('x', true, true, '') --'",
    "SELECT $a$'$a$, query_to_xml('delete from trial', true, true, '') --'",
    "SELECT /* /* */ */ query_to_xml('delete from trial', true, true, '')",
    "RESET ROLE",
    "SET ROLE postgres",
    "SET SESSION AUTHORIZATION postgres",
    "SET default_transaction_read_only = off",
    "CREATE ROLE evil SUPERUSER",
    "ALTER ROLE postgres PASSWORD 'evil'",
    "ALTER SYSTEM SET fsync = off",
    "GRANT ALL ON trial TO public",
    "DO $$ BEGIN EXECUTE 'delete from trial'; END $$",
    "CALL evil()",
    "PREPARE evil AS DELETE FROM trial",
    "EXECUTE evil",
    "DECLARE evil CURSOR WITH HOLD FOR SELECT 1",
    "LOCK TABLE trial",
    "SELECT * FROM trial FOR UPDATE",
    "NOTIFY evil",
    "LISTEN evil",
    "LOAD '/tmp/evil.so'",
    "CREATE EXTENSION dblink",
    "CREATE FUNCTION evil() RETURNS int LANGUAGE sql AS 'delete from trial returning 1'",
    "IMPORT FOREIGN SCHEMA public FROM SERVER x INTO public",
    "SELECT 1 \0; DELETE FROM trial",
    "",
    ";",
    "-- nothing",
)


def contents(url: str) -> str:
    """A digest of all that an attack could change, on a server also roles and settings."""
    if url.startswith("sqlite"):
        import sqlite3

        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            return _digest(list(connection.iterdump()))
    import psycopg

    with psycopg.connect(url) as connection:
        tables = (
            "sweep",
            "model",
            "cell",
            "trial",
            "attempt",
            "measurement",
            "fingerprint",
            "event",
            "pg_roles",
            "trial_id_seq",
        )
        rows: list[Any] = [
            connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables
        ]  # type: ignore[call-overload]
        rows.append(
            connection.execute(
                "SELECT relname, relkind, relacl FROM pg_class ORDER BY 1, 2"
            ).fetchall()
        )
        rows.append(
            connection.execute("SELECT name, setting FROM pg_file_settings ORDER BY 1").fetchall()
        )
        rows.append(connection.execute("SELECT count(*) FROM pg_largeobject_metadata").fetchall())
        return _digest(rows)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def test_no_attack_changes_or_creates_anything(store_url: str, tmp_path: Path) -> None:
    with Store.open(store_url) as store:
        Bench.on(store).measure()
    assert len(set(ATTACKS)) >= 60
    # A folder that a server's own user may write to.
    out = Path("/tmp") / f"{tmp_path.name}-attack"
    before, files = contents(store_url), sorted(tmp_path.rglob("*"))
    refusals = []
    for attack in ATTACKS:
        try:
            readonly.query(store_url, attack.replace("{out}", str(out)))
        except UsageInvalid as exc:
            refusals.append(str(exc))
        assert not out.exists(), attack
    assert not [text for text in refusals if "\n" in text]
    assert contents(store_url) == before
    assert [f for f in sorted(tmp_path.rglob("*")) if not f.name.endswith(("-wal", "-shm"))] == [
        f for f in files if not f.name.endswith(("-wal", "-shm"))
    ]
    # Explaining a write, without doing it, is all that may be answered.
    assert len(refusals) >= len(ATTACKS) - 1


@pytest.mark.long
def test_a_lexer_that_is_fooled_is_not_the_only_guard(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(postgresql_url) as store:
        Bench.on(store).measure()
    monkeypatch.setattr(
        readonly,
        "refuse_beyond_reading",
        lambda sql: NamesInStatement(all=frozenset(), before_parenthesis=frozenset()),
    )
    before = contents(postgresql_url)
    for attack in ATTACKS:
        if "query_to_xml('reset role" not in attack and "ts_stat" not in attack:
            try:
                readonly.query(
                    postgresql_url,
                    attack.replace("{out}", "/tmp/must-not-appear"),
                    timeout_seconds=2,
                )
            except UsageInvalid:
                pass
    assert contents(postgresql_url) == before
    assert not Path("/tmp/must-not-appear").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*), avg(num_attempts), coalesce(max(why), '-') FROM trial",
        "select layout, round(tokens_per_second_per_gpu) as r from v_trial where state in "
        "('measured') order by r desc limit 3;",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5) SELECT "
        "sum(i) FROM n",
        "SELECT row_number() OVER (PARTITION BY cell ORDER BY trial_id) FROM v_trial",
        "SELECT 'it''s; DELETE FROM trial -- (' AS text /* comment; with pg_read_file( */",
        "SELECT CAST(num_gpus AS numeric(10, 2)) FROM v_best WHERE is_current AND (num_gpus > 1 "
        "OR (mfu > 0.1))",
        "EXPLAIN SELECT 1",
        "VALUES (1, 2), (3, 4)",
    ],
)
def test_an_ordinary_question_is_answered(store: Store, store_url: str, sql: str) -> None:
    Bench.on(store).measure()
    assert readonly.query(store_url, sql).rows


def test_every_view_can_be_read_and_has_columns_even_when_empty(
    store: Store, store_url: str
) -> None:
    for view in VIEWS:
        result = readonly.query(store_url, f"SELECT * FROM {view}")
        assert result.rows == []
        assert "sweep" in result.columns


def test_the_columns_of_a_table_can_be_asked_for_on_sqlite(sqlite_url: str) -> None:
    Store.open(sqlite_url).close()
    assert len(readonly.query(sqlite_url, "PRAGMA table_info(trial)").rows) > 20


def test_a_long_answer_is_cut_and_says_so(store: Store, store_url: str) -> None:
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) "
        "SELECT i FROM n"
    )
    result = readonly.query(store_url, endless, max_rows=10)
    assert (len(result.rows), result.truncated) == (10, True)
    assert not readonly.query(store_url, "SELECT 1", max_rows=1).truncated


def test_a_question_without_end_is_ended(store: Store, store_url: str) -> None:
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 - 1 FROM n) SELECT count(*) FROM n"
    )
    with pytest.raises(UsageInvalid, match="longer than"):
        readonly.query(store_url, endless, timeout_seconds=0.3)


def test_asking_a_store_that_is_not_there_makes_none(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="there is no store at"):
        readonly.query(f"sqlite:///{tmp_path}/none.sqlite", "SELECT 1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT * FROM v_bst", "did you mean v_best?"),
        ("SELECT * FROM trails", "did you mean trial?"),
        ("SELECT * FROM nothing_like_it", "there are v_trial, "),
        ("SELECT mfuu FROM v_trial", "did you mean mfu?"),
        ("SELECT t.tokens_per_sec FROM v_best AS t", "did you mean tokens_per_second"),
        ("SELECT failure_evidence FROM v_best", "it is a column of attempt, v_failure"),
        ("SELECT zzzzzz FROM v_best", "`sweep sql --schema` shows the columns"),
        ("SELECT maxx(mfu) FROM v_best", "did you mean max?"),
        ("SELECT mfu FROM v_best GROUP", "syntax"),
        ("SELECT 1 FROM v_best WHERE", ""),
    ],
)
def test_a_mistake_is_said_as_the_database_says_it_with_what_was_meant(
    store: Store, store_url: str, sql: str, said: str
) -> None:
    with pytest.raises(UsageInvalid) as caught:
        readonly.query(store_url, sql)
    message = str(caught.value)
    assert message.startswith(
        ("the query cannot be answered: ", "function maxx cannot be called here")
    )
    assert said in message or (said == "syntax" and "incomplete input" in message)
    assert "only reading" not in message.lower()
    assert "ERROR" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM trial",
        "SELECT 1; SELECT 2",
        "WITH x AS (DELETE FROM trial RETURNING 1) SELECT 1",
    ],
)
def test_what_would_do_more_than_read_is_refused_as_that(sqlite_url: str, sql: str) -> None:
    Store.open(sqlite_url).close()
    with pytest.raises(UsageInvalid, match=r"refused|cannot be answered: near"):
        readonly.query(sqlite_url, sql)


def test_a_database_without_our_views_is_told_apart_from_a_misspelt_one(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(UsageInvalid, match="no such table: v_best"):
        readonly.query(f"sqlite:///{tmp_path}/other.sqlite", "SELECT * FROM v_best")


COUNTED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "
SMALL = partial(Bounds, answer_bytes=32 << 20, memory_bytes=256 << 20)
# Each is more than one of these bounds: of a value, of the answer, of the memory of who fetches it.
TOO_LARGE = {
    "sqlite": (
        ("SELECT zeroblob(2000000000)", "not authorized"),
        (
            COUNTED.format(60) + "SELECT group_concat(printf('%*d', 6000000, i)) FROM n",
            "a value of the answer is larger than 64 MiB",
        ),
        (
            "SELECT " + ", ".join(f"printf('%*d', 6000000, {i})" for i in range(60)),
            "needs more than 256 MiB of memory",
        ),
        (
            COUNTED.format(60) + "SELECT printf('%*d', 1000000, i) FROM n",
            "after 34 rows the answer is larger than 32 MiB",
        ),
    ),
    "postgresql": (
        (
            "SELECT repeat('x', 1000000) FROM generate_series(1, 60)",
            "after 34 rows the answer is larger than 32 MiB",
        ),
        ("SELECT repeat('x', 300000000)", "the answer is too large"),
        ("SELECT lpad('x', 2000000000)", "the answer is too large"),
    ),
}


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_an_answer_that_is_too_large_is_refused_and_never_held(
    database: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue(f"{database}_url")
    Store.open(url).close()
    monkeypatch.setattr(readonly, "Bounds", SMALL)
    for sql, says in TOO_LARGE[database]:
        with pytest.raises(UsageInvalid, match=says) as caught:
            readonly.query(url, sql, timeout_seconds=60)
        assert "\n" not in str(caught.value)


def test_a_call_that_cannot_be_interrupted_is_ended_with_its_process(sqlite_url: str) -> None:
    Store.open(sqlite_url).close()
    # instr() searches a long text in a longer one for minutes, and cannot be interrupted.
    endless = (
        "SELECT instr(replace(printf('%*d', 30000000, 1), ' ', 'a'),"
        " replace(printf('%*d', 15000000, 1), ' ', 'a') || 'b')"
    )
    began = time.monotonic()
    with pytest.raises(UsageInvalid, match=r"longer than 0\.5 s"):
        readonly.query(sqlite_url, endless, timeout_seconds=0.5)
    assert time.monotonic() - began < 10
    assert _no_child_is_dead()


def test_what_an_answer_needed_is_cleared_up_before_its_process_is_killed(tmp_path: Path) -> None:
    def ask() -> Generator[list[object], None, None]:
        try:
            yield ["n"]
            yield from ([n, "x" * 100] for n in range(10))
        finally:
            time.sleep(0.1)
            (tmp_path / "cleared").touch()

    assert bounded_answer.fetch(ask, Bounds(rows=3, seconds=10), ()).truncated
    (tmp_path / "cleared").unlink()
    with pytest.raises(UsageInvalid, match="larger than"):
        bounded_answer.fetch(ask, Bounds(rows=9, seconds=10, answer_bytes=500), (UsageInvalid,))
    assert (tmp_path / "cleared").exists()


def test_a_process_that_is_killed_for_its_time_leaves_no_temporary_file(tmp_path: Path) -> None:
    def ask() -> Generator[list[object], None, None]:
        # As one makes that works on a copy.
        (tmp_path / "made").write_text(tempfile.mkdtemp())
        yield ["n"]
        time.sleep(60)

    with pytest.raises(UsageInvalid, match="took longer than 0 s"):
        bounded_answer.fetch(ask, Bounds(rows=1, seconds=0), ())
    assert not Path((tmp_path / "made").read_text()).exists()


def test_a_query_is_answered_where_no_temporary_folder_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask() -> Generator[list[object], None, None]:
        yield ["n"]
        yield [1]

    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    assert bounded_answer.fetch(ask, Bounds(rows=1, seconds=9), ()).rows == [(1,)]


def _abort() -> None:
    """As a library does that gets no memory."""
    faulthandler.disable()  # pytest's would print where
    os.abort()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was ended from outside \(SIGKILL\)"),
        (_abort, "needs more than 1024 MiB of memory"),
    ],
    ids=["killed", "abort"],
)
def test_how_the_process_of_a_query_ended_is_told(how: Callable[[], None], says: str) -> None:
    def ask() -> Generator[list[object], None, None]:
        yield ["n"]
        how()

    with pytest.raises(UsageInvalid, match=says):
        bounded_answer.fetch(ask, Bounds(rows=1, seconds=9), ())


def _no_child_is_dead() -> bool:
    try:
        # The server's starter may be one; a dead one of ours would be told.
        return os.waitpid(-1, os.WNOHANG) == (
            0,
            0,
        )
    except ChildProcessError:
        return True


def test_every_kind_of_value_comes_back_as_it_is(postgresql_url: str, sqlite_url: str) -> None:
    Store.open(sqlite_url).close()
    assert readonly.query(
        sqlite_url, "SELECT 1, 1.5, NULL, 'ü😀', x'00ff', 9007199254740993"
    ).rows == [(1, 1.5, None, "ü😀", b"\x00\xff", 9007199254740993)]
    sql = (
        "SELECT 1.50, date '2020-01-02', timestamp '2020-01-02 03:04:05', true, ARRAY[1, NULL],"
        " to_json('a'::text), CAST('{\"a\": [1, {}]}' AS jsonb)"
    )
    assert readonly.query(postgresql_url, sql).rows == readonly.own_query(postgresql_url, sql).rows
