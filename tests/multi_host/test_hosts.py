"""The hosts that these tests make: separate while they live, and gone with their maker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multi_host.hosts import Host, Network

pytestmark = pytest.mark.cluster
PATIENCE_SECONDS = 20.0

_MAKER = """
import time
from tests.multi_host.hosts import Network
with Network(["a"]) as network:
    sleeper = network.hosts[0].start("sleep", "600")
    print(network.hosts[0].pid, network.base, flush=True)
    time.sleep(600)
"""


def test_hosts_reach_each_other_until_one_is_cut_off(namespaces: None) -> None:
    with Network(["a", "b"]) as network:
        a, b = network.hosts
        server = b.start(sys.executable, "-m", "http.server", "8000")
        _until(lambda: _answers(a, b))
        network.cut(b)
        assert not _answers(a, b)
        network.mend(b)
        _until(lambda: _answers(a, b))
        assert server.poll() is None
        assert (a.ok("hostname"), b.ok("hostname")) == ("a\n", "b\n")
        (a.folder / "mine").write_text("x")
        assert "mine" in a.ok("ls", a.base)
        assert "mine" not in b.ok("ls", b.base)


def test_a_test_that_is_killed_leaves_no_host(namespaces: None) -> None:
    maker = subprocess.Popen([sys.executable, "-c", _MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pid, base = maker.stdout.readline().split()
    namespace = Path(f"/proc/{pid}/ns/pid").readlink()
    # The second process may only be starting.
    _until(lambda: len(_within(namespace)) >= 2)
    maker.kill()
    maker.communicate()
    _until(lambda: not _within(namespace))
    subprocess.run(["rm", "-r", base], check=True)


def _answers(a: Host, b: Host) -> bool:
    fetch = f"import urllib.request; urllib.request.urlopen('http://{b.address}:8000/', timeout=2)"
    return a.run(sys.executable, "-c", fetch).returncode == 0


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _within(namespace: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and (entry / "ns/pid").readlink() == namespace
                and int(entry.name) != os.getpid()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
