"""The checks of `sweep doctor` on the store: the database, who reads it, SWEEP_HOME, its clock."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.cli.store.home import sweep_home
from orchestrator.core.errors import SweepError
from orchestrator.core.machines.check import Check, fail, ok, warn
from orchestrator.core.machines.node_health import (
    CLOCK_SKEW_SECONDS,
    GOOD_FREE_BYTES,
    MIN_FREE_BYTES,
)
from orchestrator.report.quantities import memory


def database(db: str | None) -> Check:
    from db import migrate, schema
    from db.connection import url  # SQLAlchemy, 0.3 s
    from db.connection.engine import Database

    try:
        resolved = url.resolve(db)
        where = url.display(resolved)
        file = Path(str(resolved.database))
        if resolved.drivername == "sqlite" and not file.exists():
            url.refuse_network_file_system(resolved)
            url.refuse_missing_folder(resolved)
            folder = _nearest_existing(file.parent)
            if _is_writable(folder):
                return ok("database", f"{where}, created by the first `sweep run`")
            advice = "make it writable, or choose another place with SWEEP_DB"
            return fail("database", f"{where} cannot be created: {folder} is not writable", advice)
        opened = Database(resolved)
        try:
            version = opened.read(
                lambda connection: migrate.current_version(connection, where=where)
            )
            migrate.refuse_unwritable(opened)
        finally:
            opened.close()
    except SweepError as exc:
        return fail("database", str(exc))
    if version not in (None, schema.SCHEMA_VERSION):
        found = f"{where} has schema {version}, this program needs {schema.SCHEMA_VERSION}"
        return fail("database", found, migrate.advice_for(str(version)))
    return ok("database", f"{where}, writable, {f'schema {version}' if version else 'still empty'}")


def reader(db: str | None) -> list[Check]:
    """The rights with which `sweep sql` runs on PostgreSQL; nothing for SQLite."""
    from db.connection import url  # SQLAlchemy, 0.3 s

    try:
        resolved = url.resolve(db)
    except SweepError:
        # The check of the database reports it.
        return []
    if resolved.drivername == "sqlite":
        return []
    from db.sql import reader_role  # needs SQLAlchemy

    try:
        role = reader_role.role_of_statements(resolved)
    except SweepError as exc:
        if not os.environ.get(url.READER_VARIABLE):
            return []  # as above
        return [fail("sql reader", str(exc), "until this is fixed, `sweep sql` is refused")]
    if role.is_own_login:
        return [ok("sql reader", f"`sweep sql` runs as role {role.name}, which can only select")]
    found = (
        f"`sweep sql` runs as role {role.name}; only this program's own check of each statement"
        " keeps it from writing"
    )
    advice = (
        "have a role created that can only select, and put its URL into"
        f" {url.READER_VARIABLE}: sweep db grant-reader"
    )
    if role.name == reader_role.NAME:
        found = (
            f"`sweep sql` logs in as {resolved.username} and then sets role {role.name}."
            f" A statement could return to the rights of {resolved.username}; only this program's"
            " own check prevents that"
        )
        advice = (
            f"put the URL of {role.name} into {url.READER_VARIABLE}: sweep db grant-reader shows it"
        )
    return [warn("sql reader", found, advice)]


def home() -> Check:
    folder = _nearest_existing(sweep_home())
    free = shutil.disk_usage(folder).free
    if not _is_writable(folder):
        advice = "choose another place: SWEEP_HOME=FOLDER"
        return fail("SWEEP_HOME", f"{folder} is not writable", advice)
    found = f"{sweep_home()}, {memory(free)} free"
    if free < GOOD_FREE_BYTES:
        result = fail if free < MIN_FREE_BYTES else warn
        return result("SWEEP_HOME", found, "logs and results are written there: free some space")
    return ok("SWEEP_HOME", found)


def clock() -> Check:
    now = datetime.now(tz=UTC)
    found = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now.year < 2025:
        return fail("clock", found, "set the clock: certificates and leases depend on it")
    try:
        with tempfile.NamedTemporaryFile(dir=_nearest_existing(sweep_home())) as file:
            skew = Path(file.name).stat().st_mtime - time.time()
    except OSError:
        # `home` reports that the folder is not writable.
        return ok("clock", found)
    if abs(skew) > CLOCK_SKEW_SECONDS:
        advice = "SWEEP_HOME is on a server with another clock: synchronise them (ntp)"
        return warn("clock", f"{found}, but files there are {skew:+.0f} s off", advice)
    return ok("clock", found)


def _is_writable(folder: Path) -> bool:
    """Tries it: a file system may refuse what the permissions allow."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
