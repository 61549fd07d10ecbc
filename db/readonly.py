"""Anybody's SQL, answered without the power to change anything: one statement, read-only at the engine, bounded in time and rows.

SQLite: opened read-only, `query_only`, and an authorizer that knows what reading needs. PostgreSQL: a read-only transaction of a role that
can only read, the extended protocol (which takes no second statement), and none but known functions, since some run SQL or read files.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from db import schema, sql_mistakes
from db import url as urls
from db.sql_text import ALLOWED_FUNCTIONS, refuse_beyond_reading
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid

MAX_ROWS = 100_000
TIMEOUT_SECONDS = 30.0
_NO_ROWS = "the query gives no rows; only reading is possible here, for example: select * from v_best"
_BEYOND_READING = frozenset({"25006", "42501"})  # PostgreSQL's codes: read_only_sql_transaction, insufficient_privilege
_MAX_VALUE_BYTES = 64 << 20  # of one value: zeroblob(1e9) is no query


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool  # there were more than `max_rows`


def query(database_url: str | None, sql: str, *, max_rows: int = MAX_ROWS, timeout_seconds: float = TIMEOUT_SECONDS) -> Result:
    """Answer one SELECT. Raises UsageInvalid when it is refused, wrong or too slow, StoreUnavailable when there is no store."""
    url = urls.resolve(database_url)
    if "\0" in sql:
        raise UsageInvalid("the query holds a NUL character")
    try:
        return _query(url, sql, max_rows, timeout_seconds)
    except _WrongStatement as exc:
        raise UsageInvalid(sql_mistakes.wrong(str(exc), sql, _columns(url))) from None


class _WrongStatement(Exception):
    """What the database said of a statement that means nothing to it."""


def _query(url: sa.URL, sql: str, max_rows: int, timeout_seconds: float) -> Result:
    if url.drivername == "sqlite":
        return _query_sqlite(url, sql, max_rows, timeout_seconds)
    return _query_postgresql(url, sql, max_rows, timeout_seconds)


def _columns(url: sa.URL) -> dict[str, tuple[str, ...]]:
    """Those of every table and view; of a store whose views cannot be read, of the tables alone."""
    columns = {name: tuple(table.columns.keys()) for name, table in schema.metadata.tables.items()}
    try:
        return columns | {view: _query(url, f"SELECT * FROM {view} LIMIT 0", 1, TIMEOUT_SECONDS).columns for view in schema.VIEWS}
    except (SweepError, _WrongStatement):
        return columns


def _query_sqlite(url: sa.URL, sql: str, max_rows: int, timeout_seconds: float) -> Result:
    assert url.database is not None
    urls.refuse_network_file_system(url)
    file = Path(url.database)
    if not file.is_file():
        raise StoreUnavailable(f"there is no store at {file}. Name one with SWEEP_DB, or begin one: sweep run FILE")
    connection = _open_sqlite(file)
    deadline = time.monotonic() + timeout_seconds
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise UsageInvalid(_NO_ROWS)
        rows = cursor.fetchmany(max_rows + 1)
        return _result((column[0] for column in cursor.description), rows, max_rows)
    except (sqlite3.Error, sqlite3.Warning) as exc:
        message, code = str(exc), getattr(exc, "sqlite_errorcode", 0) & 0xFF  # the module's own errors have no code
        if code == sqlite3.SQLITE_INTERRUPT:
            raise UsageInvalid(f"the query took longer than {timeout_seconds:g} s and was ended") from None
        if code in (sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY) or "one statement at a time" in message:
            raise UsageInvalid(sql_mistakes.refused("it is more than one statement" if not code else message)) from None
        raise _WrongStatement(message) from None
    finally:
        connection.close()


def _open_sqlite(file: Path) -> sqlite3.Connection:
    # A file in WAL mode needs a shared-memory file beside it; where none can be made, nobody else can write either: it is immutable.
    still = not os.access(file.parent, os.W_OK) and not Path(f"{file}-wal").exists()
    try:
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(file))}?mode=ro{'&immutable=1' if still else ''}", uri=True, timeout=30, isolation_level=None
        )
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except sqlite3.Error as exc:
        raise StoreUnavailable(f"store {file} cannot be read: {exc}") from None
    return connection


_READING_PRAGMAS = frozenset(
    {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list", "function_list"}
)
_ASKING_PRAGMAS = frozenset({"user_version", "schema_version", "page_count", "page_size", "encoding", "compile_options", "query_only"})


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in ALLOWED_FUNCTIONS:
        return sqlite3.SQLITE_OK
    pragma = (first or "").lower()
    if action == sqlite3.SQLITE_PRAGMA and (pragma in _READING_PRAGMAS or (pragma in _ASKING_PRAGMAS and second is None)):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _query_postgresql(url: sa.URL, sql: str, max_rows: int, timeout_seconds: float) -> Result:
    try:
        import psycopg  # an extra: who keeps to SQLite need not have it
    except ModuleNotFoundError:
        raise StoreUnavailable("the PostgreSQL driver is not installed: pip install 'layout-sweep[postgres]'") from None
    refuse_beyond_reading(sql)
    milliseconds = max(1, int(timeout_seconds * 1000))
    settings = {
        "default_transaction_read_only": "on",
        "statement_timeout": milliseconds,
        "lock_timeout": milliseconds,
        "standard_conforming_strings": "on",  # as sql_text reads strings
    }
    arguments: dict[str, Any] = dict(sa.create_engine(url).dialect.create_connect_args(url)[1])
    arguments["options"] = " ".join([arguments.get("options", ""), *(f"-c {name}={value}" for name, value in settings.items())]).strip()
    try:
        connection = psycopg.connect(**arguments, connect_timeout=10, application_name="layout-sweep sql")
    except psycopg.Error as exc:
        raise StoreUnavailable(f"store {urls.display(url)}: {sql_mistakes.one_line(urls.redact(str(exc), url))}") from None
    try:
        _drop_powers(connection)
        columns = _prepare(connection, sql)
        rows: list[tuple[Any, ...]] = []
        for row in connection.cursor().stream(sql.encode()):  # row by row, so that a huge answer is never held
            rows.append(row)
            if len(rows) > max_rows:
                break
        return _result(columns, rows, max_rows)
    except psycopg.errors.QueryCanceled:
        raise UsageInvalid(f"the query took longer than {timeout_seconds:g} s and was ended") from None
    except psycopg.Error as exc:
        raise _refusal(urls.redact(str(exc), url), exc.sqlstate) from None
    finally:
        connection.close()


def _refusal(message: str, sqlstate: str | None) -> UsageInvalid | _WrongStatement:
    return UsageInvalid(sql_mistakes.refused(message)) if sqlstate in _BEYOND_READING else _WrongStatement(message)


def _drop_powers(connection: Any) -> None:
    """Become a role that can only read. A session of a superuser could take it back, were `set_config` and its like not refused before."""
    cursor = connection.cursor()
    role = cursor.execute(
        "SELECT rolsuper, pg_has_role(current_user, 'pg_read_all_data', 'MEMBER'), pg_has_role(current_user, 'pg_write_server_files', 'MEMBER')"
        " OR pg_has_role(current_user, 'pg_execute_server_program', 'MEMBER') FROM pg_roles WHERE rolname = current_user"
    ).fetchone()
    is_super, may_read_all, is_powerful = role
    if is_super or (is_powerful and may_read_all):
        cursor.execute("SET ROLE pg_read_all_data")
    elif is_powerful:
        raise UsageInvalid(
            "this database user may run programs on the server. Ask as one that may only read: GRANT pg_read_all_data TO ..."
        )


def _prepare(connection: Any, sql: str) -> list[str]:
    """The columns that the statement will give. The extended protocol takes one statement; what gives no columns is not run."""
    from psycopg.pq import DiagnosticField, ExecStatus  # an extra, as above

    answer = connection.pgconn.prepare(b"asked", sql.encode())
    if answer.status == ExecStatus.COMMAND_OK:
        answer = connection.pgconn.describe_prepared(b"asked")
    if answer.status != ExecStatus.COMMAND_OK:
        state = answer.error_field(DiagnosticField.SQLSTATE)
        raise _refusal(answer.error_message.decode(errors="replace"), state.decode() if state else None)
    if not answer.nfields:
        raise UsageInvalid(_NO_ROWS)
    return [answer.fname(i).decode() for i in range(answer.nfields)]


def _result(columns: Iterable[str], rows: list[tuple[Any, ...]], max_rows: int) -> Result:
    return Result(columns=tuple(columns), rows=rows[:max_rows], truncated=len(rows) > max_rows)
