"""Runs the ranks of one node: starts them in fresh processes, watches them, and ends them all.

Plain Python, no Ray: used from an actor, where `run` blocks in one thread and `kill` arrives in
another, or directly. It decides nothing about trials: it reports how its ranks ended, and why the
first bad one failed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import translate, version_remark
from orchestrator.core.machines.node_health import xids_since
from orchestrator.core.trial.communication import recorded
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.failures import ASKED_TO_END, is_aftermath
from orchestrator.core.trial.fingerprint import Software
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.node_report import GpuUsage, NodeReport
from orchestrator.core.trial.protocol import Device, Heartbeat
from orchestrator.core.trial.redaction import Secrets, redacted
from orchestrator.node.cgroups import num_oom_kills, orphaned_cgroups
from orchestrator.node.cpu_watch import CpuWatch
from orchestrator.node.gang_environment import (
    gang_environment,
    gang_interfaces,
    gang_settings,
    rank_places,
)
from orchestrator.node.gpu_monitor import (
    GpuMemory,
    GpuMonitor,
    driver_version,
    pci_addresses,
    wait_until_clean,
)
from orchestrator.node.kernel_log import kernel_records
from orchestrator.node.machine_watch import MachineWatch
from orchestrator.node.numa import as_list, cores_near
from orchestrator.node.processes import kill_found, launcher_identity, orphaned
from orchestrator.node.program_software import ProgramSoftware, framework_of
from orchestrator.node.rank_server_client import (
    WARDEN_SECONDS,
    ProcessesStuck,
    RankServer,
    ServerLost,
)
from orchestrator.node.rank_watch import judge
from orchestrator.node.reserved_port import ReservedPort
from orchestrator.node.run_directory import make_run_directory, run_directory
from orchestrator.node.supervisor import NodeGang

logger = logging.getLogger(__name__)

# A new server starts after this many attempts, so that what a server leaks stays small.
MAX_GANGS_PER_SERVER = 1000
# A cancellation arrives at the latest a few seconds after the end of its attempt.
REMEMBERED_ATTEMPTS = 100
LEFTOVER_PATIENCE_SECONDS = 5.0
# A driver may take seconds to free the memory of a killed process.
DEVICES_CLEAN_SECONDS = 10.0
# Fields of a report that no rank writes. They are used for look-ups, so secrets stay in them.
_OUR_OWN_TEXTS = frozenset({"node", "log_path"})
NO_SOFTWARE = Software()


class NodeLauncher:
    """Runs one attempt at a time on this node. `root` is the folder of all run directories."""

    def __init__(self, root: Path, *, node: str) -> None:
        self.root = root.absolute()
        self._node = node
        self.root.mkdir(parents=True, exist_ok=True)
        self._identity = launcher_identity(self.root)
        self._server: RankServer | None = None
        self._rendezvous = ReservedPort()
        self._software = ProgramSoftware()
        self._running = threading.Lock()
        # Guards the two sets of tags below, and the writing end of the pipe.
        self._killing = threading.Lock()
        # A cancellation may arrive before its attempt, or after its end.
        self._cancelled: set[str] = set()
        self._ended: deque[str] = deque(maxlen=REMEMBERED_ATTEMPTS)
        self._gang: NodeGang | None = None
        self._closed = False
        self._is_preempted = False
        self._end_leftovers()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_is_open = True

    def run(self, order: LaunchOrder) -> NodeReport:
        """Run this node's part of an attempt until its last process is gone.

        The report has everything that went wrong. Raises ValueError for an order that contradicts
        itself, RuntimeError if busy or closed, and ProcessesStuck if something cannot be killed:
        then the node must not be used.
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
            self._rendezvous.release()
            self._running.release()

    def kill(self, tag: str) -> None:
        """Cancel an attempt by its tag, running or still to come, without waiting for its end."""
        with self._killing:
            if not self._wake_is_open or tag in self._ended:
                return
            self._cancelled.add(tag)
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"k")

    def preempt(self) -> None:
        """Close, because something outside of the sweep asked this process to end."""
        self._is_preempted = True
        self.close()

    def progress(self) -> Heartbeat | None:
        """The progress of the running attempt's least advanced rank; None between attempts."""
        gang = self._gang
        watch = gang.least_advanced() if gang is not None else None
        if gang is None or watch is None:
            return None
        limit = gang.total_limit_seconds
        return Heartbeat(phase=watch.phase, step=watch.step, total_limit_seconds=limit)

    def rendezvous(self) -> int:
        """Bind a port for rank 0's store, and keep it until the next attempt here has ended."""
        return self._rendezvous.take()

    def prepare(self, program: str) -> None:
        """Start to import what a program needs, without waiting for it."""
        server = self._server
        if server is None or server.program != program or server.num_gangs >= MAX_GANGS_PER_SERVER:
            self._stop_server()
            log_path = self.root / f"rank-server-{self._node}.txt"
            self._server = RankServer(program=program, identity=self._identity, log_path=log_path)

    def close(self) -> None:
        """Cancel the running attempt, end every process that was started here, and run no more."""
        self._closed = True
        gang = self._gang
        if gang is not None:
            self.kill(gang.tag)
        with self._running:
            self._close_wake()
            self._rendezvous.release()
            self._stop_server()

    def _run(self, order: LaunchOrder) -> NodeReport:
        started = time.monotonic()
        request = order.request
        run_dir = run_directory(self.root, request, order.node_rank)
        try:
            unusable = make_run_directory(run_dir, request) or wait_until_clean(
                order.devices, patience_seconds=DEVICES_CLEAN_SECONDS
            )
        except OSError as exc:
            unusable = f"cannot write the run directory {run_dir}: {exc.strerror}"
        if unusable is not None:
            ended = self._launch_failed(unusable), time.time()
            return self._report(order, started, failure=ended)
        # The rank server imports meanwhile.
        self.prepare(order.program)
        program = self._software.begin(order, cancelled=self._cancelled)
        oom_kills_before, began = num_oom_kills(), time.clock_gettime(time.CLOCK_MONOTONIC)
        watch = CpuWatch(
            root=self.root, warden=self._warden(), orchestrator=order.orchestrator, cpus=order.cpus
        )
        with GpuMonitor.open(order.devices) as monitor:
            gang = NodeGang(
                order,
                node=self._node,
                run_dir=run_dir,
                wake=self._wake_read,
                cancelled=self._cancelled,
                machine=MachineWatch(gpus=monitor, cpus=watch, program=program),
            )
            self._gang = gang
            near = cores_near(pci_addresses(order.devices)) if not order.cpus else []
            server_lost = self._run_gang(gang, order, run_dir, near=near)
        load = monitor.load(watch.load(), own=watch.pids)
        failure = None
        fullest = monitor.fullest()
        is_measured = gang.has_enough or all(watch.measured for watch in gang.watches)
        if not gang.watches or not is_measured:
            failure = self._judge(
                gang,
                server_lost,
                oom_kills=num_oom_kills() - oom_kills_before,
                memory=fullest,
                xids=monitor.xids
                or (_logged_xids(began, monitor.addresses) if order.devices else ()),
            )
        software = _with_driver(program.software(), order)
        return self._report(
            order,
            started,
            gang=gang,
            gpu=monitor.usage(),
            device_memory_bytes=fullest.total_bytes if fullest is not None else None,
            load=load,
            software=software,
            bound_cpus=tuple(as_list(cores) for cores in near if cores),
            failure=_with_version(failure, order, software),
        )

    def _run_gang(
        self, gang: NodeGang, order: LaunchOrder, run_dir: Path, *, near: Sequence[Sequence[int]]
    ) -> Failure | None:
        """Run the ranks. Returns how the rank server was lost, if it was."""
        port = order.master_port if order.master_port is not None else self.rendezvous()
        try:
            self.prepare(order.program)
            assert self._server is not None
            gang.run(
                self._server,
                environment=gang_environment(order, port, run_dir, root=self.root),
                ranks=rank_places(order, near),
            )
        except ServerLost as exc:
            server = self._server
            gang.processes_killed += self._stop_server()
            number = server.ended_by if server is not None else None
            if number in ASKED_TO_END:
                return self._preempted(signal.Signals(number), "rank server")
            return self._launch_failed(str(exc))
        finally:
            gang.finish()
        return None

    def _warden(self) -> int | None:
        return self._server.warden if self._server is not None else None

    def _judge(
        self,
        gang: NodeGang,
        server_lost: Failure | None,
        *,
        oom_kills: int,
        memory: GpuMemory | None,
        xids: Sequence[int],
    ) -> tuple[Failure, float]:
        """Return why this node's ranks failed, and when."""
        verdict = judge(
            [
                watch.evidence(
                    self._node,
                    num_oom_kills=oom_kills,
                    xids=xids,
                    peak_memory_bytes=memory.used_bytes if memory is not None else None,
                    device_memory_bytes=memory.total_bytes if memory is not None else None,
                )
                for watch in gang.watches
                if not watch.measured
            ]
        )
        if gang.cancelled and (verdict is None or is_aftermath(verdict[0])):
            if self._is_preempted:
                return self._preempted(signal.SIGTERM, "launcher"), time.time()
            kind = FailureKind.CANCELLED
            return Failure(kind=kind, message="cancelled", node=self._node), time.time()
        if verdict is not None:
            return verdict
        if oom_kills:
            text = f"the kernel's OOM killer ended the rank server (oom_kill +{oom_kills})"
            kind = FailureKind.OOM_HOST
            failure = Failure(kind=kind, message=text, node=self._node, evidence=text)
            return failure, time.time()
        unknown = "the ranks ended for no reason that is known"
        return server_lost or self._launch_failed(unknown), time.time()

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
        gang: NodeGang | None = None,
        gpu: GpuUsage | None = None,
        device_memory_bytes: int | None = None,
        load: MachineLoad = NO_LOAD,
        software: Software = NO_SOFTWARE,
        bound_cpus: tuple[str, ...] = (),
        failure: tuple[Failure, float] | None,
    ) -> NodeReport:
        interfaces, settings = gang_interfaces(order), gang_settings(order)
        report = NodeReport(
            node=self._node,
            ranks=tuple(watch.outcome() for watch in gang.watches) if gang is not None else (),
            failure=failure[0] if failure is not None else None,
            failed_at_unix_seconds=failure[1] if failure is not None else None,
            has_enough=gang is not None and gang.has_enough,
            seconds=time.monotonic() - started,
            teardown_seconds=gang.teardown_seconds if gang is not None else None,
            processes_killed=gang.processes_killed if gang is not None else 0,
            environment=recorded({**os.environ, **settings}, without=order.secrets),
            set_by_launcher=tuple(interfaces),
            gpu=gpu or GpuUsage(),
            device_memory_bytes=device_memory_bytes,
            load=load,
            software=software,
            bound_cpus=bound_cpus,
        )
        report = redacted(report, Secrets(order.secrets), but=_OUR_OWN_TEXTS)
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

    def _end_leftovers(self) -> None:
        """End what dead launchers of this root left on this node. Raises ProcessesStuck."""
        escaped = [pid for group in orphaned_cgroups() for pid in group.end()]
        # The wardens of dead launchers end themselves, and also processes without a tag.
        until = time.monotonic() + WARDEN_SECONDS
        while orphaned(self.root) and time.monotonic() < until:
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


def _with_driver(software: Software, order: LaunchOrder) -> Software:
    """Add the driver's version, which ranks do not tell."""
    if not order.devices or software.stack.driver is not None:
        return software
    stack = software.stack.model_copy(update={"driver": driver_version()})
    return replace(software, stack=stack)


def _with_version(
    failure: tuple[Failure, float] | None, order: LaunchOrder, software: Software
) -> tuple[Failure, float] | None:
    """Add to a failure that names a framework's setting which of its versions were tried."""
    if failure is None or failure[0].kind is not FailureKind.USER_ERROR:
        return failure
    framework, request = framework_of(order), order.request
    if framework is None:
        return failure
    job = Job.of_layout(
        request.layout,
        request.model,
        sequence_length=request.sequence_length,
        gpus_per_node=request.layout.world_size,
    )
    first, at = failure
    found = translate(job, framework)
    remark = version_remark(found, dict(software.packages), first.message)
    if remark is None:
        return failure
    return replace(first, message=f"{first.message}; {remark}"), at


def _logged_xids(since_seconds: float, addresses: Collection[str]) -> tuple[int, ...]:
    """NVIDIA's errors of these devices in the kernel's log since then, if we may read it."""
    try:
        return tuple(xids_since(kernel_records(), since_seconds * 1e6, addresses=addresses))
    except OSError:
        return ()


def _check(order: LaunchOrder) -> None:
    needs_devices = order.request.device is Device.CUDA
    if needs_devices and len(order.devices) != order.local_world_size:
        raise ValueError(
            f"devices {list(order.devices)} for {order.local_world_size} ranks on CUDA: "
            "expected one device per rank"
        )
    world_size = order.request.layout.world_size
    if order.master_port is None and order.local_world_size != world_size:
        raise ValueError(
            f"a gang of {world_size} ranks, {order.local_world_size} of them here, needs a "
            "master_port: take it from rendezvous() of the launcher that runs rank 0"
        )
