"""Runs on a node for the orchestrator: a Ray actor with launchers, in the slots of one lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from types import FrameType

import ray

from layout_sweep.start import claim_imports
from orchestrator.cluster.ray.bounded_calls import within
from orchestrator.cluster.ray.head_watch import HeadWatch
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, Heartbeat
from orchestrator.node.launcher import NodeLauncher

CLOSE_SECONDS = 10.0  # for an agent to end ranks


class NodeAgent:
    """A Ray actor with a launcher for each slot that is the first one of an attempt."""

    def __init__(
        self, root: str, program: str, node: str, node_environment: Mapping[str, str]
    ) -> None:
        # Ray has put folders of others into the search path.
        claim_imports()
        os.environ.update(node_environment)
        self._root, self._node = Path(root), node
        self._launchers: dict[int, NodeLauncher] = {}  # by slot
        self._creation = Lock()
        if current_thread() is main_thread():
            self._end_by_ray = signal.signal(signal.SIGTERM, self._preempted)
        # Imports torch while other agents start.
        self._launcher(0).prepare(program)
        self._head_watch = HeadWatch(ray.get_runtime_context().gcs_address)
        Thread(target=self._end_when_cut_off, name="head-watch", daemon=True).start()

    def address(self) -> str:
        """Return the address of this node for other nodes."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def rendezvous(self, slot: int) -> int:
        return self._launcher(slot).rendezvous()

    def run(self, slots: Sequence[int], order: LaunchOrder) -> NodeReport:
        """Run ranks on these slots of the lease, counted from 0; no other attempt has them."""
        if order.request.device is Device.CUDA:
            own = ray.get_gpu_ids()  # of this actor alone
            order = replace(order, devices=[str(own[slot]) for slot in slots])
        return self._launcher(slots[0]).run(order)

    def progress(self, slot: int) -> Heartbeat | None:
        return self._launcher(slot).progress()

    def kill(self, slot: int, tag: str) -> None:
        self._launcher(slot).kill(tag)

    def close(self) -> None:
        self._head_watch.stop()
        self._close_launchers()

    def _preempted(self, number: int, frame: FrameType | None) -> None:
        """End the ranks, for which threads wait, and then this process as Ray would."""
        within(CLOSE_SECONDS, self._preempt_launchers)
        if callable(self._end_by_ray):
            self._end_by_ray(number, frame)

    def _preempt_launchers(self) -> None:
        with self._creation, ThreadPoolExecutor(max_workers=max(1, len(self._launchers))) as pool:
            list(pool.map(NodeLauncher.preempt, self._launchers.values()))

    def _launcher(self, slot: int) -> NodeLauncher:
        """Return the launcher of attempts whose first slot is this one."""
        with self._creation:
            if slot not in self._launchers:
                self._launchers[slot] = NodeLauncher(self._root, node=self._node)
            return self._launchers[slot]

    def _close_launchers(self) -> None:
        with self._creation, ThreadPoolExecutor(max_workers=len(self._launchers)) as pool:
            list(pool.map(NodeLauncher.close, self._launchers.values()))

    def _end_when_cut_off(self) -> None:
        if self._head_watch.wait_until_cut():
            within(CLOSE_SECONDS, self._close_launchers)
            os._exit(1)  # wardens end what is left
