"""What PostgreSQL says, as a line with the missing right, the role and the fix."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

from db.connection.postgresql_advice import (
    advised,
    first_line,
    is_final,
    is_wrong_url,
    quoted,
    refused,
)
from orchestrator.core.errors import StoreUnavailable, UsageInvalid

URL = make_url("postgresql+psycopg://ann:hunter2@db.example:5433/sweeps")


@pytest.mark.parametrize(
    ("message", "statement", "mended"),
    [
        (
            "permission denied for table trial",
            "SELECT id FROM trial",
            "Role ann lacks SELECT on table trial: GRANT SELECT ON ALL TABLES IN SCHEMA public"
            " TO ann",
        ),
        (
            "permission denied for table trial",
            "UPDATE trial SET state = 'queued'",
            "Role ann lacks UPDATE on table trial: GRANT SELECT, INSERT, UPDATE, DELETE ON ALL"
            " TABLES IN SCHEMA public TO ann",
        ),
        # To lock a row takes the right to change it.
        (
            "permission denied for relation sweep",
            "SELECT id FROM sweep FOR UPDATE",
            "Role ann lacks UPDATE on relation sweep: GRANT SELECT, INSERT, UPDATE, DELETE ON ALL"
            " TABLES IN SCHEMA public TO ann",
        ),
        (
            "permission denied for sequence trial_id_seq",
            "INSERT INTO trial VALUES (1)",
            "Role ann lacks USAGE on sequence trial_id_seq: GRANT USAGE, SELECT ON ALL SEQUENCES IN"
            " SCHEMA public TO ann",
        ),
        (
            "permission denied for schema public",
            "CREATE TABLE sweep (id int)",
            "Role ann lacks USAGE, CREATE on schema public: GRANT USAGE, CREATE ON SCHEMA public TO"
            " ann",
        ),
        (
            "permission denied for schema public",
            "SELECT 1 FROM sweep",
            "Role ann lacks USAGE on schema public: GRANT USAGE ON SCHEMA public TO ann",
        ),
        (
            'permission denied for database "sweeps"',
            "",
            "Role ann lacks CONNECT on database sweeps: GRANT CONNECT ON DATABASE sweeps TO ann",
        ),
        ('role "ann" is not permitted to log in', "", "Role ann lacks LOGIN: ALTER ROLE ann LOGIN"),
    ],
)
def test_a_missing_right_is_named_with_the_statement_that_gives_it(
    message: str, statement: str, mended: str
) -> None:
    said = advised(message, sqlstate="42501", url=URL, statement=statement)
    assert said == f"{message}. {mended}"


def test_the_role_and_schema_of_the_session_count_before_those_of_the_url() -> None:
    said = advised(
        "permission denied for table trial",
        sqlstate="42501",
        url=URL,
        statement="SELECT 1",
        role="Bob B",
        schema="lab",
    )
    assert said.endswith('GRANT SELECT ON ALL TABLES IN SCHEMA lab TO "Bob B"')


@pytest.mark.parametrize(
    ("sqlstate", "advice"),
    [
        ("25006", "Name the primary in the URL if this is a standby"),
        ("3F000", "CREATE SCHEMA IF NOT EXISTS public"),
        ("42P01", "put a backup back, or GRANT USAGE ON SCHEMA public TO ann"),
    ],
)
def test_an_error_without_a_known_text_is_advised_on_by_its_state(
    sqlstate: str, advice: str
) -> None:
    assert advice in advised("quelque chose", sqlstate=sqlstate, url=URL)
    assert advised("quelque chose", sqlstate=None, url=URL) == "quelque chose"


@pytest.mark.parametrize(
    ("message", "is_for_good"),
    [
        ('FATAL:  password authentication failed for user "ann"', True),
        ('FATAL:  role "ann" does not exist', True),
        ('FATAL:  database "sweeps" does not exist', True),
        ('invalid connection option "sslmod"', True),
        ("connection refused: is the server running?", False),
        ("FATAL:  the database system is starting up", False),
        ("FATAL:  sorry, too many clients already", False),
    ],
)
def test_only_what_waiting_cannot_help_is_final(message: str, is_for_good: bool) -> None:
    assert is_final(message) is is_for_good


def test_a_mistake_in_the_url_is_the_callers_and_others_are_the_stores() -> None:
    mistake = 'invalid integer value "x" for connection option "connect_timeout"'
    assert is_wrong_url(mistake)
    assert isinstance(refused(OSError(mistake), URL), UsageInvalid)
    gone = refused(OSError("Connection refused"), URL, before="sweep sql: ")
    assert isinstance(gone, StoreUnavailable)
    assert str(gone).startswith("sweep sql: store postgresql://ann@db.example:5433/sweeps: ")
    assert str(gone).endswith(
        "Is PostgreSQL running there, and are host and port of the URL right?"
    )


def test_a_password_that_the_driver_repeats_is_not_shown() -> None:
    said = advised('invalid value "hunter2" for option', sqlstate=None, url=URL)
    assert "hunter2" not in said


def test_of_a_message_the_first_line_is_shown_and_a_name_is_quoted_if_it_has_to_be() -> None:
    assert first_line("\n  one\ntwo") == "one"
    assert first_line(" \n") == "no message"
    assert len(first_line("x" * 5000)) == 300
    assert [quoted(name) for name in ("ann", "Ann", "a-b", 'a"b')] == [
        "ann",
        '"Ann"',
        '"a-b"',
        '"a""b"',
    ]
