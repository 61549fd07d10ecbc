"""Ranks of our own workloads meet at the address of their gang, and can be reached at no other."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.machines.exposure import is_loopback
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Phase
from orchestrator.node.launcher import NodeLauncher
from tests.listening import Place, listeners
from tests.node.launching import order, tree_of
from workloads.rendezvous import bound

pytestmark = pytest.mark.timeout(600)

ENDLESS = 10_000  # steps without end
NOBODYS = "192.0.2.1"  # RFC 5737: on no interface


def listened_on(
    root: Path, asked: LaunchOrder, launcher: NodeLauncher
) -> tuple[NodeReport, set[Place]]:
    """Run a gang until every rank takes steps, and return where its processes listen by then."""
    reports: list[NodeReport] = []
    running = threading.Thread(target=lambda: reports.append(launcher.run(asked)))
    running.start()
    seen: set[Place] = set()
    while running.is_alive():
        is_stepping = (reached := launcher.progress()) is not None and reached.phase is Phase.STEADY
        seen |= listeners(tree_of(root))
        if is_stepping:  # the gang had met before
            launcher.kill(asked.request.tag)
        # A look takes 10 ms of CPU.
        running.join(0.05)
    (report,) = reports
    return report, seen


def endless(asked: LaunchOrder) -> LaunchOrder:
    """The same with endless steps: a short run may end before anybody has read the sockets."""
    plan = asked.request.measurement.model_copy(update={"min_steps": ENDLESS, "max_steps": ENDLESS})
    limits = asked.request.limits.model_copy(update={"steady": 110.0, "total": 110.0})
    return replace(
        asked, request=asked.request.model_copy(update={"measurement": plan, "limits": limits})
    )


@pytest.mark.parametrize(
    ("program", "options"),
    [
        pytest.param("workloads.llama", {}, marks=pytest.mark.long),
        (
            "workloads.netbench",
            {"collectives": ["all_reduce"], "sizes": [1024] * ENDLESS, "seconds": 0.2},
        ),
    ],
    ids=["llama", "netbench"],
)
def test_a_gang_listens_at_its_own_address_alone(
    tmp_path: Path, program: str, options: dict[str, Any]
) -> None:
    launcher = NodeLauncher(tmp_path, node="here")
    try:
        # One node; told of several.
        for attempt, address in enumerate(("127.0.0.1", "127.0.0.2"), start=1):
            port = launcher.rendezvous()
            asked = endless(
                order(
                    program, options=options, attempt=attempt, master_addr=address, master_port=port
                )
            )
            report, seen = listened_on(tmp_path, asked, launcher)
            assert report.failure is not None and report.failure.kind is FailureKind.CANCELLED, (
                report.failure
            )
            assert [place for place in seen if place.port == port] == [Place(address, port)]
            assert {
                place for place in seen if not is_loopback(place.address)
            } == set()  # gloo listens too
    finally:
        launcher.close()


def test_where_no_interface_holds_the_address_every_one_is_listened_on() -> None:
    """As in a container with a translated address, which no interface has."""
    with bound(NOBODYS, 0) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"


def test_a_port_that_another_program_has_is_not_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(OSError, match="Address already in use"),
    ):
        bound("127.0.0.1", other.getsockname()[1])
