"""The database that a URL means, and what is shown of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from db.connection.url import (
    DEFAULT_PATH,
    display,
    display_login,
    pgpass_line,
    reader_of,
    redact,
    resolve,
)
from orchestrator.core.errors import UsageInvalid

SERVER = "postgresql://ann:p%40ss@db.example:5433/sweeps"


def test_the_callers_url_counts_before_the_environment_and_the_working_folder(
    tmp_path: Path,
) -> None:
    variable = {"SWEEP_DB": f"sqlite:///{tmp_path}/b.sqlite"}
    asked = f"sqlite:///{tmp_path}/a.sqlite"
    assert resolve(asked, environment=variable).database == f"{tmp_path}/a.sqlite"
    assert resolve(None, environment=variable).database == f"{tmp_path}/b.sqlite"
    for environment in ({}, {"SWEEP_DB": ""}):
        found = resolve(None, environment=environment)
        assert (found.drivername, found.database) == ("sqlite", str(DEFAULT_PATH.absolute()))


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_server_has_one_driver_whatever_its_url_begins_with(scheme: str) -> None:
    found = resolve(f"{scheme}://ann@db.example/sweeps", environment={})
    assert found.drivername == "postgresql+psycopg"
    assert (found.username, found.host, found.database) == ("ann", "db.example", "sweeps")


def test_a_bare_at_sign_belongs_to_the_password() -> None:
    found = resolve("postgresql://ann:p@ss@db.example/sweeps", environment={})
    assert (found.password, found.host) == ("p@ss", "db.example")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://db.example/sweeps", "database 'mysql' is not supported"),
        ("sweeps.sqlite", "for the file 'sweeps.sqlite' it is sqlite:////"),
        ("sqlite://", "a plain file"),
        ("sqlite:///:memory:", "a plain file"),
        ("sqlite:////tmp", "store /tmp is a folder"),
        ("sqlite:////dev/null", "store /dev/null is a device"),
        ("sqlite:////tmp/x.sqlite?mode=ro", "option 'mode' is unknown; the only one is ?unsafe=1"),
        ("sqlite:///~no-such-user-here/x.sqlite", "there is no user of that name"),
        ("postgresql://ann:a@b/c@db.example/sweeps", "an @ behind the host"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(UsageInvalid) as refused:
        resolve(url, environment={})
    assert why in str(refused.value)


def test_a_url_that_cannot_be_read_is_not_repeated_since_it_may_hold_a_password() -> None:
    with pytest.raises(UsageInvalid, match="cannot be read") as refused:
        resolve("postgresql//ann:hunter2@db.example", environment={})
    assert "hunter2" not in str(refused.value)


def test_a_reader_logs_in_to_the_same_database() -> None:
    url = resolve(SERVER, environment={})
    same = {"SWEEP_DB_READER": "postgresql://reader@db.example:5433/sweeps"}
    found = reader_of(url, environment=same)
    assert found is not None
    assert found.username == "reader"
    assert reader_of(url, environment={}) is None
    # Nobody logs in to a file.
    assert reader_of(resolve("sqlite:////tmp/x.sqlite", environment={}), environment=same) is None
    for other in ("postgresql://reader@db.example/others", "sqlite:////tmp/x.sqlite"):
        with pytest.raises(UsageInvalid, match="it should be a login for database sweeps"):
            reader_of(url, environment={"SWEEP_DB_READER": other})


def test_a_shown_url_has_no_password_and_no_option() -> None:
    url = resolve(f"{SERVER}?sslmode=require", environment={})
    assert display(url) == "postgresql://ann@db.example:5433/sweeps"
    assert display(resolve("sqlite:////tmp/x.sqlite", environment={})) == "sqlite:////tmp/x.sqlite"


def test_the_login_of_another_role_keeps_only_what_is_of_the_server() -> None:
    url = resolve(f"{SERVER}?sslmode=require&sslkey=/k&sslpassword=x", environment={})
    plain = display_login(url, "reader", passfile=None)
    assert plain == "postgresql://reader@db.example:5433/sweeps?sslmode=require"
    assert display_login(url, "reader", passfile="/home/ann/.pgpass").endswith(
        "?passfile=/home/ann/.pgpass&sslmode=require"
    )


def test_a_line_of_a_password_file_escapes_what_separates_its_fields() -> None:
    url = resolve("postgresql://ann@db.example/a:b", environment={})
    assert pgpass_line(url, "reader", "x\\y:z") == "*:*:a\\:b:reader:x\\\\y\\:z"


@pytest.mark.parametrize("secret", ["p@ss", "p%40ss", "key-word"])
def test_no_message_shows_a_secret_of_the_url_in_any_spelling(secret: str) -> None:
    url = resolve(f"{SERVER}?sslpassword=key-word", environment={})
    assert secret not in redact(f'invalid value "{secret}" for an option', url)
