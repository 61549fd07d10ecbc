"""Inserts of rows that may be there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

# By dialect: each has an ON CONFLICT of its own.
INSERTS: Mapping[str, Callable[[sa.Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def insert_absent(connection: Connection, table: sa.Table, row: Mapping[str, Any]) -> int:
    """Insert the row unless its keys are there, and return how many rows were inserted."""
    insert = INSERTS[connection.dialect.name](table).values(**row).on_conflict_do_nothing()
    options = {"preserve_rowcount": True}
    return connection.execute(insert, execution_options=options).rowcount
