"""The types of columns beyond those of SQL: states, times, JSON, and the database's clock."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


class SweepState(StrEnum):
    # No orchestrator has worked on it yet.
    WAITING = "waiting"
    # An orchestrator owns it, or owned it when it died.
    RUNNING = "running"
    STOPPED = "stopped"  # with work still to do
    FINISHED = "finished"


class AttemptState(StrEnum):
    RUNNING = "running"
    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    # It failed by the machine's fault, or a person stopped it; the trial waits again.
    REQUEUED = "requeued"
    LOST = "lost"  # its orchestrator died


class BenchReason(StrEnum):
    """The reason that nothing is placed on a node."""

    # It is much slower than the others; its measurements are repeated elsewhere.
    SLOW = "slow"
    # Several trials failed there by the fault of the machine.
    FAULTS = "faults"
    ASKED = "asked"  # by a person


class StopRequest(StrEnum):
    """A person's request to a running orchestrator, from another process."""

    DRAIN = "drain"
    CANCEL = "cancel"


class UtcTime(TypeDecorator[dt.datetime]):
    """A point in time. Stored without a zone, in UTC; read as an aware datetime."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        return None if value is None else value.astimezone(dt.UTC).replace(tzinfo=None)

    def process_result_value(
        self, value: dt.datetime | None, dialect: Dialect
    ) -> dt.datetime | None:
        return None if value is None else value.replace(tzinfo=dt.UTC)


class now(FunctionElement[dt.datetime]):
    """The time of the database's clock in UTC, plus seconds if given.

    No other clock decides about a lease.
    """

    type = UtcTime()
    inherit_cache = True
    name = "now"


# strftime, because unixepoch('subsec') is NULL on SQLite before 3.42: a lease would never end.
@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return (
        f"strftime('%Y-%m-%d %H:%M:%f', 'now', {seconds} || ' seconds')"
        if seconds
        else "strftime('%Y-%m-%d %H:%M:%f', 'now')"
    )


# clock_timestamp, because now() is the start of a transaction, which may have waited for a lock.
@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    clock = "(clock_timestamp() AT TIME ZONE 'utc')"
    return f"({clock} + make_interval(secs => {seconds}))" if seconds else clock


# SQLite numbers rows by itself only if the type is INTEGER.
Id = BigInteger().with_variant(Integer(), "sqlite")
# None is NULL, not the JSON null.
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
