"""Empty stores for tests without new migrations: SQLite files are copied, PostgreSQL emptied."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from db import schema
from db.store import Store

# Not TRUNCATE, which makes a new file for each table and index: twice the time, where there are
# some rows. Foreign keys are not asked about.
EMPTY = "; ".join(
    (
        "SET session_replication_role = replica",
        *(f"DELETE FROM {table}" for table in schema.metadata.tables),
        "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'",
        "RESET session_replication_role",
    )
)
_OURS = "the tables of a store"  # a comment on a schema


def on_sqlite(url: str) -> Store:
    """A store in a file that is not there yet."""
    file = Path(url.removeprefix("sqlite:///"))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as new:
        new.write(_made_by_migrations())
    return Store.open(url)


@cache
def _made_by_migrations() -> bytes:
    with TemporaryDirectory(prefix="sweep-store-") as folder:
        Store.open(f"sqlite:///{folder}/sweep.sqlite").close()
        return Path(folder, "sweep.sqlite").read_bytes()


def emptied(connection: Any) -> bool:
    """True if psycopg's connection sees the tables of a store, which are empty now."""
    if connection.execute("SELECT obj_description(to_regnamespace('public'))").fetchone() != (
        _OURS,
    ):
        return False
    version = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if version == (schema.SCHEMA_VERSION,):
        connection.execute(EMPTY)
        return True
    return False


def keep_tables(connection: Any) -> None:
    """Leave its tables to the next test that asks for a store."""
    connection.execute(f"COMMENT ON SCHEMA public IS '{_OURS}'")
