"""What runs on a node for the orchestrator: a Ray actor around that node's launcher, in the slots of one lease."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ray

from orchestrator.core.protocol import Device, Heartbeat, LaunchOrder, NodeReport
from orchestrator.head_watch import HeadWatch
from orchestrator.launcher import NodeLauncher
from orchestrator.ray_cluster import within

CLOSE_SECONDS = 10.0  # for an agent to end its ranks by itself


class NodeAgent:
    """Runs inside a Ray actor and owns a launcher of its own, beside those of other leases on the node."""

    def __init__(self, root: str, program: str, node: str, node_environment: Mapping[str, str]) -> None:
        os.environ.update(node_environment)
        self._launcher = NodeLauncher(Path(root), node=node)
        self._launcher.prepare(program)  # imports torch while the rest of the gang still forms
        self._head_watch = HeadWatch(ray.get_runtime_context().gcs_address, self._end)

    def address(self) -> str:
        """Where other nodes reach this one."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def rendezvous(self) -> int:
        return self._launcher.rendezvous()

    def run(self, order: LaunchOrder) -> NodeReport:
        if order.request.device is Device.CUDA:
            order = replace(order, devices=[str(device) for device in ray.get_gpu_ids()])  # those Ray gave this actor alone
        return self._launcher.run(order)

    def progress(self) -> Heartbeat | None:
        return self._launcher.progress()

    def kill(self, tag: str) -> None:
        self._launcher.kill(tag)

    def close(self) -> None:
        self._head_watch.let_go()
        self._launcher.close()

    def _end(self) -> None:
        within(CLOSE_SECONDS, self._launcher.close)
        os._exit(1)  # whatever the launcher could not end, its warden does now
