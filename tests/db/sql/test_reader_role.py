"""The role that may only select: its rights, how it is made, and that it calls no function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from db.connection import url as urls
from db.sql import reader_role, readonly
from db.sql.sql_text import NamesInStatement, refuse_beyond_reading
from db.store import Store
from orchestrator.core.errors import SweepError, UsageInvalid
from tests.db.builders import Bench
from tests.db.sql import sql_traps
from tests.db.sql.test_readonly import ATTACKS, contents

psycopg = pytest.importorskip("psycopg")
ROLE, PASSWORD = "test_reader", "pass'word:\\1"


@pytest.fixture
def reader_url(postgresql_url: str) -> Iterator[str]:
    """The login of a role that was just granted, to a store with one measured trial."""
    with Store.open(postgresql_url) as store:
        Bench.on(store).measure()
    granted = reader_role.grant(urls.resolve(postgresql_url), ROLE, PASSWORD)
    assert (granted.is_new, granted.schema) == (True, "public")
    yield urls.display_login(urls.resolve(postgresql_url), ROLE, passfile=None)
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {ROLE}")
        connection.execute(f"DROP ROLE {ROLE}")


@contextmanager
def as_owner(url: str) -> Iterator[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def test_a_reader_may_select_and_nothing_else(postgresql_url: str, reader_url: str) -> None:
    with psycopg.connect(reader_url, autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM v_trial").fetchone() == (1,)
        assert connection.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
        connection.execute("SET default_transaction_read_only = off")  # then its rights alone hold
        for statement in (
            "DELETE FROM trial",
            "UPDATE sweep SET name = 'x'",
            "INSERT INTO model (digest) VALUES ('x')",
            "TRUNCATE event",
            "DROP TABLE trial",
            "DROP VIEW v_best",
            "CREATE TABLE evil (a int)",
            "CREATE ROLE evil",
            "SELECT nextval('trial_id_seq')",
            "SELECT * FROM trial FOR UPDATE",
            "SELECT pg_read_file('/etc/hostname')",
            "COPY trial TO PROGRAM 'true'",
            "COPY trial TO '/tmp/evil'",
            "SELECT pg_create_physical_replication_slot('evil')",
            "SELECT rolpassword FROM pg_authid",
            "SET ROLE postgres",
            "SET SESSION AUTHORIZATION postgres",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'postgres'",
            "ALTER ROLE test_reader SUPERUSER",
        ):
            with pytest.raises(
                (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidParameterValue)
            ):
                connection.execute(statement)
        assert reader_role.powers(connection) == []


def test_a_reader_sees_tables_that_come_later_and_granting_again_changes_nothing(
    postgresql_url: str, reader_url: str
) -> None:
    with as_owner(postgresql_url) as connection:
        connection.execute("CREATE TABLE later (a int)")
        connection.execute(f"GRANT DELETE ON trial TO {ROLE}")
    assert readonly.query(reader_url, "SELECT * FROM later").rows == []
    granted = reader_role.grant(urls.resolve(postgresql_url), ROLE, None)
    assert not granted.is_new
    with as_owner(postgresql_url) as connection:
        assert connection.execute(
            f"SELECT has_table_privilege('{ROLE}', 'trial', 'DELETE')"
        ).fetchone() == (False,)
        connection.execute("DROP TABLE later")


def test_people_are_answered_as_the_reader_where_one_is_named(
    postgresql_url: str, reader_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = "SELECT current_user, session_user"
    monkeypatch.setenv(urls.READER_VARIABLE, reader_url)
    assert readonly.query(postgresql_url, who).rows == [(ROLE, ROLE)]
    assert readonly.own_query(postgresql_url, "SELECT session_user").rows == [("postgres",)]
    assert reader_role.role_of_statements(urls.resolve(postgresql_url)).is_own_login
    monkeypatch.setenv(urls.READER_VARIABLE, postgresql_url)
    with pytest.raises(UsageInvalid, match=r"SUPERUSER.*sweep db grant-reader"):
        readonly.query(postgresql_url, who)
    monkeypatch.setenv(urls.READER_VARIABLE, reader_url.replace("/postgres?", "/other?"))
    with pytest.raises(
        UsageInvalid, match=r"names postgresql://.*; it should be a login for database postgres"
    ):
        readonly.query(postgresql_url, who)


@pytest.mark.parametrize("can_become", [True, False])
def test_who_granted_a_reader_without_being_superuser_asks_as_it_if_the_server_lets_them(
    postgresql_url: str, can_become: bool
) -> None:
    """From PostgreSQL 16 on, who creates a role is a member that may not become it by itself."""
    owner, database = "test_owner", "test_owned"
    with as_owner(postgresql_url) as connection:
        connection.execute(f"CREATE ROLE {owner} LOGIN CREATEROLE")
        connection.execute(f"CREATE DATABASE {database} OWNER {owner}")
    url = postgresql_url.replace("//postgres:", f"//{owner}:").replace(
        "/postgres?", f"/{database}?"
    )
    try:
        with Store.open(url) as store:
            Bench.on(store).measure()
        reader_role.grant(urls.resolve(url), reader_role.NAME, PASSWORD)
        if not can_become:
            with as_owner(url) as connection:
                connection.execute(f"REVOKE {reader_role.NAME} FROM {owner} GRANTED BY {owner}")
        role = reader_role.role_of_statements(urls.resolve(url))
        assert (role.name, role.is_own_login) == (
            reader_role.NAME if can_become else owner,
            False,
        )
        answer = readonly.query(url, "SELECT count(*) AS num FROM v_trial")
        assert answer.rows == [(1,)]
    finally:
        with as_owner(postgresql_url) as connection:
            connection.execute(f"DROP DATABASE {database} WITH (FORCE)")
            connection.execute(f"DROP ROLE IF EXISTS {reader_role.NAME}")
            connection.execute(f"DROP ROLE {owner}")


@pytest.mark.long
def test_a_fooled_lexer_calls_nothing_that_harms_through_the_reader(
    postgresql_url: str, reader_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attack, and those that were seen to work as a superuser, with the lexer taken away."""
    monkeypatch.setenv(urls.READER_VARIABLE, reader_url)
    monkeypatch.setattr(
        readonly,
        "refuse_beyond_reading",
        lambda sql: NamesInStatement(all=frozenset(), before_parenthesis=frozenset()),
    )
    before = contents(postgresql_url)
    escapes = (
        "SELECT 1 AS x😀$$, set_config('role','none',false), pg_read_file('/etc/hostname'), 2 AS "
        "y😀$$",
        "SELECT set_config('role','none',false), pg_create_physical_replication_slot('evil')",
        "SELECT query_to_xml('reset role; delete from trial', true, true, '')",
        "SELECT set_config('session_authorization','postgres',false)",
        "SELECT set_config('transaction_read_only','off',false), query_to_xml('delete from "
        "trial', true, true, '')",
    )
    for attack in (*ATTACKS, *escapes):
        if "pg_advisory" not in attack and "pg_reload_conf" not in attack:
            try:
                readonly.query(
                    postgresql_url,
                    attack.replace("{out}", "/tmp/must-not-appear"),
                    timeout_seconds=5,
                )
            except SweepError:
                pass
    monkeypatch.delenv(urls.READER_VARIABLE)
    assert contents(postgresql_url) == before
    with as_owner(postgresql_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)


def test_roles_that_may_do_more_are_not_made_readers(postgresql_url: str, reader_url: str) -> None:
    store = urls.resolve(postgresql_url)
    with pytest.raises(UsageInvalid, match="is the one that the store is written with"):
        reader_role.grant(store, "postgres", None)
    with as_owner(postgresql_url) as connection:
        connection.execute("CREATE ROLE too_much CREATEDB")
        connection.execute("GRANT pg_read_server_files TO too_much")
    try:
        with pytest.raises(
            UsageInvalid, match=r"has CREATEDB, membership in pg_read_server_files\. Name another"
        ):
            reader_role.grant(store, "too_much", None)
    finally:
        with as_owner(postgresql_url) as connection:
            connection.execute("DROP ROLE too_much")


def test_no_secret_of_the_owner_is_in_the_url_of_the_reader() -> None:
    url = urls.resolve(
        "postgresql://owner:s3cret@db.example:5433/sweeps"
        "?sslmode=require&sslpassword=t0p&user=owner&sslkey=k"
    )
    shown = urls.display_login(url, "sweep_reader", passfile="/home/me/r.pgpass")
    assert shown == (
        "postgresql://sweep_reader@db.example:5433/sweeps"
        "?passfile=/home/me/r.pgpass&sslmode=require"
    )
    assert urls.pgpass_line(url, "r", "a:b\\c") == "*:*:sweeps:r:a\\:b\\\\c"


@pytest.fixture
def canaries(postgresql_url: str) -> Iterator[Any]:
    """A connection with notices of each canary function that ran, also of a domain's check."""
    with Store.open(postgresql_url) as store:
        Bench.on(store).measure()
    with as_owner(postgresql_url) as connection:
        for argument in ("text", "trial", "anyelement"):
            connection.execute(
                f"CREATE FUNCTION canary({argument}) RETURNS text LANGUAGE plpgsql AS"
                " $f$ BEGIN RAISE NOTICE 'canary'; RETURN 'sung'; END $f$"
            )
        connection.execute(
            "CREATE FUNCTION over(int) RETURNS int LANGUAGE plpgsql AS $f$ BEGIN RAISE NOTICE "
            "'canary'; RETURN 1; END $f$"
        )
        connection.execute("CREATE DOMAIN caged AS text CHECK (canary(VALUE) IS NOT NULL)")
        yield connection
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


def sung(connection: Any, sql: str) -> int:
    """How often a canary runs when `sweep sql` runs a statement (here without a child process)."""
    heard: list[str] = []
    connection.add_notice_handler(lambda notice: heard.append(notice.message_primary))
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '5s'")
            reader_role.refuse_hidden_calls(connection, refuse_beyond_reading(sql))
            connection.execute(sql.encode(), prepare=True)
    except (psycopg.Error, UsageInvalid):
        pass
    finally:
        connection._notice_handlers.clear()
    return heard.count("canary")


def test_nothing_runs_that_was_not_read(canaries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = itertools.chain(
        (
            "SELECT t.canary FROM trial t",
            "SELECT (t).canary FROM trial t",
            'SELECT t."canary" FROM trial t',
            "SELECT 'x'::caged",
            "SELECT over(1)",
        ),
        (
            sql
            for sql in itertools.islice(sql_traps.paired(), 0, None, 37)
            if sql_traps.is_let_through(sql)
        ),
        itertools.islice(
            (sql for sql in sql_traps.endless(2) if sql_traps.is_let_through(sql)), 200
        ),
        itertools.islice((sql for sql in sql_traps.bent(2) if sql_traps.is_let_through(sql)), 400),
    )
    assert [sql for sql in hostile if sung(canaries, sql)] == []
    # Each canary is one that would be heard.
    monkeypatch.setattr(reader_role, "refuse_hidden_calls", lambda connection, named: None)
    for sql in ("SELECT t.canary FROM trial t", "SELECT 'x'::caged", "SELECT over(1)"):
        assert sung(canaries, sql) > 0
