"""Checks whether others can reach the private parts of Ray, and run any program on its nodes.

These are rules over the facts of one machine; `orchestrator/node/exposure.py` collects the facts.
Ray 2.59 and later require a token if RAY_AUTH_MODE=token; older versions never do (CVE-2023-48022),
and before 2.52 a web page open in somebody's browser is enough (CVE-2025-62593).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from orchestrator.core.machines.check import Check, Status, fail, warn

NAME = "ray access"
FIRST_WITH_TOKENS = (2, 59)
FIRST_SAFE_FROM_BROWSERS = (2, 52)
METRICS = "dashboard metrics"  # readers of these can start nothing
LEAST_TOKEN_CHARACTERS = 16  # Ray's own tokens have 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A program of Ray's that accepts connections on this machine."""

    # gcs_server, raylet, dashboard, its METRICS, an agent, client server.
    program: str
    address: str
    port: int
    auth_mode: str | None  # None: we may not read it

    @property
    def is_reachable(self) -> bool:
        """True if other machines can reach it."""
        return not is_loopback(self.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayFacts:
    """Facts about Ray on one machine. Unknown is None."""

    version: str
    auth_mode: str | None  # RAY_AUTH_MODE of this program
    token_in_environment: bool  # RAY_AUTH_TOKEN is set, to any value
    token_file: str
    token_file_mode: int | None  # None: the file does not exist
    token_characters: int | None
    listeners: Sequence[Listener] = ()
    cluster_host: str | None = None  # to join; None: a local Ray


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the address, also as IPv4 mapped into IPv6."""
    place = ip_address(address)
    # Python considers mapped addresses itself from 3.13 on.
    mapped = place.ipv4_mapped if place.version == 6 else None
    return (mapped or place).is_loopback


def exposures(facts: RayFacts) -> list[Check]:
    """Return all that is wrong, the worst first."""
    found = [
        *_of_version(facts),
        *_of_listeners(facts.listeners),
        *_of_cluster(facts),
        *_of_token(facts),
    ]
    return sorted(found, key=lambda check: check.status is not Status.FAIL)


def _of_version(facts: RayFacts) -> Iterator[Check]:
    version = tuple(int(part) for part in facts.version.split(".")[:2])
    if version < FIRST_SAFE_FROM_BROWSERS:
        found = "a web page that somebody opens here can start programs on the cluster"
        yield fail(NAME, f"Ray {facts.version}: {found} (CVE-2025-62593)", "pip install -U ray")
    elif version < FIRST_WITH_TOKENS:
        advice = "pip install -U 'ray>=2.59', and RAY_AUTH_MODE=token"
        yield warn(NAME, f"Ray {facts.version} knows no tokens", advice)


def _of_listeners(listeners: Sequence[Listener]) -> Iterator[Check]:
    for one in listeners:
        if not one.is_reachable or one.program == METRICS:
            continue
        where = f"{one.program} listens on {one.address}:{one.port}"
        if one.program == "dashboard":
            report = warn if one.auth_mode == "token" else fail
            yield report(
                NAME,
                f"{where}: jobs can be submitted there from other machines",
                "start the head without --dashboard-host, and reach it through "
                "ssh -L 8265:127.0.0.1:8265 HEAD",
            )
        elif one.auth_mode is None:
            yield warn(
                NAME,
                f"{where}, and whether it asks for a token cannot be seen from here",
                "run sweep doctor as the user who started Ray",
            )
        elif one.auth_mode != "token":
            yield fail(
                NAME,
                f"{where} without a token: anybody who reaches that port can run any program here",
                "start every node with RAY_AUTH_MODE=token and the same private "
                "RAY_AUTH_TOKEN_PATH; or keep the port behind a firewall",
            )


def _of_cluster(facts: RayFacts) -> Iterator[Check]:
    host, mode = facts.cluster_host, facts.auth_mode
    if host is None or _is_this_machine(host) or mode == "token":
        return
    yield warn(
        NAME,
        f"this machine is to join {host} with RAY_AUTH_MODE={mode or 'unset'}: "
        "neither side proves who it is",
        "RAY_AUTH_MODE=token on every node and here, with the cluster's token in a private file "
        "named by RAY_AUTH_TOKEN_PATH",
    )


def _of_token(facts: RayFacts) -> Iterator[Check]:
    if facts.token_in_environment:
        yield warn(
            NAME,
            "RAY_AUTH_TOKEN holds the token itself, and every program started here inherits it",
            "write it to a file of mode 600, name that in RAY_AUTH_TOKEN_PATH, and unset "
            "RAY_AUTH_TOKEN",
        )
    path, mode = facts.token_file, facts.token_file_mode
    if mode is not None and mode & 0o077:
        report = fail if facts.auth_mode == "token" else warn
        found = f"{path} has mode {mode:o}: others on this machine can read the token"
        yield report(NAME, found, f"chmod 600 {path}")
    length = facts.token_characters
    if length is not None and length < LEAST_TOKEN_CHARACTERS:
        report = fail if facts.auth_mode == "token" else warn
        found = f"the token in {path} has {length} characters, which are soon guessed"
        advice = f"python -c 'import secrets; print(secrets.token_hex(32))' > {path}"
        yield report(NAME, found, advice)


def _is_this_machine(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return host in ("localhost", "auto")
