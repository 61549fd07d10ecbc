"""Checks of what others could reach or read of a Ray cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.machines.check import Status
from orchestrator.core.machines.exposure import METRICS, Listener, RayFacts, exposures

FINE = RayFacts(
    version="2.60.0",
    auth_mode="token",
    token_in_environment=False,
    token_file="/home/me/.ray/token",
    token_file_mode=0o600,
    token_characters=64,
)
OPEN, HEAD = "0.0.0.0", "gcs_server"


def listener(
    program: str = HEAD, address: str = OPEN, auth_mode: str | None = "disabled"
) -> Listener:
    return Listener(program=program, address=address, port=6379, auth_mode=auth_mode)


def told(facts: RayFacts) -> list[tuple[Status, str]]:
    return [(one.status, one.found) for one in exposures(facts)]


def test_nothing_is_told_of_a_cluster_with_a_private_token() -> None:
    listeners = (
        listener(auth_mode="token"),
        listener("raylet", "10.0.0.3", "token"),
        listener("dashboard", "127.0.0.1", "token"),
    )
    listeners = (*listeners, listener(METRICS, auth_mode="token"))
    assert told(replace(FINE, listeners=listeners, cluster_host="10.0.0.3")) == []


def test_nothing_is_told_of_a_ray_that_only_this_machine_reaches() -> None:
    local = (
        listener(address="127.0.0.1"),
        listener("raylet", "::ffff:127.0.0.1"),
        listener("dashboard", "::1"),
    )
    assert (
        told(
            replace(
                FINE, auth_mode=None, token_file_mode=None, token_characters=None, listeners=local
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (
            replace(FINE, listeners=(listener(),)),
            Status.FAIL,
            "gcs_server listens on 0.0.0.0:6379 without a token",
        ),
        (
            replace(FINE, listeners=(listener("raylet", "::", ""),)),
            Status.FAIL,
            "raylet listens on :::6379 without a token",
        ),
        (
            replace(FINE, listeners=(listener(auth_mode=None),)),
            Status.WARN,
            "cannot be seen from here",
        ),
        (
            replace(FINE, listeners=(listener("dashboard"),)),
            Status.FAIL,
            "jobs can be submitted there",
        ),
        (
            replace(FINE, listeners=(listener("dashboard", auth_mode="token"),)),
            Status.WARN,
            "jobs can be submitted there",
        ),
        (replace(FINE, version="2.51.2"), Status.FAIL, "a web page that somebody opens here"),
        (replace(FINE, version="2.52.0"), Status.WARN, "Ray 2.52.0 knows no tokens"),
        (replace(FINE, version="2.58.1"), Status.WARN, "Ray 2.58.1 knows no tokens"),
        (
            replace(FINE, token_file_mode=0o644),
            Status.FAIL,
            "others on this machine can read the token",
        ),
        (
            replace(FINE, token_file_mode=0o640, auth_mode=None),
            Status.WARN,
            "others on this machine can read the token",
        ),
        (
            replace(FINE, token_in_environment=True),
            Status.WARN,
            "every program started here inherits it",
        ),
        (replace(FINE, token_characters=8), Status.FAIL, "8 characters, which are soon guessed"),
        (
            replace(FINE, auth_mode="disabled", cluster_host="10.1.2.3"),
            Status.WARN,
            "join 10.1.2.3 with RAY_AUTH_MODE=disabled",
        ),
        (
            replace(FINE, auth_mode=None, cluster_host="head.example"),
            Status.WARN,
            "join head.example with RAY_AUTH_MODE=unset",
        ),
        (replace(FINE, version="2.51.1"), Status.FAIL, "CVE-2025-62593"),
        (replace(FINE, version="2.58.0"), Status.WARN, "knows no tokens"),
    ],
)
def test_each_way_in_is_told_with_how_to_close_it(
    facts: RayFacts, status: Status, words: str
) -> None:
    (found,) = exposures(facts)
    assert found.status is status
    assert words in found.found
    assert found.advice


def test_the_worst_is_told_first() -> None:
    facts = replace(
        FINE, token_in_environment=True, listeners=(listener(),), cluster_host="h", auth_mode=None
    )
    assert [one.status for one in exposures(facts)] == [
        Status.FAIL,
        Status.WARN,
        Status.WARN,
    ]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.51.9", "Ray 2.51.9: a web page that somebody opens here"),
        ("2.52.0", "Ray 2.52.0 knows no tokens"),
        ("2.58.9", "Ray 2.58.9 knows no tokens"),
        ("2.59.0", None),
        ("3.0.0", None),
    ],
)
def test_a_ray_is_as_safe_as_its_version(version: str, words: str | None) -> None:
    found = [text for _, text in told(replace(FINE, version=version))]
    assert (found == []) if words is None else found[0].startswith(words)


@pytest.mark.parametrize(("num", "is_short"), [(15, True), (16, False)])
def test_a_token_has_sixteen_characters_at_least(num: int, *, is_short: bool) -> None:
    found = [text for _, text in told(replace(FINE, token_characters=num))]
    said = f"the token in /home/me/.ray/token has {num} characters, which are soon guessed"
    assert found == ([said] if is_short else [])


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640])
def test_a_token_is_private_if_nobody_else_has_any_right(mode: int) -> None:
    ((status, text),) = told(replace(FINE, token_file_mode=mode))
    assert status is Status.FAIL
    assert text.startswith(f"/home/me/.ray/token has mode {mode:o}: others on this machine can")
