"""Missing rights in PostgreSQL: one line names the right, the role and the SQL that grants it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from db import migrate
from db.connection import url as urls
from db.connection.engine import Database
from db.store import Store
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from tests.db.builders import CONDITIONS, Bench, failure, record_failure

psycopg = pytest.importorskip("psycopg")
ROLE = "rights_tester"


@pytest.fixture
def server(postgresql_url: str) -> Iterator[psycopg.Connection]:
    """The server's keeper, in an empty database in which ROLE has the rights of PUBLIC."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {ROLE} LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
        yield connection
        connection.execute("DROP SCHEMA IF EXISTS public CASCADE")
        connection.execute("CREATE SCHEMA public")
        connection.execute(f"DROP OWNED BY {ROLE}")
        connection.execute(f"DROP ROLE {ROLE}")


@pytest.fixture
def url(postgresql_url: str) -> str:
    return postgresql_url.replace("//postgres:@", f"//{ROLE}@")


def refusal(error: type[SweepError] = StoreUnavailable) -> pytest.RaisesExc[SweepError]:
    return pytest.raises(error)


def said(caught: pytest.ExceptionInfo[SweepError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_role_that_may_make_no_tables(server: psycopg.Connection, url: str) -> None:
    with refusal() as caught:
        Store.open(url)
    assert said(caught).endswith(f"GRANT USAGE, CREATE ON SCHEMA public TO {ROLE}")
    server.execute(re.search(r"GRANT .*", said(caught))[0])  # type: ignore[index]
    Store.open(url).close()


@pytest.mark.parametrize(
    ("right", "write"), [("SELECT", False), ("INSERT", True), ("UPDATE", True)]
)
def test_a_right_on_a_table_that_is_revoked_midway(
    server: psycopg.Connection, url: str, right: str, write: bool
) -> None:
    server.execute(f"GRANT CREATE ON SCHEMA public TO {ROLE}")
    with Store.open(url) as store:
        bench = Bench.on(store)
        bench.measure()
        server.execute(
            f"ALTER TABLE trial OWNER TO CURRENT_USER; GRANT ALL ON trial TO {ROLE}; REVOKE "
            f"{right} ON trial FROM {ROLE}"
        )
        server.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {ROLE}")
        with refusal() as caught:
            bench.measure(7) if write else store.trials(bench.sweep_id)
        assert f"Role {ROLE} lacks {right} on table trial: GRANT SELECT" in said(caught)
        server.execute(re.search(r"GRANT .*", said(caught))[0])  # type: ignore[index]
        bench.measure(8)


def test_what_a_run_could_not_write_is_refused_before_it_begins(
    server: psycopg.Connection, url: str, postgresql_url: str
) -> None:
    """As `sweep doctor` asks: nothing is written to find out."""

    def refuse() -> None:
        database = Database(urls.resolve(url))
        try:
            migrate.refuse_unwritable(database)
        finally:
            database.close()

    def refuse_until_granted(words: str) -> None:
        with refusal() as caught:
            refuse()
        assert words in said(caught)
        server.execute(re.search(r"GRANT .*", said(caught))[0])  # type: ignore[index]

    for right in ("CREATE", "USAGE"):
        server.execute("GRANT USAGE, CREATE ON SCHEMA public TO PUBLIC")
        server.execute(f"REVOKE {right} ON SCHEMA public FROM PUBLIC")
        refuse_until_granted(f"role {ROLE} lacks {right} on schema public: GRANT")
        refuse()
        server.execute(f"REVOKE ALL ON SCHEMA public FROM {ROLE}")
    Store.open(postgresql_url).close()
    server.execute(f"GRANT USAGE ON SCHEMA public TO {ROLE}")
    for right, of in (("SELECT", "alembic_version"), ("INSERT", "attempt")):
        refuse_until_granted(f"lacks {right} on table {of}: GRANT")
    refuse()
    server.execute(f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
    with refusal() as caught:
        refuse()
    assert f"role {ROLE} can only read here" in said(caught)


def test_a_schema_or_a_table_that_is_dropped_midway(server: psycopg.Connection, url: str) -> None:
    server.execute(f"GRANT CREATE ON SCHEMA public TO {ROLE}")
    with Store.open(url) as store:
        bench = Bench.on(store)
        server.execute("DROP TABLE event CASCADE")
        with refusal() as caught:
            bench.measure()
        assert 'relation "event" does not exist. A table of the store is gone' in said(caught)
        server.execute("DROP SCHEMA public CASCADE")
        with refusal() as caught:
            store.trials(bench.sweep_id)
        assert "A table of the store is gone" in said(caught)


def test_a_schema_that_was_dropped_is_no_missing_right(
    server: psycopg.Connection, url: str
) -> None:
    server.execute("DROP SCHEMA public CASCADE")
    with refusal(UsageInvalid) as caught:
        Store.open(url, to_read=True)
    assert "has no schema public" in said(caught) and "GRANT" not in said(caught)
    server.execute("CREATE SCHEMA public")
    with refusal(UsageInvalid) as caught:
        Store.open(url, to_read=True)
    assert said(caught).endswith(f"GRANT USAGE ON SCHEMA public TO {ROLE}, if the store is there")


def test_a_database_that_is_dropped_midway_is_not_waited_for(
    server: psycopg.Connection, url: str
) -> None:
    server.execute("DROP DATABASE IF EXISTS dropped")
    server.execute(f"CREATE DATABASE dropped OWNER {ROLE}")
    with Store.open(url.replace("/postgres?", "/dropped?"), patience_seconds=600) as store:
        bench = Bench.on(store)
        server.execute("DROP DATABASE dropped WITH (FORCE)")
        with refusal() as caught:
            bench.measure()
        assert 'database "dropped" does not exist' in said(caught)


def test_a_server_that_takes_no_writes(server: psycopg.Connection, url: str) -> None:
    server.execute(f"GRANT CREATE ON SCHEMA public TO {ROLE}")
    Store.open(url).close()
    server.execute(f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
    with Store.open(url) as store:
        assert store.sweeps() == []
        with refusal() as caught:
            store.ensure_sweep("a", "{}", CONDITIONS)
        assert "in a read-only transaction. Name the primary" in said(caught)


def test_texts_of_a_database_without_an_encoding_are_texts(
    server: psycopg.Connection, url: str
) -> None:
    server.execute("DROP DATABASE IF EXISTS ascii")
    server.execute(
        "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE "
        f"template0 OWNER {ROLE}"
    )
    try:
        with Store.open(url.replace("/postgres?", "/ascii?")) as store:
            store.ensure_sweep("größe 😀", "{}", CONDITIONS)
            assert [row.name for row in store.sweeps()] == ["größe 😀"]
            bench = Bench.on(store)
            trial_id, number = bench.start()
            told = failure(FailureKind.USER_ERROR, message="zu groß: é 😀")
            record_failure(
                store, trial_id, number, epoch=bench.epoch, failure=told, event=TrialEvent.FAILED
            )
            assert store.trial(trial_id).attempts[-1].failure == told
            bench.measure(7)
    finally:
        server.execute("DROP DATABASE ascii WITH (FORCE)")


def test_a_database_whose_encoding_lacks_characters_is_refused_before_it_is_filled(
    server: psycopg.Connection, url: str
) -> None:
    server.execute("DROP DATABASE IF EXISTS latin")
    server.execute(
        "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE "
        f"template0 OWNER {ROLE}"
    )
    try:
        with refusal() as caught:
            Store.open(url.replace("/postgres?", "/latin?"))
        assert said(caught).endswith("createdb --encoding UTF8 --template template0 latin")
    finally:
        server.execute("DROP DATABASE latin WITH (FORCE)")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("sslmod=require", "option 'sslmod' .* did you mean sslmode?"),
        ("nonsense_of_mine=1", "option 'nonsense_of_mine' .* is unknown"),
        ("sslmode=foo", 'invalid sslmode value: "foo"'),
        ("connect_timeout=abc", "bad value for connect_timeout"),
        ("port=abc", "non-integer port"),
        ("port=99999999", "invalid port number"),
        ("options=-cfoo=1", "unrecognized configuration parameter"),
        ("service=nope", 'service "nope" not found'),
    ],
)
def test_an_option_of_the_url_that_means_nothing_is_the_users_to_correct(
    postgresql_url: str, option: str, says: str
) -> None:
    with refusal(UsageInvalid) as caught:
        Store.open(f"{postgresql_url}&{option}", patience_seconds=600)
    assert re.search(says, said(caught))
