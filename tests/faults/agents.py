"""A scheduler of real launchers without Ray: one agent process per node.

It uses forks and pipes: a process starts in milliseconds, so hundreds of them can be killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue

from orchestrator.cluster.contract import Finished, SchedulerEvent, Slots
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.processes import kill

USUAL_PROGRAM = "workloads.synthetic"


@dataclass(eq=False)
class _Agent:
    pid: int
    pipe: Connection
    request: TrialRequest | None = None
    since: float = 0.0


class AgentScheduler:
    """`nodes` of one machine with two slots each; every gang has one node for itself."""

    def __init__(self, root: Path, *, num_nodes: int = 2) -> None:
        self._root = root
        self._slots = Slots(
            device=Device.CPU, device_name=None, nodes={f"node-{i}": 2 for i in range(num_nodes)}
        )
        self._agents: dict[str, _Agent] = {}
        self._reserved_gpu_seconds = 0.0
        for node in self._slots.nodes:
            self._agents[node] = self._begin(node)

    @property
    def slots(self) -> Slots:
        return self._slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        (node,) = nodes
        agent = self._agents[node]
        agent.request, agent.since = request, time.monotonic()
        try:
            agent.pipe.send(
                LaunchOrder(
                    request=request,
                    program=f"workloads.{request.workload}",
                    local_world_size=shape.slots_per_node,
                )
            )
        except OSError:
            pass  # it was killed: `poll` finds out

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        pipes = {agent.pipe: node for node, agent in self._agents.items()}
        return [
            event
            for pipe in wait(list(pipes), timeout_seconds)
            for event in self._said(pipes[pipe])
        ]  # type: ignore[index]

    def cancel(self, trial_id: int) -> None:
        for agent in self._agents.values():
            if agent.request is not None and agent.request.trial_id == trial_id:
                agent.pipe.send(agent.request.tag)

    def leased(self) -> Leased:
        now = time.monotonic()
        under_way = sum(
            2 * (now - agent.since) for agent in self._agents.values() if agent.request is not None
        )
        return Leased(reserved=self._reserved_gpu_seconds + under_way, idle=0.0, capacity=None)

    def close(self) -> None:
        for agent in self._agents.values():
            agent.pipe.close()
        for agent in self._agents.values():
            os.waitpid(agent.pid, 0)

    def _said(self, node: str) -> list[SchedulerEvent]:
        agent = self._agents[node]
        request = agent.request
        try:
            report: NodeReport = agent.pipe.recv()
            failure, reports = report.failure, [report]
        except (EOFError, OSError):
            agent.pipe.close()
            os.waitpid(agent.pid, 0)
            self._agents[node] = self._begin(node)
            failure, reports = (
                Failure(kind=FailureKind.NODE_LOST, message=f"lost the agent on {node}", node=node),
                [],
            )
        agent.request = None
        if request is None:
            return []
        reserved = 2 * (time.monotonic() - agent.since)
        self._reserved_gpu_seconds += reserved
        return [
            Finished(
                trial_id=request.trial_id, reports=reports, failure=failure, gpu_seconds=reserved
            )
        ]

    def _begin(self, node: str) -> _Agent:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._agents.values():
                # Else that pipe would stay open after the orchestrator's end.
                other.pipe.close()
            _serve(theirs, self._root, node)
        theirs.close()
        return _Agent(pid, ours)


def _serve(pipe: Connection, root: Path, node: str) -> None:
    """An agent: runs what it is told, until the pipe ends. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    orders: SimpleQueue[LaunchOrder] = SimpleQueue()
    launcher = NodeLauncher(root, node=node)
    launcher.prepare(USUAL_PROGRAM)

    def listen() -> None:
        try:
            while True:
                said = pipe.recv()
                launcher.kill(said) if isinstance(said, str) else orders.put(said)
        except (EOFError, OSError):
            launcher.close()
        finally:
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            pipe.send(launcher.run(orders.get()))
    finally:
        kill(os.getpid())
