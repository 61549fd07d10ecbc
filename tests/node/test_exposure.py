"""What is visible of Ray's programs: real processes with real sockets, under Ray's names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.node.exposure import ray_facts

# Another test's process may listen at the same port of another address.
OWN_ADDRESS = f"127.77.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}"
LISTEN = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 0)); "
    "print(s.getsockname()[1], flush=True); sys.stdin.read()"
)
# A raylet starts its agents, which write their titles over the environment that the kernel shows.
AGENT = "import ray._raylet; ray._raylet.setproctitle('ray::DashboardAgent'); " + LISTEN
RAYLET = (
    f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {AGENT!r}, sys.argv[1]])"
)


@contextmanager
def pretending(
    folder: Path, program: str, address: str, *options: str, code: str = LISTEN, **environment: str
) -> Iterator[int]:
    """A process that the kernel calls so, and that takes connections; yields its port."""
    named = folder / program
    named.symlink_to(shutil.which(sys.executable) or sys.executable)
    with subprocess.Popen(
        [named, "-S", "-c", code, address, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def programs_at(port: int) -> list[str]:
    """What listens at a port of this test's address."""
    return [
        one.program
        for one in ray_facts({}).listeners
        if (one.address, one.port) == (OWN_ADDRESS, port)
    ]


@pytest.mark.parametrize(("address", "reachable"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_head_is_seen_with_its_address_and_whether_it_asks_for_a_token(
    tmp_path: Path, address: str, reachable: bool
) -> None:
    for number, (environment, mode) in enumerate(
        (({"RAY_AUTH_MODE": "token"}, "token"), ({}, "disabled"))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pretending(folder, "gcs_server", address, **environment) as port:
            (found,) = [
                one for one in ray_facts({}).listeners if (one.address, one.port) == (address, port)
            ]
        assert (found.program, found.address, found.is_reachable, found.auth_mode) == (
            "gcs_server",
            address,
            reachable,
            mode,
        )


@pytest.mark.parametrize(
    ("program", "called"),
    [
        ("raylet", "raylet"),
        ("ray::RuntimeEnvAgent", "runtime environment agent"),
        ("ray.util.client.server", "client server"),
    ],
)
def test_every_program_of_ray_s_that_listens_is_seen(
    tmp_path: Path, program: str, called: str
) -> None:
    with pretending(tmp_path, program, OWN_ADDRESS) as port:
        assert programs_at(port) == [called]


@pytest.mark.parametrize(
    ("of_metrics", "takes_jobs", "called"),
    [(True, False, "dashboard metrics"), (False, False, "dashboard"), (True, True, "dashboard")],
)
def test_the_dashboard_s_counters_are_told_from_what_takes_jobs(
    tmp_path: Path, of_metrics: bool, takes_jobs: bool, called: str
) -> None:
    """They have a port of their own, on every interface whatever the dashboard's host."""
    with socket.create_server((OWN_ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    listen = LISTEN.replace("(sys.argv[1], 0)", f"(sys.argv[1], {port})")
    environment = {"DASHBOARD_METRIC_PORT": str(port)} if of_metrics else {}
    options = [f"--port={port}"] if takes_jobs else []
    with pretending(tmp_path, "dashboard.py", OWN_ADDRESS, *options, code=listen, **environment):
        assert programs_at(port) == [called]


@pytest.mark.parametrize(
    "beside", [{}, {"A": "1" * 2000}, {"Z": "1" * 2000}], ids=["alone", "after much", "before much"]
)
def test_an_agent_asks_for_a_token_where_the_raylet_that_started_it_does(
    tmp_path: Path, beside: dict[str, str]
) -> None:
    pytest.importorskip("ray")
    # The title overwrites as much as it is long.
    environment = dict(sorted((beside | {"RAY_AUTH_MODE": "token"}).items()))
    with pretending(tmp_path, "raylet", "127.0.0.1", code=RAYLET, **environment) as port:
        (found,) = [one for one in ray_facts({}).listeners if one.port == port]
    assert (found.program, found.auth_mode) == ("dashboard agent", "token")


def test_what_is_none_of_ray_s_is_not_looked_at(tmp_path: Path) -> None:
    with pretending(tmp_path, "somebody", "127.0.0.1") as port:
        assert port not in [one.port for one in ray_facts({}).listeners]


def test_the_token_is_measured_and_never_kept(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("canary-token-of-26-letters\n")
    token.chmod(0o640)
    facts = ray_facts(
        {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "canary"},
        cluster_address="[fd00::1]:6379",
    )
    assert (facts.token_file_mode, facts.token_characters, facts.token_in_environment) == (
        0o640,
        26,
        True,
    )
    assert facts.cluster_host == "fd00::1"
    assert "canary" not in repr(facts)
