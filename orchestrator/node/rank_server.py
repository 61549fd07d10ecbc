"""The process that forks ranks: it has imported what they need, so a rank starts in milliseconds.

Three processes, each the child of the one before: an outer warden, an inner warden, and the
server, which preloads modules and forks ranks on request. Each of them adopts orphans below it.
When the launcher is gone, or one of the three, the others kill everything below them and end:
processes survive only if all three are killed at once. Nothing here touches CUDA: a context does
not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.core.trial.rank_environment import RANK_SERVERS_OWN
from orchestrator.node.cgroups import Cgroup
from orchestrator.node.processes import adopt_orphans, die_with, kill, kill_subtree, wake_with

# A process that is inside a driver or a network file system may take time to die.
KILL_PATIENCE_SECONDS = 30.0
MAX_MESSAGE_BYTES = 1 << 20
MAX_RANKS = 253  # descriptors in one message (SCM_MAX_FD)
_PARENT_CHECK_SECONDS = 1.0
_WATCHED_SIGNALS = (signal.SIGCHLD, signal.SIGCONT)


def main() -> int:
    """Arguments: descriptors of the control and life-line sockets, a cgroup or '', modules."""
    control, parent_socket = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
    cgroup = Cgroup(Path(sys.argv[3])) if sys.argv[3] else None
    parent, child = os.getppid(), _fork_inner(control, parent_socket, cgroup, sys.argv[4:])
    control.close()
    return _keep_watch(parent_socket, child, parent, cgroup)


def _fork_inner(
    control: socket.socket, parent_socket: socket.socket, cgroup: Cgroup | None, preload: list[str]
) -> int:
    """Adopt orphans, and start the inner warden, which starts the server.

    Each has a session of its own: one kill of a process group hits only one of them.
    """
    adopt_orphans()
    outer = os.getpid()
    if inner := os.fork():
        return inner
    os.setsid()
    adopt_orphans()
    inner = os.getpid()
    server = os.fork()
    if server == 0:
        os.setsid()
        if cgroup is not None:
            cgroup.join()
        _ForkServer(control, parent_socket, inner).serve(preload)
        os._exit(0)
    control.close()
    code = _keep_watch(parent_socket, server, outer, cgroup)
    if os.getppid() == outer:
        # It may be stopped (SIGSTOP): continue it, so that it can end.
        kill(outer, signal.SIGCONT)
    os._exit(code)


def _keep_watch(
    parent_socket: socket.socket, child: int, parent: int, cgroup: Cgroup | None
) -> int:
    """Wait for the end of the launcher, of the parent or of the child; then kill what is left.

    Returns 128 + n if signal n ended the child, as a shell does; passes an inner warden's code on.
    """
    ended_by = 0
    with _SignalHandlers() as signals, selectors.DefaultSelector() as selector:
        is_orphan = not wake_with(parent)
        selector.register(parent_socket, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        while not is_orphan:
            of_child = [status for pid, status in signals.reaped() if pid == child]
            if of_child:
                code = os.waitstatus_to_exitcode(of_child[0])
                ended_by = -code if code < 0 else max(0, code - 128)
                break
            ready = {key.fileobj for key, _ in selector.select(_PARENT_CHECK_SECONDS)}
            # Check the parent too: another fork of the launcher may keep the life-line open.
            if parent_socket in ready or os.getppid() != parent:
                break
    if cgroup is not None:
        cgroup.end()
    _, stuck = kill_subtree(patience_seconds=KILL_PATIENCE_SECONDS)
    return 1 if stuck else 128 + ended_by if ended_by else 0


class _SignalHandlers:
    """SIGCHLD, and the SIGCONT of a parent's death, as something to select on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> _SignalHandlers:
        for number in _WATCHED_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        """A fork, too, has to call this first."""
        signal.set_wakeup_fd(-1)
        for number in _WATCHED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def reaped(self) -> Iterator[tuple[int, int]]:
        """Ended children, adopted orphans included, with their wait status."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            yield pid, status


class _ForkServer:
    """Forks ranks, reports their ends, and clears its subtree on request."""

    def __init__(self, control: socket.socket, parent_socket: socket.socket, parent: int) -> None:
        self._control = control
        # It stays open until this process ends, which tells the launcher that the cleanup is over.
        self._parent_socket = parent_socket
        self._parent = parent
        self._signals = _SignalHandlers()
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, int] = {}  # process id -> rank

    def serve(self, preload: list[str]) -> None:
        adopt_orphans()
        # Garbage collection takes a fifth of the time of imports, and finds almost nothing.
        gc.disable()
        for module in preload:
            # Go on: each rank imports it again, and fails with this traceback in its own log.
            try:
                warm_up = getattr(importlib.import_module(module), "warm_up", None)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                continue
            # Go on: it only saves time.
            try:
                if warm_up is not None:
                    warm_up()
            except BaseException:  # noqa: BLE001
                sys.stderr.write(f"{module}.warm_up failed:\n{traceback.format_exc()}")
        # Ranks then share these pages instead of copying them.
        gc.freeze()
        gc.enable()
        with self._signals:
            is_orphan = not wake_with(self._parent)
            self._send({"event": "ready", "pid": os.getpid()})
            self._selector.register(self._control, selectors.EVENT_READ)
            self._selector.register(self._signals, selectors.EVENT_READ)
            while not is_orphan and self._handle_events():
                is_orphan = os.getppid() != self._parent
        kill_subtree(patience_seconds=KILL_PATIENCE_SECONDS)

    def _handle_events(self) -> bool:
        """One pass of the loop. False: the launcher is gone."""
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._signals in ready:
            self._report_ends()
        return self._control not in ready or self._handle_request()

    def _handle_request(self) -> bool:
        try:
            text, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_RANKS)
        except OSError:
            return False
        if not text:
            return False
        message = json.loads(text)
        match message["do"]:
            case "fork":
                self._fork_all(message, descriptors)
            case "clear":
                self._clear()
        return True

    def _fork_all(self, message: dict[str, Any], logs: list[int]) -> None:
        pids = []
        try:
            for place, log in zip(message["ranks"], logs, strict=True):
                pid = self._fork(message, place, log, logs)
                self._ranks[pid] = place["rank"]
                pids.append(pid)
        except OSError as exc:
            # The machine allows no more processes. The launcher ends the ranks forked before.
            self._send({"event": "fork_failed", "reason": str(exc)})
        finally:
            for log in logs:
                os.close(log)
        self._send({"event": "forked", "pids": pids})

    def _fork(
        self, message: dict[str, Any], place: dict[str, Any], log: int, logs: list[int]
    ) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        # A fork must never return into the server's loop.
        code = 1
        try:
            die_with(server)
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            for descriptor in logs:
                os.close(descriptor)
            self._signals.__exit__()
            self._selector.close()
            self._control.close()
            self._parent_socket.close()
            code = _be_rank(message, place)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(code)

    def _clear(self) -> None:
        """Kill the ranks and their descendants, and report that.

        If a rank's end was not reported before, we killed it.
        """
        self._report_ends()
        ranks = set(self._ranks)
        self._ranks.clear()
        killed, stuck = kill_subtree(patience_seconds=KILL_PATIENCE_SECONDS)
        self._send({"event": "clear", "killed": len(killed - ranks), "stuck": sorted(stuck)})

    def _report_ends(self) -> None:
        for pid, status in self._signals.reaped():
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                code = os.waitstatus_to_exitcode(status)
                self._send({"event": "ended", "rank": rank, "code": code, "at": time.time()})

    def _send(self, message: dict[str, Any]) -> None:
        # If the launcher is gone, the loop notices that as well.
        with suppress(OSError):
            self._control.send(json.dumps(message).encode())


def _be_rank(message: dict[str, Any], place: dict[str, Any]) -> int:
    """Run the program in this fresh process; return its exit code."""
    # A dump of a hundred gigabytes would delay the death of a rank by minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prefer_as_victim()
    for name in RANK_SERVERS_OWN:
        os.environ.pop(name, None)
    os.environ.update(message["environment"] | place["environment"])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    os.chdir(message["run_dir"])
    if place["cpus"]:
        os.sched_setaffinity(0, place["cpus"])
    try:
        _limit_threads()
        return importlib.import_module(message["program"]).main() or 0
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        sys.stderr.write(f"{exc.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - ends this rank
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _prefer_as_victim() -> None:
    """Have the kernel's OOM killer end a rank rather than the launcher, the server or Ray."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _limit_threads() -> None:
    """Apply the rank's OMP_NUM_THREADS to a torch that the server imported with another one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
