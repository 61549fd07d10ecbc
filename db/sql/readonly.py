"""Answers one SQL statement of a person, read-only and with limits on time, rows and memory.

SQLite: opened read-only, `query_only`, with an authorizer. PostgreSQL: a role that may only select
(if there is one), a read-only transaction, the extended protocol (which takes no second statement)
and only known functions. People's statements run in a child process, this program's own do not.
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db import schema
from db.connection import postgresql_advice
from db.connection import url as urls
from db.connection.sqlite_file import ReadableFile
from db.sql import bounded_answer, reader_role, sql_mistakes
from db.sql.bounded_answer import Answer, Bounds
from db.sql.named_queries import Value
from db.sql.sql_text import ALLOWED_FUNCTIONS, refuse_beyond_reading
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid

MAX_ROWS = 100_000
TIMEOUT_SECONDS = 30.0
_NO_ROWS = (
    "the query gives no rows; only reading is possible here, for example: select * from v_best"
)
# PostgreSQL's codes: read_only_sql_transaction, insufficient_privilege.
_BEYOND_READING = frozenset({"25006", "42501"})
# Largest single value: zeroblob(1e9) is no useful query.
_MAX_VALUE_BYTES = 64 << 20


class _WrongStatement(Exception):
    """The database cannot understand the statement."""


_MISTAKES = (UsageInvalid, StoreUnavailable, _WrongStatement)


def query(
    database_url: str | None,
    sql: str,
    *,
    parameters: Mapping[str, Value] | None = None,
    max_rows: int = MAX_ROWS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Answer:
    """Answer one SELECT of a person, in a child process, as the reader's role if there is one.

    `parameters` are bound where a named query says `:name`; of other statements None. Raises
    UsageInvalid if it is refused, wrong, too slow or too large, StoreUnavailable if there is no
    store.
    """
    url = urls.resolve(database_url)
    try:
        for text in (sql, *(parameters or {}).values()):
            _refuse_unencodable(text)
        ask = partial(_rows, url, sql, parameters, timeout_seconds, is_ours=False)
        return bounded_answer.fetch(ask, Bounds(rows=max_rows, seconds=timeout_seconds), _MISTAKES)
    except _WrongStatement as exc:
        raise UsageInvalid(sql_mistakes.wrong(str(exc), sql, _columns(url))) from None


def own_query(
    database_url: str | None,
    sql: str,
    *,
    parameters: Mapping[str, Value] | None = None,
    max_rows: int = MAX_ROWS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Answer:
    """Answer a SELECT of this program, in this process, as the store's role. Raises as `query`."""
    url = urls.resolve(database_url)
    with closing(_rows(url, sql, parameters, timeout_seconds, is_ours=True)) as answer:
        try:
            return bounded_answer.cut(answer, max_rows)
        except _WrongStatement as exc:
            raise UsageInvalid(
                f"the query cannot be answered: {sql_mistakes.one_line(str(exc))}"
            ) from None


def columns_of(database_url: str | None, view: str) -> tuple[str, ...]:
    """The columns of a view, which a query without rows names on every database."""
    return own_query(database_url, f"SELECT * FROM {view} LIMIT 0").columns


def _refuse_unencodable(text: Value) -> None:
    if not isinstance(text, str):
        return
    if "\0" in text:
        raise UsageInvalid("the query holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageInvalid("the query holds bytes that are not UTF-8") from None


def _rows(
    url: sa.URL,
    sql: str,
    parameters: Mapping[str, Value] | None,
    timeout_seconds: float,
    *,
    is_ours: bool,
) -> Generator[Sequence[Any], None, None]:
    """Yield the names of the columns, then the rows."""
    if url.drivername == "sqlite":
        return _rows_of_sqlite(url, sql, parameters, timeout_seconds)
    return _rows_of_postgresql(url, sql, parameters, timeout_seconds, is_ours=is_ours)


def _columns(url: sa.URL) -> dict[str, tuple[str, ...]]:
    """The columns of every table, and of every view if views can be read."""
    columns = {name: tuple(table.columns.keys()) for name, table in schema.metadata.tables.items()}
    where = url.render_as_string(hide_password=False)
    try:
        return columns | {view: columns_of(where, view) for view in schema.VIEWS}
    except SweepError:
        return columns


def _rows_of_sqlite(
    url: sa.URL, sql: str, parameters: Mapping[str, Value] | None, timeout_seconds: float
) -> Generator[Sequence[Any], None, None]:
    assert url.database is not None
    urls.refuse_network_file_system(url)
    file = Path(url.database)
    if not file.is_file():
        raise StoreUnavailable(
            f"there is no store at {file}. Name one with SWEEP_DB, or begin one: sweep run FILE"
        )
    deadline = time.monotonic() + timeout_seconds
    readable = ReadableFile(file)
    with closing(readable), closing(readable.connect()) as connection:
        try:
            connection.execute("PRAGMA query_only = ON")
            _add_mathematics(connection)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            connection.set_authorizer(_authorize)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            cursor = connection.execute(sql, dict(parameters or {}))
            if cursor.description is None:
                raise UsageInvalid(_NO_ROWS)
            yield [column[0] for column in cursor.description]
            yield from cursor
        except (sqlite3.Error, sqlite3.Warning) as exc:
            raise _sqlite_refusal(exc, timeout_seconds) from None


def _add_mathematics(connection: sqlite3.Connection) -> None:
    """Add what named queries use, since a SQLite may be built without it."""
    for name, function in (("ln", math.log), ("exp", math.exp), ("sqrt", math.sqrt)):
        known = partial(_or_null, function)
        connection.create_function(name, 1, known, deterministic=True)


def _or_null(function: Callable[[float], float], value: object) -> float | None:
    """NULL, as SQLite has it, where a function has no value."""
    if not isinstance(value, int | float):
        return None
    try:
        return function(value)
    except (ValueError, OverflowError):
        return None


def _sqlite_refusal(exc: Exception, timeout_seconds: float) -> UsageInvalid | _WrongStatement:
    message = str(exc)
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF  # the module's own errors have none
    match code:
        case sqlite3.SQLITE_INTERRUPT:
            return UsageInvalid(bounded_answer.took_too_long(timeout_seconds))
        case sqlite3.SQLITE_AUTH | sqlite3.SQLITE_READONLY:
            return UsageInvalid(sql_mistakes.refused(message))
        case sqlite3.SQLITE_TOOBIG:
            return UsageInvalid(
                f"a value of the answer is larger than {_MAX_VALUE_BYTES >> 20} MiB; "
                "ask for a part of it with substr()"
            )
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return UsageInvalid(
                f"the query needs too much disk space for temporary files: {message};"
                " ask for fewer rows"
            )
    if "one statement at a time" in message:
        return UsageInvalid(sql_mistakes.refused("it is more than one statement"))
    return _WrongStatement(message)


_READING = """
table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list function_list
"""
_ASKING = "user_version schema_version page_count page_size encoding compile_options query_only"
_READING_PRAGMAS, _ASKING_PRAGMAS = frozenset(_READING.split()), frozenset(_ASKING.split())


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in ALLOWED_FUNCTIONS:
        return sqlite3.SQLITE_OK
    pragma = (first or "").lower()
    if action == sqlite3.SQLITE_PRAGMA and (
        pragma in _READING_PRAGMAS or (pragma in _ASKING_PRAGMAS and second is None)
    ):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _rows_of_postgresql(
    url: sa.URL,
    sql: str,
    parameters: Mapping[str, Value] | None,
    timeout_seconds: float,
    *,
    is_ours: bool,
) -> Generator[Sequence[Any], None, None]:
    named = refuse_beyond_reading(sql)
    reader = None if is_ours else urls.reader_of(url)
    with reader_role.connected(url, reader) as connection:
        # An extra that SQLite does not need.
        import psycopg

        try:
            _settle(connection, timeout_seconds)
            reader_role.settle(connection, is_reader=reader is not None)
            if not is_ours:
                reader_role.refuse_hidden_calls(connection, named)
            # Row by row, so that a huge answer is never in memory.
            if parameters is None:
                yield _prepare(connection, sql)
                yield from connection.cursor().stream(sql.encode())
            else:
                numbered, values = _numbered(sql, parameters)
                yield _prepare(connection, numbered)
                yield from psycopg.RawCursor(connection).stream(numbered.encode(), values)
        except psycopg.errors.QueryCanceled:
            raise UsageInvalid(bounded_answer.took_too_long(timeout_seconds)) from None
        except psycopg.Error as exc:
            login = reader or url
            if (
                exc.sqlstate == postgresql_advice.INSUFFICIENT_PRIVILEGE
                and "permission denied for function" not in str(exc)
            ):
                message = postgresql_advice.advised(
                    str(exc), sqlstate=exc.sqlstate, url=login, statement=sql
                )
                raise UsageInvalid(f"the query was refused: {message}") from None
            raise _postgresql_refusal(urls.redact(str(exc), login), exc.sqlstate) from None


def _numbered(sql: str, parameters: Mapping[str, Value]) -> tuple[str, list[Value]]:
    """A named query with $1, $2 for its parameters, as PostgreSQL has them, and their values."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"${numbers.setdefault(found[1], len(numbers) + 1)}"

    # Not in `::`, and not the colon after the name of a parameter in a comment.
    numbered = re.sub(r"(?<![\w:]):([a-z_]+)\b", number, sql)
    return numbered, [parameters[name] for name in numbers]


def _settle(connection: Any, timeout_seconds: float) -> None:
    """Set our limits within the transaction: a pool of connections keeps no other setting."""
    milliseconds = max(1, int(timeout_seconds * 1000))
    # Strings as sql_text reads them.
    connection.execute(
        f"SET LOCAL statement_timeout = {milliseconds}; SET LOCAL lock_timeout = {milliseconds};"
        " SET LOCAL standard_conforming_strings = on; SET LOCAL client_encoding = 'UTF8'"
    )
    settings = {
        name: connection.pgconn.parameter_status(name.encode())
        for name in ("standard_conforming_strings", "client_encoding")
    }
    if settings not in ({"standard_conforming_strings": b"on", "client_encoding": b"UTF8"},):
        raise StoreUnavailable(
            "the server, or a pool before it, does not keep settings that reading needs: "
            f"{settings}"
        )


def _postgresql_refusal(message: str, sqlstate: str | None) -> UsageInvalid | _WrongStatement:
    # 54000 is program_limit_exceeded, 53200 out_of_memory.
    if (
        "out of memory" in message
        or "cannot allocate memory" in message
        or sqlstate in ("54000", "53200")
    ):
        line = sql_mistakes.one_line(message)
        return UsageInvalid(f"the answer is too large: {line}; {bounded_answer.ASK_FOR_LESS}")
    if sqlstate in _BEYOND_READING:
        return UsageInvalid(sql_mistakes.refused(message))
    return _WrongStatement(message)


def _prepare(connection: Any, sql: str) -> list[str]:
    """The columns of the statement's answer; a statement without columns is not run.

    The extended protocol takes one statement only.
    """
    from psycopg.pq import DiagnosticField, ExecStatus  # an extra, as above

    answer = connection.pgconn.prepare(b"asked", sql.encode())
    if answer.status == ExecStatus.COMMAND_OK:
        answer = connection.pgconn.describe_prepared(b"asked")
    if answer.status != ExecStatus.COMMAND_OK:
        state = answer.error_field(DiagnosticField.SQLSTATE)
        raise _postgresql_refusal(
            answer.error_message.decode(errors="replace"), state.decode() if state else None
        )
    if not answer.nfields:
        raise UsageInvalid(_NO_ROWS)
    return [answer.fname(i).decode() for i in range(answer.nfields)]
