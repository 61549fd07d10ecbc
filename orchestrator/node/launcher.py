"""The ranks of one node: started in fresh processes, watched, ended, and proven gone.

Plain Python, no Ray: used from an actor, where `run` blocks in one thread and `kill` arrives in
another, or directly. It decides nothing about trials; it reports how its ranks ended, and what the
first bad one died of.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.core.machines.node_health import xids_since
from orchestrator.core.trial.communication import recorded
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.failures import ASKED_TO_END, is_aftermath
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.protocol import (
    ATTEMPT_VARIABLE,
    REQUEST_FILE,
    RUN_DIR_VARIABLE,
    Device,
    GpuUsage,
    Heartbeat,
    LaunchOrder,
    NodeReport,
    TrialRequest,
    encode,
)
from orchestrator.core.trial.redaction import Secrets, blotted
from orchestrator.node.cgroups import orphaned_cgroups
from orchestrator.node.cpu_watch import CpuWatch
from orchestrator.node.gpu_monitor import GpuMemory, GpuMonitor, wait_until_clean
from orchestrator.node.interfaces import rank_interfaces
from orchestrator.node.kernel_log import kernel_records
from orchestrator.node.processes import kill_found, launcher_identity, num_oom_kills, orphaned
from orchestrator.node.rank_server_client import (
    WARDEN_SECONDS,
    ProcessesStuck,
    RankServer,
    ServerLost,
)
from orchestrator.node.rank_watch import judge
from orchestrator.node.supervisor import Gang

logger = logging.getLogger(__name__)

# Then a new one: whatever a server leaks stays small
MAX_GANGS_PER_SERVER = 1000
# A cancellation is under way for seconds at most
REMEMBERED_ATTEMPTS = 100
LEFTOVER_PATIENCE_SECONDS = 5.0
# Fields of a report that no program writes. They are looked up, so nothing in them is replaced.
_OUR_OWN_TEXTS = frozenset({"node", "log_path"})
# A driver may take seconds to take the memory of a killed process back
DEVICES_CLEAN_SECONDS = 10.0


class NodeLauncher:
    """Runs one attempt at a time on this node.

    `root` is the folder of all run directories; `close` ends every process it has started.
    """

    def __init__(self, root: Path, *, node: str) -> None:
        self.root = root.absolute()
        self._node = node
        self.root.mkdir(parents=True, exist_ok=True)
        self._identity = launcher_identity(self.root)
        self._server: RankServer | None = None
        self._rendezvous: socket.socket | None = None
        self._running = threading.Lock()
        # Tags; one may arrive before its attempt does
        self._cancelled: set[str] = set()
        self._ended: deque[str] = deque(
            maxlen=REMEMBERED_ATTEMPTS
        )  # tags whose cancellation comes too late
        # Guards both, and the pipe's writing end
        self._killing = threading.Lock()
        self._gang: Gang | None = None
        self._closed = False
        self._is_preempted = False
        self._sweep_leftovers()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_is_open = True

    def run(self, order: LaunchOrder) -> NodeReport:
        """Run this node's share of an attempt, to the last process gone.

        All that goes wrong on the way stands in the report. Raises ValueError for an order that
        contradicts itself, RuntimeError when busy or closed, and ProcessesStuck where something
        cannot be killed: the node is not to be used then.
        """
        _check(order)
        if self._closed or not self._running.acquire(blocking=False):
            state = "closed" if self._closed else "busy; it runs one attempt at a time"
            raise RuntimeError(
                f"attempt {order.request.tag}: the launcher of {self._node} is {state}"
            )
        try:
            return self._run(order)
        finally:
            with self._killing:
                self._cancelled.discard(order.request.tag)
                self._ended.append(order.request.tag)
            self._gang = None
            self._release_rendezvous()
            self._running.release()

    def kill(self, tag: str) -> None:
        """Cancel an attempt (`TrialRequest.tag`), running or still to come.

        Returns at once; `run` returns when all is gone.
        """
        with self._killing:
            if not self._wake_is_open or tag in self._ended:
                return
            self._cancelled.add(tag)
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"k")

    def preempt(self) -> None:
        """End what runs, and refuse to run anything more: this process was asked from outside to
        end. Returns when all is gone.
        """
        self._is_preempted = True
        self.close()

    def progress(self) -> Heartbeat | None:
        """How far the least advanced rank of the running attempt is; None between attempts."""
        gang = self._gang
        watch = gang.least_advanced() if gang is not None else None
        if gang is None or watch is None:
            return None
        return Heartbeat(
            phase=watch.phase, step=watch.step, total_limit_seconds=gang.total_limit_seconds
        )

    def rendezvous(self) -> int:
        """Bind a port for rank 0's store, for a gang of several nodes, and hold it until the next
        attempt here has ended.
        """
        self._release_rendezvous()
        self._rendezvous = hold_port()
        return int(self._rendezvous.getsockname()[1])

    def prepare(self, program: str) -> None:
        """Start importing what a program needs, without waiting for it."""
        if (
            self._server is None
            or self._server.program != program
            or self._server.num_gangs >= MAX_GANGS_PER_SERVER
        ):
            self._stop_server()
            self._server = RankServer(
                program=program,
                identity=self._identity,
                log_path=self.root / f"rank-server-{self._node}.txt",
            )

    def close(self) -> None:
        """Cancel what runs, and end every process.

        The launcher refuses to run anything afterwards.
        """
        self._closed = True
        gang = self._gang
        if gang is not None:
            self.kill(gang.tag)
        with self._running:
            self._close_wake()
            self._release_rendezvous()
            self._stop_server()

    def _run(self, order: LaunchOrder) -> NodeReport:
        started = time.monotonic()
        request = order.request
        run_dir = run_directory(self.root, request, order.node_rank)
        try:
            unusable = _make_run_directory(run_dir, request) or wait_until_clean(
                order.devices, patience_seconds=DEVICES_CLEAN_SECONDS
            )
        except OSError as exc:
            unusable = f"cannot write the run directory {run_dir}: {exc.strerror}"
        if unusable is not None:
            return self._report(
                order, started, failure=self._launch_failed(unusable), failed_at=time.time()
            )
        oom_kills_before, began = num_oom_kills(), time.clock_gettime(time.CLOCK_MONOTONIC)
        watch = CpuWatch(
            root=self.root, warden=self._warden, orchestrator=order.orchestrator, cpus=order.cpus
        )
        with GpuMonitor(order.devices) as monitor:

            def look(timed_steps_run: bool) -> None:
                monitor.count(timed_steps_run)
                watch.tick(timed_steps_run)

            gang = Gang(
                order,
                node=self._node,
                run_dir=run_dir,
                wake=self._wake_read,
                is_cancelled=lambda: request.tag in self._cancelled,
                on_timed=look,
            )
            self._gang = gang
            server_lost = self._run_gang(gang, order, run_dir)
        load = monitor.load(watch.load(), own=watch.pids)
        failure, failed_at = None, None
        if not gang.watches or not all(watch.measured for watch in gang.watches):
            memory = monitor.fullest()
            xids = monitor.xids or (_logged_xids(began, monitor.addresses) if order.devices else ())
            failure, failed_at = self._judge(
                gang,
                server_lost,
                oom_kills=num_oom_kills() - oom_kills_before,
                memory=memory,
                xids=xids,
            )
        return self._report(
            order,
            started,
            gang=gang,
            gpu=monitor.usage(),
            load=load,
            failure=failure,
            failed_at=failed_at,
        )

    def _run_gang(self, gang: Gang, order: LaunchOrder, run_dir: Path) -> Failure | None:
        """Run the ranks. Returns how the rank server was lost, if it was."""
        port = order.master_port if order.master_port is not None else self.rendezvous()
        lost = None
        try:
            self.prepare(order.program)
            assert self._server is not None
            gang.run(
                self._server,
                environment=gang_environment(order, port, run_dir),
                ranks=_places(order),
            )
        except ServerLost as exc:
            server = self._server
            gang.processes_killed += self._stop_server()
            lost = self._server_lost(str(exc), server.ended_by if server is not None else None)
        finally:
            gang.finish()
        return lost

    def _warden(self) -> int | None:
        return self._server.warden if self._server is not None else None

    def _judge(
        self,
        gang: Gang,
        server_lost: Failure | None,
        *,
        oom_kills: int,
        memory: GpuMemory | None,
        xids: Sequence[int],
    ) -> tuple[Failure, float]:
        """What this node's ranks died of, and when."""
        peak, capacity = (
            (memory.used_bytes, memory.total_bytes) if memory is not None else (None, None)
        )
        verdict = judge(
            [
                watch.evidence(
                    self._node,
                    num_oom_kills=oom_kills,
                    xids=xids,
                    peak_memory_bytes=peak,
                    device_memory_bytes=capacity,
                )
                for watch in gang.watches
                if not watch.measured
            ]
        )
        if gang.cancelled and (verdict is None or is_aftermath(verdict[0])):
            if self._is_preempted:
                return self._preempted(signal.SIGTERM, "launcher"), time.time()
            return Failure(
                kind=FailureKind.CANCELLED, message="cancelled", node=self._node
            ), time.time()
        if verdict is not None:
            return verdict
        if oom_kills:
            text = f"the kernel's OOM killer ended the rank server (oom_kill +{oom_kills})"
            return Failure(
                kind=FailureKind.OOM_HOST, message=text, node=self._node, evidence=text
            ), time.time()
        return server_lost or self._launch_failed(
            "the ranks ended for no reason that is known"
        ), time.time()

    def _server_lost(self, reason: str, signal_number: int | None) -> Failure:
        if signal_number not in ASKED_TO_END:
            return self._launch_failed(reason)
        return self._preempted(signal.Signals(signal_number), "rank server")

    def _preempted(self, number: signal.Signals, what: str) -> Failure:
        text = f"{self._node}: {number.name} from outside ended the {what}"
        return Failure(
            kind=FailureKind.PREEMPTED, message=text, node=self._node, signal=number, evidence=text
        )

    def _launch_failed(self, reason: str) -> Failure:
        return Failure(
            kind=FailureKind.LAUNCH_FAILED,
            message=f"{self._node}: {reason}",
            node=self._node,
            evidence=reason,
        )

    def _report(
        self,
        order: LaunchOrder,
        started: float,
        *,
        gang: Gang | None = None,
        gpu: GpuUsage | None = None,
        load: MachineLoad = NO_LOAD,
        failure: Failure | None,
        failed_at: float | None,
    ) -> NodeReport:
        report = NodeReport(
            node=self._node,
            ranks=tuple(watch.outcome() for watch in gang.watches) if gang is not None else (),
            failure=failure,
            failed_at_unix_seconds=failed_at,
            seconds=time.monotonic() - started,
            teardown_seconds=gang.teardown_seconds if gang is not None else None,
            processes_killed=gang.processes_killed if gang is not None else 0,
            environment=recorded(
                {**os.environ, **(chosen := _interfaces(order))}, without=order.secrets
            ),
            set_by_launcher=tuple(chosen),
            gpu=gpu or GpuUsage(),
            load=load,
        )
        report = blotted(report, Secrets(order.secrets), but=_OUR_OWN_TEXTS)
        if report.failure is not None:
            logger.info(
                "Attempt %s ended on %s: %s",
                order.request.tag,
                self._node,
                report.failure.message,
                extra={"action": "failed", "kind": report.failure.kind},
            )
        return report

    def _stop_server(self) -> int:
        """Returns how many processes outlived their server, and were found by their tag."""
        server, self._server = self._server, None
        return server.stop() if server is not None else 0

    def _close_wake(self) -> None:
        with self._killing:
            if self._wake_is_open:
                self._wake_is_open = False
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _release_rendezvous(self) -> None:
        held, self._rendezvous = self._rendezvous, None
        if held is not None:
            held.close()

    def _sweep_leftovers(self) -> None:
        """End what launchers of this root left behind on this node when they were killed together
        with their rank servers.
        """
        escaped = [pid for group in orphaned_cgroups() for pid in group.end()]
        until = time.monotonic() + WARDEN_SECONDS
        while orphaned(self.root) and time.monotonic() < until:
            # For their wardens, which also end what has no tag
            time.sleep(0.02)
        found, stuck = kill_found(
            lambda: orphaned(self.root), patience_seconds=LEFTOVER_PATIENCE_SECONDS
        )
        if killed := found.union(escaped):
            logger.warning(
                "Ended %d processes whose launcher is dead: %s",
                len(killed),
                sorted(killed),
                extra={"action": "swept"},
            )
        if stuck:
            raise ProcessesStuck(stuck)


def _logged_xids(since_seconds: float, addresses: Collection[str]) -> tuple[int, ...]:
    """NVIDIA's errors of these devices in the kernel's log from then on; none where it cannot be
    read.
    """
    try:
        return tuple(xids_since(kernel_records(), since_seconds * 1e6, addresses=addresses))
    except OSError:
        return ()


def run_directory(root: Path, request: TrialRequest, node_rank: int) -> Path:
    """Where the ranks of one node leave what they have to say about one attempt; node by node, for
    roots on a shared file system.
    """
    return root / f"trial-{request.trial_id}" / f"attempt-{request.attempt}" / f"node-{node_rank}"


def hold_port() -> socket.socket:
    """Bind a free port such that only the program it is meant for can listen on it while the socket
    is held.

    Both that program's socket and this one allow the reuse of addresses, and this one does not
    listen: so Linux lets it in. Anybody who looks for a free port meanwhile is given another,
    because the kernel gives away none that is bound.
    """
    try:
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("::", 0))
    except OSError:  # no IPv6 here
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.bind(("", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def gang_environment(order: LaunchOrder, port: int, run_dir: Path) -> dict[str, str]:
    """torchrun's environment, as far as it is the same for all ranks of this node."""
    request = order.request
    if order.cpus:
        threads = len(order.cpus) // order.local_world_size
    else:
        threads = len(os.sched_getaffinity(0)) // max(order.local_world_size, order.node_slots or 0)
    environment = {
        "WORLD_SIZE": str(request.layout.world_size),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(order.node_rank),
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": request.tag,
        "OMP_NUM_THREADS": str(max(1, threads)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts them
        "CUDA_VISIBLE_DEVICES": ",".join(order.devices),
        RUN_DIR_VARIABLE: str(run_dir),
        ATTEMPT_VARIABLE: request.tag,
    }
    return environment | _interfaces(order) | dict(order.environment) | dict(order.secrets)


def _interfaces(order: LaunchOrder) -> dict[str, str]:
    spans_nodes = order.local_world_size < order.request.layout.world_size
    return rank_interfaces(order.address if spans_nodes else None, os.environ)


def _check(order: LaunchOrder) -> None:
    if order.request.one_rank_per_node:
        return  # whatever there is, is its own
    needs_devices = order.request.device is Device.CUDA
    if needs_devices and len(order.devices) != order.local_world_size:
        raise ValueError(
            f"devices {list(order.devices)} for {order.local_world_size} ranks on CUDA: expected one device per rank"
        )
    if order.master_port is None and order.local_world_size != order.request.layout.world_size:
        raise ValueError(
            f"a gang of {order.request.layout.world_size} ranks, {order.local_world_size} of them here, needs a master_port:"
            " take it from rendezvous() of the launcher that runs rank 0"
        )


def _make_run_directory(run_dir: Path, request: TrialRequest) -> str | None:
    """Make it and leave the request in it. Returns why it cannot be used."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_dir.mkdir()
    except FileExistsError:
        return f"{run_dir} exists: an attempt's directory is never written twice. Give the attempt a new number, or the sweep a new folder"
    (run_dir / REQUEST_FILE).write_bytes(encode(request))
    return None


def _places(order: LaunchOrder) -> list[dict[str, Any]]:
    """What differs from rank to rank."""
    cores_per_rank = len(order.cpus) // order.local_world_size
    return [
        {
            "rank": order.first_rank + local_rank,
            "environment": {
                "RANK": str(order.first_rank + local_rank),
                "LOCAL_RANK": str(local_rank),
            },
            "cpus": list(
                order.cpus[local_rank * cores_per_rank :][:cores_per_rank]
                if cores_per_rank
                else order.cpus
            ),
        }
        for local_rank in range(order.local_world_size)
    ]
