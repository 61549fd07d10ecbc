"""The schema's versions: an empty database is brought to the newest at once, any other only by `sweep db upgrade`, after a copy."""

from __future__ import annotations

import datetime as dt
import re
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db import schema
from db.connection import url
from db.connection.engine import Database
from db.connection.postgresql_advice import quoted
from orchestrator.core.errors import StoreUnavailable, UsageInvalid

_FOLDER = Path(__file__).parent
_VERSION_TABLE = "alembic_version"
_LOCK_KEY = 0x53574545  # of PostgreSQL's advisory lock: two processes that meet an empty database create its tables once


def ensure_head(database: Database, *, to_read: bool = False) -> None:
    """Give an empty database its tables; raise StoreUnavailable when a database is of another version than this code.

    `to_read`: nothing is made. Raises UsageInvalid where there is no store.
    """
    version = database.read(partial(current_version, where=url.display(database.url)))
    if version is None:
        _refuse_foreign(database)
        if to_read:
            raise UsageInvalid(database.read(partial(_nothing_here, where=url.display(database.url))))
        database.read(_refuse_encoding)
        database.write(lambda connection, change: _move(connection, "head"), durable=True)
        return
    if version != schema.SCHEMA_VERSION:
        raise StoreUnavailable(_mismatch(url.display(database.url), version))


def upgrade(database_url: str | None) -> tuple[str | None, str, Path | None]:
    """Bring a database to this code's schema. Returns the version before and after, and where the copy of the SQLite file lies."""
    return _migrate(database_url, "head")


def downgrade(database_url: str | None, version: str) -> tuple[str | None, str, Path | None]:
    """Take a database back to an older schema (`base`: no tables), after a copy."""
    return _migrate(database_url, version)


def current_version(connection: sa.Connection, *, where: str = "the database") -> str | None:
    """The schema's version; None: it has none, because it is new. Raises StoreUnavailable where what is said is no version."""
    if not sa.inspect(connection).has_table(_VERSION_TABLE):
        return None
    try:
        rows = connection.execute(sa.text(f"SELECT version_num FROM {_VERSION_TABLE} LIMIT 3")).scalars().all()
    except (sa.exc.OperationalError, sa.exc.ProgrammingError) as exc:
        if "version_num" not in str(exc.orig):
            raise
        raise StoreUnavailable(f"{where} has a table {_VERSION_TABLE} of other origin. Choose an empty database") from None
    if len(rows) > 1 or any(not _is_version(row) for row in rows):
        said = ", ".join(repr(row)[:40] for row in rows[:2])
        raise StoreUnavailable(f"{where} has schema version {said}, which should be one row of four digits. Put a backup back")
    return str(rows[0]) if rows else None


def _is_version(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9]{4}", value) is not None


def _migrate(database_url: str | None, target: str) -> tuple[str | None, str, Path | None]:
    database = Database(url.resolve(database_url))
    try:
        before = database.read(partial(current_version, where=url.display(database.url)))
        if before is not None and before > schema.SCHEMA_VERSION:  # no path leads there from what this code knows
            raise StoreUnavailable(_mismatch(url.display(database.url), before))
        if before is None:
            _refuse_foreign(database)
        copy = _back_up(database, before)
        after = database.write(lambda connection, change: _move(connection, target), durable=True)
        return before, after, copy
    finally:
        database.close()


def _move(connection: sa.Connection, target: str) -> str:
    """Run the migrations to `target` in the caller's transaction. The views are made anew: they belong to the newest tables only."""
    # Here, because alembic costs 0.2 s that opening a store of the right version need not pay.
    from alembic import command
    from alembic.config import Config

    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
    if target == "head" and current_version(connection) == schema.SCHEMA_VERSION:
        return schema.SCHEMA_VERSION  # another process was faster
    for view in reversed(schema.VIEWS):
        connection.execute(sa.text(f"DROP VIEW IF EXISTS {view}"))
    config = Config()
    config.set_main_option("script_location", str(_FOLDER / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    before = current_version(connection)
    is_down = target == "base" or (before is not None and target != "head" and target < before)
    (command.downgrade if is_down else command.upgrade)(config, target)
    after = current_version(connection)
    if after == schema.SCHEMA_VERSION:
        for view in schema.VIEWS:
            connection.exec_driver_sql((_FOLDER / "views" / f"{view}.sql").read_text())
    return after or "base"


def _refuse_foreign(database: Database) -> None:
    """A database with somebody else's `trial` table is not ours to fill."""
    found = database.read(lambda connection: set(sa.inspect(connection).get_table_names()))
    strangers = found & set(schema.metadata.tables)
    if strangers == set(schema.metadata.tables) and _VERSION_TABLE in found:
        raise StoreUnavailable(f"{url.display(database.url)} has lost its schema version: {_VERSION_TABLE} is empty. Put a backup back")
    if strangers:
        raise StoreUnavailable(
            f"{url.display(database.url)} has tables of other origin ({', '.join(sorted(strangers))}). Choose an empty database"
        )


def _nothing_here(connection: sa.Connection, *, where: str) -> str:
    begin = "Name another with SWEEP_DB or --db, or begin one: sweep run FILE"
    if connection.dialect.name == "postgresql":
        role, own_schema = connection.exec_driver_sql("SELECT current_user, current_schema()").one()
        if own_schema is None:
            return f"role {role} sees no schema at {where}: GRANT USAGE ON SCHEMA public TO {quoted(role)}, if the store is there"
    return f"there is no store at {where}. {begin}"


def _refuse_encoding(connection: sa.Connection) -> None:
    """A character that a database cannot keep would be met when a result is written: say so before there is one."""
    if connection.dialect.name != "postgresql":
        return
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding not in ("UTF8", "SQL_ASCII"):
        name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
        cure = f"createdb --encoding UTF8 --template template0 {name}"
        raise StoreUnavailable(f"database {name} has encoding {encoding}, which lacks characters that results hold. Make it anew: {cure}")


def _mismatch(where: str, version: str) -> str:
    if version > schema.SCHEMA_VERSION:
        return f"{where} has schema {version}, newer than this program's {schema.SCHEMA_VERSION}: upgrade the program (pip install -U layout-sweep)"
    return f"{where} has schema {version}, this program needs {schema.SCHEMA_VERSION}: run `sweep db upgrade` (it makes a copy first)"


def _back_up(database: Database, version: str | None) -> Path | None:
    """Copy a SQLite file, consistently, beside itself. A server's backups are its keeper's."""
    file = database.url.database
    if version is None or not database.is_sqlite or file is None:
        return None
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S%fZ")
    target = Path(f"{file}.{version}.{stamp}.backup")

    def copy(connection: sa.Connection) -> None:
        source: Any = connection.connection.dbapi_connection
        with sqlite3.connect(target) as destination:
            source.backup(destination)
        destination.close()

    database.read(copy)
    return target
