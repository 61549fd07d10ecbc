"""Connections and transactions of one database, with retries and clear errors. Knows no table."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from db.connection import postgresql_advice
from db.connection import url as urls
from db.connection.sqlite_file import (
    OpenedFile,
    ReadableFile,
    can_be_written,
    is_on_read_only,
    refuse_other_format,
)
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid

logger = logging.getLogger(__name__)

# How long to wait for SQLite's write lock: longer than any write of ours.
BUSY_TIMEOUT_SECONDS = 30.0
CONNECT_TIMEOUT_SECONDS = 10
# How long to retry: a crashed PostgreSQL is back in seconds; after a minute a person should know.
PATIENCE_SECONDS = 60.0
# A server that vanished (its host, the network) is given up after 10 + 3 x 5 s, not after the
# kernel's two hours.
_KEEP_ALIVE = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
# An orchestrator that sleeps within a transaction must not lock the sweep's row for its successor.
_IDLE_IN_TRANSACTION = "SET idle_in_transaction_session_timeout = '20s'"
# Serialization failure, deadlock, lock timeout; the server is stopping, has crashed or is starting.
TRANSIENT_SQLSTATES = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03"})

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One write. With `is_retry` an earlier try may have been committed, unknown to us."""

    id: str
    is_retry: bool


class Database:
    """One database, SQLite or PostgreSQL.

    A call gives up when a database that was reached before has not answered for
    `patience_seconds`. `wait` is called for the seconds between two tries.
    """

    def __init__(
        self, url: sa.URL, *, patience_seconds: float | None = None, to_read: bool = False
    ) -> None:
        """Prepare an engine, without a connection. With `to_read` nothing will be written.

        Raises UsageInvalid for a missing driver, StoreUnavailable for an unsafe file system.
        """
        self.url = url
        self.patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self.wait: Callable[[float], None] = time.sleep
        self.is_sqlite = url.drivername == "sqlite"
        # Before the first answer an error means a wrong address, which waiting does not fix.
        self._was_reached = False
        self._readable: ReadableFile | None = None
        self._file = OpenedFile(Path(url.database)) if self.is_sqlite and url.database else None
        try:
            if (
                to_read
                and self._file is not None
                and self._file.path.is_file()
                and not can_be_written(self._file.path)
            ):
                self._readable = ReadableFile(self._file.path)
                self.engine = _reading_engine(url, self._readable)
            else:
                self.engine = (
                    _sqlite_engine(url, self._file)
                    if self._file is not None
                    else _postgresql_engine(url)
                )
        except ModuleNotFoundError as exc:
            raise UsageInvalid(
                "the PostgreSQL driver is not installed: pip install '.[postgres]' in the cloned"
                " folder"
            ) from exc
        except OSError as exc:
            place = "Choose a place that is yours to write with SWEEP_DB"
            raise StoreUnavailable(
                f"store {urls.display(url)}: {exc.strerror}: {exc.filename}. {place}"
            ) from exc

    def close(self) -> None:
        self.engine.dispose()
        if self._file is not None:
            self._file.forget()
        if self._readable is not None:
            self._readable.close()

    def read(self, work: Callable[[sa.Connection], _T]) -> _T:
        """Run `work` in one snapshot, again if the connection broke."""

        def once(is_retry: bool) -> _T:
            with self.engine.connect() as connection:
                self._was_reached = True
                self._begin(connection, "BEGIN")
                return work(connection)

        with self._clear_errors():
            return self._tried(once)

    def write(self, work: Callable[[sa.Connection, Change], _T], *, durable: bool = False) -> _T:
        """Run `work` in one transaction that takes the write lock first; all of it or nothing.

        A `durable` write is flushed to disk before this returns, and survives a power cut too.
        `work` may run more than once.
        """
        change_id = os.urandom(16).hex()

        def once(is_retry: bool) -> _T:
            with self.engine.begin() as connection:
                self._begin(
                    connection, "BEGIN IMMEDIATE", synchronous="FULL" if durable else "NORMAL"
                )
                done = work(connection, Change(id=change_id, is_retry=is_retry))
            if self._file is not None:
                self._file.refuse_another()
            return done

        with self._clear_errors():
            return self._tried(once)

    def _begin(
        self, connection: sa.Connection, statement: str, *, synchronous: str | None = None
    ) -> None:
        """Begin a transaction of SQLite, whose driver begins none by itself.

        The driver does it directly, for a tenth of the cost of a statement of SQLAlchemy. An event
        of the engine would make every statement slower.
        """
        if not self.is_sqlite:
            return
        driver, info = connection.connection.driver_connection, connection.info
        assert isinstance(driver, sqlite3.Connection)
        try:
            if synchronous is not None and synchronous != info.get("synchronous"):
                driver.execute(f"PRAGMA synchronous = {synchronous}")
                info["synchronous"] = synchronous
            driver.execute(statement)
        except sqlite3.Error as exc:
            raise DBAPIError.instance(
                statement, None, exc, sqlite3.Error, hide_parameters=True
            ) from exc

    def _tried(self, once: Callable[[bool], _T]) -> _T:
        """Run `once`, which is told whether it is a retry: at once, then after growing waits.

        Nearly all calls need one try. It is made without tenacity, which costs as much as two
        statements on SQLite.
        """
        began = time.monotonic()
        try:
            return once(False)
        except DBAPIError as exc:
            if not self._is_worth_a_retry(exc):
                raise
        retrying = Retrying(
            retry=retry_if_exception(self._is_worth_a_retry),
            sleep=lambda seconds: self.wait(seconds),
            stop=stop_after_delay(began + self.patience_seconds - time.monotonic()),
            wait=wait_random_exponential(multiplier=0.05, max=2),
            before_sleep=self._log_retry,
            reraise=True,
        )
        return retrying(once, True)

    def _is_worth_a_retry(self, exc: BaseException) -> bool:
        return self._was_reached and _is_transient(exc)

    def _log_retry(self, state: RetryCallState) -> None:
        if state.attempt_number == 1:
            logger.warning(
                "The database %s does not answer; trying again",
                urls.display(self.url),
                extra={"action": "store_retry"},
            )

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn errors of a driver into one line with database, error and fix.

        Raises UsageInvalid for a wrong address, and StoreUnavailable for anything else.
        """
        try:
            yield
        except (PoolTimeout, DBAPIError) as exc:
            # A person can fix missing rights and tables; other errors of these kinds are our bugs.
            is_ours = isinstance(exc, IntegrityError | ProgrammingError | DataError)
            is_about_the_url = (
                not self.is_sqlite and not self._was_reached and _sqlstate(exc) is None
            )
            if (
                is_ours
                and not is_about_the_url
                and _sqlstate(exc) not in postgresql_advice.FOR_THE_USER
            ):
                raise
            # `from None`: the driver's own text may hold a password.
            raise self._refusal(exc) from None

    def _refusal(self, exc: PoolTimeout | DBAPIError) -> SweepError:
        try:
            if self._file is not None and self._was_reached:
                self._file.refuse_another()
            elif self._file is not None and "not a database" in str(exc):
                refuse_other_format(self._file.path)
        except (StoreUnavailable, UsageInvalid) as clearer:  # than SQLite's error
            return clearer
        line = f"store {urls.display(self.url)}: {self._explain(exc)}"
        is_mistyped = (
            not self.is_sqlite
            and _sqlstate(exc) is None
            and postgresql_advice.is_wrong_url(str(exc))
        )
        return UsageInvalid(line) if is_mistyped else StoreUnavailable(line)

    def _explain(self, exc: Exception) -> str:
        text = str(exc.orig) if isinstance(exc, DBAPIError) and exc.orig is not None else str(exc)
        if self.is_sqlite:
            return _sqlite_advice(text, self._file)
        statement = exc.statement or "" if isinstance(exc, DBAPIError) else ""
        role, schema = (
            self._session() if _sqlstate(exc) in postgresql_advice.FOR_THE_USER else (None, None)
        )
        return postgresql_advice.advised(
            text,
            sqlstate=_sqlstate(exc),
            url=self.url,
            statement=statement,
            role=role,
            schema=schema,
        )

    def _session(self) -> tuple[str | None, str | None]:
        """The role and schema of statements; None if they cannot be asked for."""
        try:
            with self.engine.connect() as connection:
                role, schema = connection.exec_driver_sql(
                    "SELECT current_user, current_schema()"
                ).one()
        except sa.exc.SQLAlchemyError:
            return None, None
        return role, schema


@dataclass(frozen=True, kw_only=True)
class _SqliteAdvice:
    """What to do about a message of SQLite that has this fragment."""

    fragment: str
    advice: str
    # True: the cause may be a file system that is read-only.
    may_be_read_only: bool = False


_SQLITE_ADVICE = (
    _SqliteAdvice(
        fragment="disk I/O error",
        advice="cannot be written: the disk is full, over quota, or broken. "
        "Free some space, then run the same command: nothing acknowledged is lost",
    ),
    _SqliteAdvice(
        fragment="database or disk is full",
        advice="the disk is full. Free some space, then run the same command: "
        "nothing acknowledged is lost",
    ),
    _SqliteAdvice(
        fragment="readonly database",
        advice="cannot be written: the file or its folder is read-only. "
        "Make it writable, or choose another place with SWEEP_DB",
        may_be_read_only=True,
    ),
    _SqliteAdvice(
        fragment="unable to open database file",
        advice="cannot be opened: its folder does not exist or is not yours to write. "
        "Choose another place with SWEEP_DB",
        may_be_read_only=True,
    ),
    _SqliteAdvice(
        fragment="not a database",
        advice="is not a SQLite database, or is damaged. "
        "Move it away, or put a copy back (upgrades leave a .backup file next to it)",
    ),
    _SqliteAdvice(
        fragment="malformed",
        advice="is damaged. Move it away and put a copy back, or rescue it: sqlite3 FILE .recover",
    ),
    _SqliteAdvice(
        fragment="locked",
        advice=f"another process has kept it locked for {BUSY_TIMEOUT_SECONDS:.0f} s. "
        "See who has it open (fuser FILE), then run the same command",
    ),
)


def _sqlite_advice(text: str, file: OpenedFile | None) -> str:
    for one in _SQLITE_ADVICE:
        if one.fragment not in text:
            continue
        if one.may_be_read_only and file is not None and is_on_read_only(file.path):
            return "is on a read-only file system. Choose another place with SWEEP_DB"
        return one.advice
    return postgresql_advice.first_line(text)


def _sqlstate(exc: Exception) -> str | None:
    return getattr(exc.orig, "sqlstate", None) if isinstance(exc, DBAPIError) else None


def _is_transient(exc: BaseException) -> bool:
    if not isinstance(exc, DBAPIError) or exc.orig is None:
        return False
    sqlstate = _sqlstate(exc)
    if sqlstate is None and postgresql_advice.is_final(str(exc.orig)):
        return False
    if exc.connection_invalidated:
        return True
    # psycopg gives no sqlstate if the server could not be reached.
    lost = (
        type(exc.orig).__module__.startswith("psycopg")
        and isinstance(exc, OperationalError)
        and sqlstate is None
    )
    return sqlstate in TRANSIENT_SQLSTATES or lost


def _postgresql_engine(url: sa.URL) -> sa.Engine:
    own = {
        "connect_timeout": CONNECT_TIMEOUT_SECONDS,
        "application_name": "layout-sweep",
        **_KEEP_ALIVE,
    }
    arguments = own | urls.libpq_arguments(url)
    engine = sa.create_engine(
        url,
        connect_args=arguments,
        pool_pre_ping=True,
        hide_parameters=True,
        json_serializer=_unescaped_json,
        pool_size=4,
        max_overflow=4,
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.execute(_IDLE_IN_TRANSACTION)
        connection.commit()

    return engine


def _reading_engine(url: sa.URL, file: ReadableFile) -> sa.Engine:
    urls.refuse_network_file_system(url)
    # A connection for each read, so that it sees new writers.
    return sa.create_engine(
        url.set(query={}),
        creator=file.connect,
        poolclass=sa.NullPool,
        hide_parameters=True,
        json_serializer=_json,
    )


def _sqlite_engine(url: sa.URL, file: OpenedFile) -> sa.Engine:
    urls.refuse_network_file_system(url)
    urls.refuse_missing_folder(url)
    file.path.parent.mkdir(exist_ok=True)
    # A file system that hosts share has no shared memory; the older journal needs none.
    journal = "TRUNCATE" if urls.is_unsafe(url) else "WAL"
    engine = sa.create_engine(
        url.set(query={}),
        connect_args={"timeout": BUSY_TIMEOUT_SECONDS},
        hide_parameters=True,
        json_serializer=_json,
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        # The driver begins no transaction: ours are explicit.
        connection.isolation_level = None
        for pragma in (
            f"journal_mode = {journal}",
            "foreign_keys = ON",
            "synchronous = NORMAL",
            "temp_store = MEMORY",
            "cache_size = -65536",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        record.info["synchronous"] = "NORMAL"
        file.refuse_another()

    return engine


_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_json_with_letters = json.JSONEncoder(
    allow_nan=False, separators=(",", ":"), ensure_ascii=False
).encode


def _unescaped_json(value: Any) -> str:
    """JSON for PostgreSQL, which reads an escape such as \\u00e9 only if its encoding is UTF8.

    A database of encoding SQL_ASCII stores the letter itself. Halves of a pair are no letters.
    """
    text = _json_with_letters(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
