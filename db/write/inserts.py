"""Inserts of rows that may be there already."""

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


def insert_absent(
    connection: Connection, table: sa.Table, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> int:
    """Insert the rows whose keys are not there yet, and return how many were inserted."""
    many = [rows] if isinstance(rows, Mapping) else list(rows)
    if not many:
        return 0
    # SQL expressions, such as the database's clock, cannot be parameters.
    fixed = {name: value for name, value in many[0].items() if isinstance(value, sa.ClauseElement)}
    insert = INSERTS[connection.dialect.name](table)
    values = [{name: value for name, value in row.items() if name not in fixed} for row in many]
    statement = insert.values(**fixed).on_conflict_do_nothing()
    return connection.execute(
        statement, values, execution_options={"preserve_rowcount": True}
    ).rowcount
