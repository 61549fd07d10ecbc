"""Migrations: an empty database gets the newest schema at once, others by `sweep db upgrade`."""

from __future__ import annotations

import datetime as dt
import re
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db import schema
from db.connection import rights, url
from db.connection.engine import Database
from db.connection.postgresql_advice import quoted
from orchestrator.core.errors import StoreUnavailable, UsageInvalid
from orchestrator.core.problem.layout import LAYOUT_COLUMNS

_FOLDER = Path(__file__).parent
MIGRATIONS = _FOLDER / "migrations"
_VERSION_TABLE = "alembic_version"
# PostgreSQL's advisory lock, so that two processes create the tables of an empty database once.
_LOCK_KEY = 0x53574545
# Tables of another program, in the message that refuses them.
_NAMES_SHOWN = 5


def ensure_head(database: Database, *, to_read: bool = False) -> None:
    """Give an empty database its tables; with `to_read` raise UsageInvalid instead.

    Raises StoreUnavailable if the database has another version than this code.
    """
    version = database.read(partial(current_version, where=url.display(database.url)))
    if version is None:
        version = _refuse_foreign(database)
    if version is None:
        if to_read:
            raise UsageInvalid(
                database.read(partial(_nothing_here, where=url.display(database.url)))
            )
        database.read(_refuse_encoding)
        database.write(lambda connection, change: _move(connection), durable=True)
        return
    if version != schema.SCHEMA_VERSION:
        raise StoreUnavailable(_mismatch(url.display(database.url), version))


def refuse_unwritable(database: Database) -> None:
    """Raise StoreUnavailable if `sweep run` could not write its results here. Changes nothing.

    Raises UsageInvalid for a database of another program.
    """
    version = database.read(partial(current_version, where=url.display(database.url)))
    if version is None:
        _refuse_foreign(database)
        database.read(_refuse_encoding)
    if database.is_sqlite:
        # Takes the write lock and releases it.
        database.write(lambda connection, change: None)
    else:
        tables = () if version is None else tuple(schema.metadata.tables)
        database.read(partial(rights.refuse_missing, tables=tables))


def upgrade(database_url: str | None) -> tuple[str | None, str, Path | None]:
    """Bring a database to this code's schema, after a copy of a SQLite file that will change.

    Returns the versions before and after, and the path of the copy. Raises StoreUnavailable if its
    version cannot be upgraded.
    """
    database = Database(url.resolve(database_url))
    try:
        before = database.read(partial(current_version, where=url.display(database.url)))
        if before is None:
            before = _refuse_foreign(database)
        if before is not None and not schema.FIRST_VERSION <= before <= schema.SCHEMA_VERSION:
            raise StoreUnavailable(_mismatch(url.display(database.url), before))
        copy = _back_up(database, before) if before != schema.SCHEMA_VERSION else None
        after = database.write(lambda connection, change: _move(connection), durable=True)
        return before, after, copy
    finally:
        database.close()


def advice_for(version: str) -> str:
    """Return what to do about a store of another version than this code's."""
    if version > schema.SCHEMA_VERSION:
        return "upgrade the program (pip install -U layout-sweep)"
    if version < schema.FIRST_VERSION:
        return (
            "it is older than the first release and cannot be upgraded. "
            "Keep it for the program that made it, and begin another (SWEEP_DB)"
        )
    return "run `sweep db upgrade` (it makes a copy first)"


def current_version(connection: sa.Connection, *, where: str = "the database") -> str | None:
    """The schema's version; None: the database is new.

    Raises StoreUnavailable for what is no version, and UsageInvalid for another program's table.
    """
    if not sa.inspect(connection).has_table(_VERSION_TABLE):
        return None
    try:
        statement = sa.text(f"SELECT version_num FROM {_VERSION_TABLE} LIMIT 3")
        rows = connection.scalars(statement).all()
    except (sa.exc.OperationalError, sa.exc.ProgrammingError) as exc:
        if "version_num" not in str(exc.orig):
            raise
        raise UsageInvalid(
            f"{where} has a table {_VERSION_TABLE} of other origin. Choose an empty database"
        ) from None
    if len(rows) > 1 or any(not _is_version(row) for row in rows):
        shown = ", ".join(repr(row)[:40] for row in rows[:2])
        raise StoreUnavailable(
            f"{where} has schema version {shown}, which should be one row of four digits. "
            "Put a backup back"
        )
    return str(rows[0]) if rows else None


def _is_version(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9]{4}", value) is not None


def _move(connection: sa.Connection) -> str:
    """Run the migrations in this transaction, recreate the views, and return the version."""
    # Imported here: alembic takes 0.2 s, and a store of the right version does not need it.
    from alembic import command
    from alembic.config import Config

    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
    if current_version(connection) == schema.SCHEMA_VERSION:
        return schema.SCHEMA_VERSION  # another process was faster
    for view in reversed(schema.VIEWS):
        connection.execute(sa.text(f"DROP VIEW IF EXISTS {view}"))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, schema.SCHEMA_VERSION)
    for view in schema.VIEWS:
        connection.exec_driver_sql(_source(view))
    if connection.dialect.name == "postgresql":
        _comment(connection)
    return schema.SCHEMA_VERSION


def meanings() -> dict[str, str]:
    """The meaning of each column of tables and views.

    Raises ValueError if two tables give a name different meanings.
    """
    found: dict[str, str] = {}
    for table in schema.metadata.sorted_tables:
        for column in table.columns:
            means = column.comment or ""
            if not means or found.setdefault(column.name, means) != means:
                raise ValueError(
                    f"column {table.name}.{column.name} means {means!r}, "
                    f"elsewhere {found.get(column.name)!r}"
                )
    for view in schema.VIEWS:
        found |= dict(re.findall(r"(?m)^-- (\w+): (.*)$", _source(view)))
    return found


def _source(view: str) -> str:
    """The statement that makes a view, after comments that explain the view and its own columns."""
    columns = ",\n    ".join(f"trial.{column.name}" for column in LAYOUT_COLUMNS)
    text = (_FOLDER / "views" / f"{view}.sql").read_text()
    return text.replace("{layout_columns}", columns)


def _comment(connection: sa.Connection) -> None:
    """Give PostgreSQL the meanings of all columns (`\\d+ v_best` in psql), by one statement."""
    means = meanings()
    columns = connection.execute(
        sa.text(
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = current_schema() AND table_name = ANY(:names)"
        ),
        {"names": [*schema.metadata.tables, *schema.VIEWS]},
    )
    comments = [
        (f"{quoted(table)}.{quoted(name)}", means[name].replace("'", "''").replace("%", "%%"))
        for table, name in columns
        if name in means
    ]
    connection.exec_driver_sql(
        "; ".join(f"COMMENT ON COLUMN {place} IS '{text}'" for place, text in comments)
    )


def _refuse_foreign(database: Database) -> str | None:
    """Raise UsageInvalid if another program made a table with one of our names, or a SQLite file.

    A server's database may have tables with other names. Returns the version if another process has
    made the store since the caller looked; None: there is no store yet.
    """
    found = database.read(lambda connection: set(sa.inspect(connection).get_table_names()))
    if _VERSION_TABLE in found:
        version = database.read(partial(current_version, where=url.display(database.url)))
        if version is not None:
            return version
    strangers = found & set(schema.metadata.tables)
    if strangers == set(schema.metadata.tables) and _VERSION_TABLE in found:
        raise StoreUnavailable(
            f"{url.display(database.url)} has lost its schema version: {_VERSION_TABLE} is empty. "
            "Put a backup back"
        )
    if database.is_sqlite:
        strangers |= found - {_VERSION_TABLE}
    if strangers:
        names = sorted(strangers)
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        raise UsageInvalid(
            f"{url.display(database.url)} has tables of other origin ({shown}). "
            "Choose an empty database, or a new file"
        )
    return None


def _nothing_here(connection: sa.Connection, *, where: str) -> str:
    begin = "Name another with SWEEP_DB or --db, or begin one: sweep run FILE"
    if connection.dialect.name == "postgresql":
        role, own_schema, public = connection.exec_driver_sql(
            "SELECT current_user, current_schema(), to_regnamespace('public')"
        ).one()
        if own_schema is None and public is None:
            return (
                f"{where} has no schema public, where a store would be: restore it from a backup,"
                " or create an empty one: CREATE SCHEMA public"
            )
        if own_schema is None:
            return (
                f"role {role} sees no schema at {where}: "
                f"GRANT USAGE ON SCHEMA public TO {quoted(role)}, if the store is there"
            )
    return f"there is no store at {where}. {begin}"


def _refuse_encoding(connection: sa.Connection) -> None:
    """Raise StoreUnavailable for an encoding that cannot store every result."""
    if connection.dialect.name != "postgresql":
        return
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding not in ("UTF8", "SQL_ASCII"):
        name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
        fix = f"createdb --encoding UTF8 --template template0 {name}"
        raise StoreUnavailable(
            f"database {name} has encoding {encoding}, which lacks characters that results hold. "
            f"Make it anew: {fix}"
        )


def _mismatch(where: str, version: str) -> str:
    newer = "newer than" if version > schema.SCHEMA_VERSION else "and not"
    return (
        f"{where} has schema {version}, {newer} this program's {schema.SCHEMA_VERSION}: "
        f"{advice_for(version)}"
    )


def _back_up(database: Database, version: str | None) -> Path | None:
    """Copy a SQLite file, consistently, into its folder. A server is backed up by its owner."""
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
