"""Ranks of our own workloads meet at the address of their gang, and can be reached at no other."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.exposure import is_loopback
from orchestrator.core.protocol import LaunchOrder, NodeReport
from orchestrator.launcher import NodeLauncher
from tests.listening import Place, listeners
from tests.orchestrator.launching import order, tree_of
from workloads.rendezvous import bound

pytestmark = pytest.mark.timeout(120)

NOBODYS = "192.0.2.1"  # of RFC 5737: for documents, held by no interface


def run(root: Path, asked: LaunchOrder, launcher: NodeLauncher) -> tuple[NodeReport, set[Place]]:
    """Run a gang to its end, and say where any of its processes ever listened."""
    reports: list[NodeReport] = []
    running = threading.Thread(target=lambda: reports.append(launcher.run(asked)))
    running.start()
    seen: set[Place] = set()
    while running.is_alive():
        seen |= listeners(tree_of(root))
        running.join(0.01)
    (report,) = reports
    return report, seen


@pytest.mark.parametrize(
    ("program", "options"),
    [("workloads.llama", {}), ("workloads.netbench", {"collectives": ["all_reduce"], "sizes": [1024], "seconds": 0.2})],
    ids=["llama", "netbench"],
)
def test_a_gang_listens_at_its_own_address_alone(tmp_path: Path, program: str, options: dict[str, Any]) -> None:
    launcher = NodeLauncher(tmp_path, node="here")
    try:
        for attempt, address in enumerate(("127.0.0.1", "127.0.0.2"), start=1):  # of one node, and one as a gang over several is told
            port = launcher.rendezvous()
            asked = order(program, options=options, attempt=attempt, master_addr=address, master_port=port)
            report, seen = run(tmp_path, asked, launcher)
            assert report.failure is None, report.failure
            assert [place for place in seen if place.port == port] == [Place(address, port)]
            assert {place for place in seen if not is_loopback(place.address)} == set()  # gloo listens too
    finally:
        launcher.close()


def test_where_no_interface_holds_the_address_every_one_is_listened_on() -> None:
    """As in a container whose address is translated: the others reach it at one that it does not have."""
    with bound(NOBODYS, 0) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"


def test_a_port_that_another_program_has_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="Address already in use"):
        bound("127.0.0.1", other.getsockname()[1])
