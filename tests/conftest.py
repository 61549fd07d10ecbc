"""Fixtures of stores on SQLite and on a real PostgreSQL, and the isolation of test runs."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from db.store import Store
from tests import ambient, guard, kept_compilations, new_postgresql, new_store
from tests.file_scheduling import FileScheduling, places_of_files

FOLDER = pytest.StashKey[
    Path
    # This pytest process's folder for home, working folder and PostgreSQL.
]()

# A busy machine takes long over an example that is quick to draw.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
settings.register_profile("few", max_examples=25)  # `make test`


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is imported that reads the environment: children inherit what is so now."""
    folder = Path(tempfile.mkdtemp(prefix="sweep-tests-"))  # a socket's path: 107 characters
    config.stash[FOLDER] = folder
    guard.begin(os.environ, folder)
    new_postgresql.keep_in(os.environ, folder)
    for name in ("home", "work"):
        (folder / name).mkdir()
    ambient.leave_behind(os.environ, home=folder / "home")
    ambient.hear_signals()


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    # Else workers run the tests.
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        ambient.enter(config.stash[FOLDER] / "work")  # for fixtures that several tests share


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without the garbage collector, and keep it off all that was imported.

    Its searches through millions of objects took a third of the time of a collection.
    """
    gc.disable()
    try:
        if hasattr(session.config, "workerinput"):
            _import_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_share(config: pytest.Config) -> None:
    """Import this worker's share of the test modules before all others.

    In a new clone each module is compiled at its first import, with pytest's assertions. So a
    worker finds most modules compiled by another one.
    """
    given = [config.rootpath / argument for argument in config.args]
    files = sorted(file for folder in given for file in folder.rglob("test_*.py"))
    number, num_workers = (config.workerinput[key] for key in ("workerid", "workercount"))
    for file in files[int(number.removeprefix("gw")) :: num_workers]:
        # The collection imports it again, and shows what is wrong with it.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(
                ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
            )


@pytest.fixture(autouse=True, scope="session")
def _compiled_once() -> Iterator[None]:
    """Compile each statement of a store once for all tests."""
    with kept_compilations.kept():
        yield


@pytest.fixture(autouse=True)
def _own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in its own folder, and so do the processes that it starts."""
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = places_of_files(items)
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def postgresql_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a PostgreSQL for this session. Skips if none starts, which fails in CI."""
    folder = request.config.stash[FOLDER] / "pg"
    folder.mkdir()
    try:
        server = new_postgresql.server(folder)
    except Exception as exc:  # noqa: BLE001
        # Any failure is a reason to skip.
        shutil.rmtree(folder, ignore_errors=True)
        reason = f"PostgreSQL does not start here: {type(exc).__name__}: {exc}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    import psycopg

    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")  # no test pulls the plug
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgresql_url(postgresql_server: str, request: pytest.FixtureRequest) -> str:
    """An empty database for a `store`, emptied for each test: to create one takes far longer."""
    import psycopg

    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        if "store" in request.fixturenames and new_store.emptied(connection):
            return postgresql_server
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        if "store" in request.fixturenames:
            Store.open(postgresql_server).close()
            new_store.keep_tables(connection)
    return postgresql_server


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store/sweep.sqlite"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, on each of the two."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with (
        new_store.on_sqlite(store_url)
        if store_url.startswith("sqlite")
        else Store.open(store_url) as opened
    ):
        yield opened


@pytest.fixture
def sqlite_store(sqlite_url: str) -> Iterator[Store]:
    with new_store.on_sqlite(sqlite_url) as opened:
        yield opened
