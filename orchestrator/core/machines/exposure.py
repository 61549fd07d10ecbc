"""Whether others can reach or read what a Ray cluster must keep to itself: who can talk to Ray can run any program on its nodes.

Rules over what is known of one machine; gathering it is in exposure.py. Ray 2.59 and later ask for a token where RAY_AUTH_MODE=token;
older ones for nothing (CVE-2023-48022), and before 2.52 a web page open in somebody's browser is enough (CVE-2025-62593).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

FIRST_WITH_TOKENS = (2, 59)
FIRST_SAFE_FROM_BROWSERS = (2, 52)
METRICS = "dashboard metrics"  # counters for Prometheus: whoever reads them can start nothing
LEAST_TOKEN_CHARACTERS = 16  # Ray makes tokens of 64 hexadecimal digits; a word is guessed


class Severity(StrEnum):
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A program of Ray's that takes connections on this machine."""

    program: str  # gcs_server, raylet, dashboard, its METRICS, an agent, client server
    address: str
    port: int
    auth_mode: str | None  # its RAY_AUTH_MODE; None: not ours to read

    @property
    def is_reachable(self) -> bool:
        """From other machines."""
        return not is_loopback(self.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayFacts:
    """What is known of Ray on one machine. Unknown is None."""

    version: str
    auth_mode: str | None  # RAY_AUTH_MODE of this program
    token_in_environment: bool  # RAY_AUTH_TOKEN is set, whatever it says
    token_file: str
    token_file_mode: int | None  # None: there is no such file
    token_characters: int | None
    listeners: Sequence[Listener] = ()
    cluster_host: str | None = None  # that is to be joined; None: a Ray of this machine's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    severity: Severity
    found: str
    advice: str


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it: also an IPv4 address as a socket of both families has it."""
    place = ip_address(address)
    mapped = (
        place.ipv4_mapped if place.version == 6 else None
    )  # of which Python says so from 3.13 on
    return (mapped or place).is_loopback


def exposures(facts: RayFacts) -> list[Exposure]:
    """All that is wrong, the worst first."""
    found = [
        *_of_version(facts),
        *_of_listeners(facts.listeners),
        *_of_cluster(facts),
        *_of_token(facts),
    ]
    return sorted(found, key=lambda one: one.severity is not Severity.FAIL)


def _of_version(facts: RayFacts) -> Iterator[Exposure]:
    version = tuple(int(part) for part in facts.version.split(".")[:2])
    if version < FIRST_SAFE_FROM_BROWSERS:
        yield Exposure(
            severity=Severity.FAIL,
            found=f"Ray {facts.version}: a web page that somebody opens here can start programs on the cluster (CVE-2025-62593)",
            advice="pip install -U ray",
        )
    elif version < FIRST_WITH_TOKENS:
        yield Exposure(
            severity=Severity.WARN,
            found=f"Ray {facts.version} knows no tokens",
            advice="pip install -U 'ray>=2.59', and RAY_AUTH_MODE=token",
        )


def _of_listeners(listeners: Sequence[Listener]) -> Iterator[Exposure]:
    for one in listeners:
        if not one.is_reachable or one.program == METRICS:
            continue
        where = f"{one.program} listens on {one.address}:{one.port}"
        if one.program == "dashboard":
            yield Exposure(
                severity=Severity.WARN if one.auth_mode == "token" else Severity.FAIL,
                found=f"{where}: jobs can be submitted there from other machines",
                advice="start the head without --dashboard-host, and reach it through ssh -L 8265:127.0.0.1:8265 HEAD",
            )
        elif one.auth_mode is None:
            yield Exposure(
                severity=Severity.WARN,
                found=f"{where}, and whether it asks for a token is not to be seen from here",
                advice="run sweep doctor as the user who started Ray",
            )
        elif one.auth_mode != "token":
            yield Exposure(
                severity=Severity.FAIL,
                found=f"{where} without a token: whoever reaches that port can run any program here",
                advice="start every node with RAY_AUTH_MODE=token and the same private RAY_AUTH_TOKEN_PATH; or keep the port behind a firewall",
            )


def _of_cluster(facts: RayFacts) -> Iterator[Exposure]:
    host = facts.cluster_host
    if host is None or _is_this_machine(host) or facts.auth_mode == "token":
        return
    yield Exposure(
        severity=Severity.WARN,
        found=f"{host} is to be joined with RAY_AUTH_MODE={facts.auth_mode or 'unset'}: nothing proves who talks to whom",
        advice="RAY_AUTH_MODE=token on every node and here, with the cluster's token in a private file named by RAY_AUTH_TOKEN_PATH",
    )


def _of_token(facts: RayFacts) -> Iterator[Exposure]:
    if facts.token_in_environment:
        yield Exposure(
            severity=Severity.WARN,
            found="RAY_AUTH_TOKEN holds the token itself, and every program started here inherits it",
            advice="write it to a file of mode 600, name that in RAY_AUTH_TOKEN_PATH, and unset RAY_AUTH_TOKEN",
        )
    if facts.token_file_mode is not None and facts.token_file_mode & 0o077:
        yield Exposure(
            severity=Severity.FAIL if facts.auth_mode == "token" else Severity.WARN,
            found=f"{facts.token_file} has mode {facts.token_file_mode:o}: others on this machine can read the token",
            advice=f"chmod 600 {facts.token_file}",
        )
    if facts.token_characters is not None and facts.token_characters < LEAST_TOKEN_CHARACTERS:
        yield Exposure(
            severity=Severity.FAIL if facts.auth_mode == "token" else Severity.WARN,
            found=f"the token in {facts.token_file} has {facts.token_characters} characters, which are soon guessed",
            advice=f"python -c 'import secrets; print(secrets.token_hex(32))' > {facts.token_file}",
        )


def _is_this_machine(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return host in ("localhost", "auto")
