"""Fixtures: skips if no hosts can be made here, and a cluster of three hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multi_host.hosts import Network
from tests.multi_host.ray_hosts import RayHosts

NEEDED = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}  # program: Debian's package


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip if this user may not make namespaces; else a missing program fails the checks."""
    if os.geteuid() != 0:
        pytest.skip("hosts are network namespaces, which only root may make")
    need({program: package for program, package in NEEDED.items() if program == "unshare"})
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    need(NEEDED)


def need(programs: dict[str, str]) -> None:
    """Skip if programs are missing; fail in the checks on a new machine, which install them."""
    missing = sorted(
        {
            package
            for program, package in programs.items()
            if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None
        }
    )
    if missing:
        reason = f"not installed: apt-get install {' '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="module")
def three_hosts(namespaces: None, postgresql_server: str) -> Iterator[RayHosts]:
    """A Ray cluster of three hosts with one core each. Only the head can reach PostgreSQL."""
    folder = Path(postgresql_server.partition("host=")[2])
    assert folder.is_dir(), postgresql_server
    with Network(["head", "worker-1", "worker-2"], seen_by_first=[folder]) as network:
        cluster = RayHosts(network)
        cluster.start(num_cpus=1)
        yield cluster
