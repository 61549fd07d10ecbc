"""Inserts of many rows, and of rows that may be there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

# By dialect: each has an ON CONFLICT of its own.
INSERTS: Mapping[str, Callable[[sa.Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def without_empty(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the columns that are NULL in each of them.

    Without a GPU they are nearly half of a measurement's columns, and each value costs time. The
    result is the same because no column that may be NULL has another default.
    """
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in known} for row in rows]


def insert_absent(connection: Connection, table: sa.Table, row: Mapping[str, Any]) -> int:
    """Insert the row unless its keys are there, and return how many rows were inserted."""
    insert = INSERTS[connection.dialect.name](table).values(**row).on_conflict_do_nothing()
    options = {"preserve_rowcount": True}
    return connection.execute(insert, execution_options=options).rowcount
