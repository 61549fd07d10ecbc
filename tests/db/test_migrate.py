"""An empty database gets its tables; any other is upgraded only on request, after a copy."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from db import migrate, schema
from db.connection import url
from db.connection.engine import Database
from db.sql import readonly
from db.store import Store
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid
from tests.db import next_version
from tests.db.builders import Bench


def run(store_url: str, statement: str) -> None:
    database = Database(url.resolve(store_url))
    database.write(lambda connection, change: connection.execute(sa.text(statement)))
    database.close()


def test_the_newest_migration_is_the_version_that_the_code_asks_for() -> None:
    assert ScriptDirectory(str(migrate.MIGRATIONS)).get_heads() == [schema.SCHEMA_VERSION]


def test_the_migrations_make_the_tables_that_the_code_knows(store: Store) -> None:
    def differences(connection: sa.Connection) -> list[object]:
        views = set(sa.inspect(connection).get_view_names())
        assert views == set(schema.VIEWS)
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": False}
        )
        return list(compare_metadata(context, schema.metadata))

    assert store._database.read(differences) == []


def test_postgresql_says_what_every_column_means(postgresql_url: str) -> None:
    """Tables and views have comments: see `\\d+ v_best` in psql."""
    with Store.open(postgresql_url) as store:
        said = store._database.read(
            lambda connection: connection.execute(
                sa.text(
                    "SELECT c.table_name, c.column_name, "
                    "col_description(c.table_name::regclass, c.ordinal_position)"
                    " FROM information_schema.columns c WHERE table_schema = 'public' AND "
                    "table_name <> 'alembic_version'"
                )
            ).all()
        )
    means = migrate.meanings()
    assert {(table, name, text) for table, name, text in said} == {
        (table, name, means[name]) for table, name, _ in said
    }
    assert {table for table, _, _ in said} == {*schema.metadata.tables, *schema.VIEWS}


def test_a_store_of_an_earlier_version_is_upgraded_with_all_that_was_in_it(
    store_url: str, tmp_path: Path
) -> None:
    with Store.open(store_url) as store:
        trial_id = Bench.on(store).measure()
    before = schema.SCHEMA_VERSION
    with next_version.in_force(tmp_path):
        with pytest.raises(
            StoreUnavailable, match=r"run `sweep db upgrade` \(it makes a copy first\)"
        ):
            Store.open(store_url)
        assert migrate.upgrade(store_url)[:2] == (before, next_version.VERSION)
        with Store.open(store_url) as store:
            assert store.trial(trial_id).trial.tokens_per_second_per_gpu == 1000.0
    with pytest.raises(StoreUnavailable, match="newer than this program"):
        Store.open(store_url)


def test_a_store_from_before_the_first_release_is_refused_by_all(store_url: str) -> None:
    Store.open(store_url).close()
    older = f"{int(schema.FIRST_VERSION) - 1:04d}"
    run(store_url, f"UPDATE alembic_version SET version_num = '{older}'")
    for ask in (Store.open, migrate.upgrade, lambda place: Store.open(place, to_read=True)):
        with pytest.raises(
            StoreUnavailable,
            match=f"has schema {older}, and not this program's {schema.SCHEMA_VERSION}: it is",
        ) as caught:
            ask(store_url)
        assert "Keep it for the program that made it, and begin another (SWEEP_DB)" in str(
            caught.value
        )


def test_an_upgrade_of_the_newest_changes_nothing_and_copies_nothing(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        trial_id = Bench.on(store).measure()
    assert migrate.upgrade(sqlite_url) == (schema.SCHEMA_VERSION, schema.SCHEMA_VERSION, None)
    query = "SELECT trial_id, state FROM v_trial"
    assert readonly.query(sqlite_url, query).rows == [(trial_id, "measured")]


def test_a_sqlite_file_is_copied_before_an_upgrade_changes_anything(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moves(connection: object) -> str:
        raise StoreUnavailable("the disk is full")

    with Store.open(sqlite_url) as store:
        trial_id = Bench.on(store).measure()
    run(sqlite_url, "UPDATE alembic_version SET version_num = '0013'")
    monkeypatch.setattr(schema, "FIRST_VERSION", "0013")
    monkeypatch.setattr(migrate, "_move", moves)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        migrate.upgrade(sqlite_url)
    folder = Path(sqlite_url.removeprefix("sqlite:///")).parent
    (copy,) = folder.glob("*.0013.*.backup")
    run(f"sqlite:///{copy}", f"UPDATE alembic_version SET version_num = '{schema.SCHEMA_VERSION}'")
    query = "SELECT trial_id, state FROM v_trial"
    assert readonly.query(f"sqlite:///{copy}", query).rows == [(trial_id, "measured")]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("9999", f"newer than this program's {schema.SCHEMA_VERSION}: upgrade the program"),
        ("0000", "it is older than the first release and cannot be upgraded"),
    ],
)
def test_a_database_of_another_version_is_refused_with_what_to_do(
    store_url: str, version: str, says: str
) -> None:
    Store.open(store_url).close()
    run(store_url, f"UPDATE alembic_version SET version_num = '{version}'")
    with pytest.raises(StoreUnavailable, match=says):
        Store.open(store_url)


def test_a_newer_database_is_not_upgraded_backwards(store_url: str) -> None:
    Store.open(store_url).close()
    run(store_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreUnavailable, match="newer than this program"):
        migrate.upgrade(store_url)


def test_somebody_elses_database_is_left_alone(store_url: str) -> None:
    run(store_url, "CREATE TABLE trial (id int)")
    with pytest.raises(UsageInvalid, match=r"has tables of other origin \(trial\)"):
        Store.open(store_url)
    database = Database(url.resolve(store_url))
    assert database.read(lambda connection: sa.inspect(connection).get_table_names()) == ["trial"]
    database.close()


def test_a_file_of_another_program_does_not_become_a_store(sqlite_url: str) -> None:
    run(sqlite_url, "CREATE TABLE studies (id int)")
    for ask in (Store.open, migrate.upgrade, lambda place: Store.open(place, to_read=True)):
        with pytest.raises(UsageInvalid, match=r"has tables of other origin \(studies\)"):
            ask(sqlite_url)


@pytest.mark.parametrize("to_read", [False, True])
def test_a_store_that_another_process_has_just_made_is_opened(
    store_url: str, monkeypatch: pytest.MonkeyPatch, to_read: bool
) -> None:
    Store.open(store_url).close()
    database = Database(url.resolve(store_url))
    first_look, read = [None], database.read
    # The other process was faster than everything after our first look at the version.
    monkeypatch.setattr(
        database, "read", lambda look: first_look.pop() if first_look else read(look)
    )
    migrate.ensure_head(database, to_read=to_read)
    assert not first_look
    database.close()


def test_several_processes_that_meet_an_empty_database_create_it_once(store_url: str) -> None:
    errors: list[BaseException] = []

    def create() -> None:
        try:
            Store.open(store_url).close()
        except BaseException as exc:  # noqa: BLE001  shown below
            errors.append(exc)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with Store.open(store_url) as store:
        Bench.on(store).measure()


def test_a_migration_that_dies_half_way_leaves_the_database_as_it_was(
    store_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Store.open(store_url) as store:
        trial_id = Bench.on(store).measure()
    with next_version.in_force(tmp_path), monkeypatch.context() as patch:
        # Fails when all tables and views are dropped and made.
        patch.setattr(schema, "VIEWS", (*schema.VIEWS, "v_that_does_not_exist"))
        with pytest.raises(FileNotFoundError, match="v_that_does_not_exist"):
            migrate.upgrade(store_url)
    with Store.open(store_url) as store:
        assert store.trial(trial_id).trial.tokens_per_second_per_gpu == 1000.0
    assert readonly.query(store_url, "SELECT count(*) FROM v_best").rows == [(1,)]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            "UPDATE alembic_version SET version_num = 'rubbish'",
            "has schema version 'rubbish', which should be one row of four digits",
        ),
        (
            "INSERT INTO alembic_version VALUES ('0005')",
            "which should be one row of four digits. Put a backup back",
        ),
        (
            "DELETE FROM alembic_version",
            "has lost its schema version: alembic_version is empty. Put a backup back",
        ),
        (
            "ALTER TABLE alembic_version RENAME COLUMN version_num TO other",
            "a table alembic_version of other origin",
        ),
    ],
)
def test_rubbish_in_the_version_table_is_said_in_one_short_line(
    store_url: str, statement: str, says: str
) -> None:
    Store.open(store_url).close()
    run(store_url, statement)
    for ask in (Store.open, migrate.upgrade, lambda place: Store.open(place, to_read=True)):
        with pytest.raises(SweepError) as caught:
            ask(store_url)
        # A table of another program stays one, however often the command is given.
        assert caught.value.exit_code == (2 if "other origin" in says else 75)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
