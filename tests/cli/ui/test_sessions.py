"""Sessions are signed, and a form belongs to one of them."""

from __future__ import annotations

import pytest

from orchestrator.cli.ui.sessions import Sessions


def cookie(sessions: Sessions, value: str) -> str:
    return sessions.set_cookie(value).partition(";")[0]


def test_a_session_is_known_by_its_cookie_beside_others() -> None:
    sessions = Sessions(80, None)
    session = sessions.new()
    assert sessions.of(cookie(sessions, session)) == session
    assert sessions.of(f"a=b; {cookie(sessions, session)}; c=d") == session
    assert sessions.new() != session


@pytest.mark.parametrize(
    "header", ["", "x", "sweep-ui-80=", "sweep-ui-80=a.b", "sweep-ui-80=é.ü", "=;=", "x" * 9000]
)
def test_a_cookie_that_was_not_signed_is_none(header: str) -> None:
    assert Sessions(80, None).of(header) is None


def test_neither_another_server_nor_another_port_knows_a_session() -> None:
    one, other = Sessions(80, None), Sessions(80, None)
    session = one.new()
    assert other.of(cookie(one, session)) is None
    number, _, signature = session.partition(".")
    assert one.of(cookie(one, f"{number}x.{signature}")) is None
    assert one.of(f"sweep-ui-81={session}") is None


def test_the_token_of_a_form_is_of_its_session() -> None:
    sessions = Sessions(80, None)
    one, other = sessions.new(), sessions.new()
    assert sessions.is_csrf(one, sessions.csrf(one))
    for told in (sessions.csrf(other), "", "é", one):
        assert not sessions.is_csrf(one, told)


def test_only_the_token_is_the_token() -> None:
    sessions = Sessions(80, "secret")
    assert sessions.knows("secret")
    assert not any(sessions.knows(told) for told in ("", "Secret", "secret ", "\udc80"))
    assert not Sessions(80, None).knows("")
