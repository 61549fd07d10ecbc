"""Runs one attempt on this machine through a launcher, and watches its processes from outside.

Needs no Ray and no store. What it sees tells whether a program keeps its contract; it judges
nothing itself.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from layout_sweep.regular_file import read_regular
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import (
    ATTEMPT_VARIABLE,
    BadResult,
    decode_heartbeat,
    heartbeat_file,
)
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.processes import descendants, environment_of
from orchestrator.node.run_directory import run_directory

_POLL_SECONDS = 0.02
# To read the sockets of all processes takes milliseconds.
_SOCKETS_SECONDS = 0.1
_HEARTBEAT_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """The time at which rank 0 had done this many steps, in seconds since the start."""

    num_steps: int
    at_seconds: float


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """The end of an attempt, and what was observed meanwhile."""

    report: NodeReport
    seconds: float
    steps: tuple[SeenStep, ...]
    # Ranks whose programs were seen, by the environment that they were started with.
    ranks: frozenset[int]
    # Ranks that had a connection to another rank.
    connected_ranks: frozenset[int]


@dataclass(kw_only=True)
class _Watch:
    order: LaunchOrder
    run_dir: Path
    began: float = field(default_factory=time.monotonic)
    steps: list[SeenStep] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    connected: set[int] = field(default_factory=set)
    _next_sockets: float = 0.0

    def update(self) -> None:
        now = time.monotonic()
        self._read_steps()
        if now >= self._next_sockets:
            self._find_ranks()
            # After all have met, only new ranks can change anything.
            self._next_sockets = time.monotonic() + _SOCKETS_SECONDS

    def _read_steps(self) -> None:
        try:
            path = self.run_dir / heartbeat_file(self.order.first_rank)
            heartbeat = decode_heartbeat(read_regular(path, num_bytes=_HEARTBEAT_BYTES).content)
        except (OSError, BadResult):
            return
        if heartbeat.step > (self.steps[-1].num_steps if self.steps else 0):
            at = heartbeat.at if heartbeat.at is not None else time.monotonic()
            seen = SeenStep(num_steps=heartbeat.step, at_seconds=at - self.began)
            self.steps.append(seen)

    def _find_ranks(self) -> None:
        rank_at: dict[tuple[str, int], int] = {}
        links: list[tuple[int, tuple[str, int]]] = []
        for pid, rank in self._programs():
            self.ranks.add(rank)
            if self.connected.issuperset(self.ranks) and len(self.ranks) > 1:
                continue
            for local, remote in _connections(pid):
                rank_at[local] = rank
                links.append((rank, remote))
        for rank, remote in links:
            other = rank_at.get(remote)
            if other is not None and other != rank:
                self.connected |= {rank, other}

    def _programs(self) -> Iterator[tuple[int, int]]:
        """The processes of the attempt that were started with a rank, and that rank."""
        for pid in descendants(os.getpid()):
            environment = environment_of(pid)
            if environment.get(ATTEMPT_VARIABLE) == self.order.request.tag:
                with suppress(KeyError, ValueError):
                    yield pid, int(environment["RANK"])


def run_watched(order: LaunchOrder, *, root: Path) -> WatchedRun:
    """Run an order whose gang is on this machine, and leave no process, however it ends.

    Raises ValueError as `NodeLauncher.run`, ProcessesStuck if something cannot be killed.
    """
    launcher = NodeLauncher(root, node=socket.gethostname())
    watch = _Watch(order=order, run_dir=run_directory(root, order.request, order.node_rank))
    try:
        with ThreadPoolExecutor(max_workers=1) as thread:
            run: Future[NodeReport] = thread.submit(launcher.run, order)
            try:
                while not run.done():
                    watch.update()
                    time.sleep(_POLL_SECONDS)
            finally:
                # If this thread was interrupted, the attempt ends now.
                launcher.kill(order.request.tag)
            report = run.result()
    finally:
        launcher.close()
    watch.update()
    return WatchedRun(
        report=report,
        seconds=report.seconds,
        steps=tuple(watch.steps),
        ranks=frozenset(watch.ranks),
        connected_ranks=frozenset(watch.connected),
    )


def _connections(pid: int) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """The two ends of each TCP connection of a process."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return []
    return [
        ((_plain(one.laddr.ip), one.laddr.port), (_plain(one.raddr.ip), one.raddr.port))
        for one in connections
        if one.raddr
    ]


def _plain(address: str) -> str:
    """An IPv4 address as such, also if a socket of IPv6 has it."""
    return address.removeprefix("::ffff:")
