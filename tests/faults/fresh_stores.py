"""Empty stores, made once: each call empties that of one worker, and returns its URL."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import sqlalchemy as sa

from db.connection import url as urls
from db.store import Store
from tests import new_store

WORKERS = 2  # processes with a store each

Fresh = Callable[[int], str]


def home(folder: Path, worker: int) -> Path:
    """Where a worker keeps all that it has, a store on SQLite included."""
    return folder / f"worker-{worker}"


def fresh_sqlite(folder: Path) -> Fresh:
    """A file for each worker, put back as it was."""
    template = folder / "template.sqlite"
    Store.open(f"sqlite:///{template}").close()

    def put_back(worker: int) -> str:
        file = home(folder, worker) / "sweep.sqlite"
        file.parent.mkdir(exist_ok=True)
        for old in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
            old.unlink(missing_ok=True)
        shutil.copy(template, file)
        return f"sqlite:///{file}"

    return put_back


def fresh_postgresql(server_url: str) -> Fresh:
    """A database for each worker, emptied."""
    with sa.create_engine(
        urls.resolve(server_url), isolation_level="AUTOCOMMIT"
    ).connect() as connection:
        for worker in range(WORKERS):
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS crash_{worker} WITH (FORCE)")
            connection.exec_driver_sql(f"CREATE DATABASE crash_{worker}")
    databases = [server_url.replace("/postgres?", f"/crash_{worker}?") for worker in range(WORKERS)]
    for url in databases:
        Store.open(url).close()

    connections: dict[
        int, psycopg.Connection
        # A new one would read the whole catalogue again.
    ] = {}

    def emptied(worker: int) -> str:
        if worker not in connections:
            connections[worker] = psycopg.connect(databases[worker], autocommit=True)
        connections[worker].execute(new_store.EMPTY)
        return databases[worker]

    return emptied
