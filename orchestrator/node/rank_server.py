"""The process that forks ranks: it has imported what they need, so that a fresh process starts in
milliseconds, and it outlives none of them.

Three processes, each the child of the one before, started as `python -m
orchestrator.node.rank_server`: an outer warden, an inner warden, and the server, which preloads
modules and forks ranks on request. Each of them adopts whatever loses its parent below it. When the
launcher is gone, or one of the three, those that are left kill everything below them and end: only
a kill of all three at once leaves anything. Nothing here touches CUDA: a context does not survive a
fork.
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
from pathlib import Path
from typing import Any

from orchestrator.node.cgroups import Cgroup
from orchestrator.node.processes import adopt_orphans, die_with, kill, kill_subtree, wake_with

# A process in the kernel's hands (driver, network file system) may take its time to die
KILL_PATIENCE_SECONDS = 30.0
MAX_MESSAGE_BYTES = 1 << 20
MAX_RANKS = 253  # descriptors one message may carry (SCM_MAX_FD)
ORIGINAL_PATH_VARIABLE = "SWEEP_ORIGINAL_PYTHONPATH"
_PARENT_CHECK_SECONDS = 1.0
_WATCHED_SIGNALS = (signal.SIGCHLD, signal.SIGCONT)


def main() -> int:
    """Arguments: the descriptor of the control socket, that of the life-line socket, a cgroup or
    nothing, then the modules to preload.
    """
    control, life_line = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
    cgroup = Cgroup(Path(sys.argv[3])) if sys.argv[3] else None
    preload = sys.argv[4:]
    os.environ["PYTHONPATH"] = os.environ.pop(ORIGINAL_PATH_VARIABLE, "")
    parent, child = os.getppid(), _fork_inner(control, life_line, cgroup, preload)
    control.close()
    return _keep_watch(life_line, child, parent, cgroup)


def _fork_inner(
    control: socket.socket, life_line: socket.socket, cgroup: Cgroup | None, preload: list[str]
) -> int:
    """Adopt orphans, and start the inner warden, which starts the server.

    Each in a session of its own: one group kill hits one of them.
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
        _Server(control, life_line, inner).serve(preload)
        os._exit(0)
    control.close()
    code = _keep_watch(life_line, server, outer, cgroup)
    if os.getppid() == outer:
        # One that somebody has stopped has nothing left to do but to end
        kill(outer, signal.SIGCONT)
    os._exit(code)


def _keep_watch(life_line: socket.socket, child: int, parent: int, cgroup: Cgroup | None) -> int:
    """Wait for the end of the launcher, of the parent or of the child; then leave nothing alive.

    Returns 128 + n where signal n ended the child, as a shell does; an inner warden's code is
    passed on.
    """
    ended_by = 0
    with _SignalHandlers() as signals, selectors.DefaultSelector() as selector:
        is_orphan = not wake_with(parent)
        selector.register(life_line, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        while not is_orphan:
            of_child = [status for pid, status in signals.reaped() if pid == child]
            if of_child:
                code = os.waitstatus_to_exitcode(of_child[0])
                ended_by = -code if code < 0 else max(0, code - 128)
                break
            # The second test covers a life-line that somebody else holds open, such as another fork
            # of the launcher.
            if (
                any(key.fileobj is life_line for key, _ in selector.select(_PARENT_CHECK_SECONDS))
                or os.getppid() != parent
            ):
                break
    if cgroup is not None:
        cgroup.end()
    _, stuck = kill_subtree(patience_seconds=KILL_PATIENCE_SECONDS)
    return 1 if stuck else 128 + ended_by if ended_by else 0


class _SignalHandlers:
    """SIGCHLD, and the SIGCONT that tells of a parent's death, as something to select on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> _SignalHandlers:
        for number in _WATCHED_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        """Also what a fork has to do first."""
        signal.set_wakeup_fd(-1)
        for number in _WATCHED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def reaped(self) -> Iterator[tuple[int, int]]:
        """Ended children, orphans that we adopted among them, with their wait status."""
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            yield pid, status


class _Server:
    """Forks ranks, reports their ends, and clears its subtree when told to."""

    def __init__(self, control: socket.socket, life_line: socket.socket, parent: int) -> None:
        self._control = control
        # Held until it ends: so the launcher sees when it has cleared up
        self._life_line = life_line
        self._parent = parent
        self._signals = _SignalHandlers()
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, int] = {}  # process id -> rank

    def serve(self, preload: list[str]) -> None:
        adopt_orphans()
        # Looks for garbage among what is loaded take a fifth of the time, and find next to none
        gc.disable()
        for module in preload:
            try:
                importlib.import_module(module)
            except BaseException:  # noqa: BLE001
                # Each rank imports it again, and fails with this traceback in its own log
                traceback.print_exc()
        # What is loaded now stays for good: ranks then share these pages instead of copying them
        gc.freeze()
        gc.enable()
        with self._signals:
            is_orphan = not wake_with(self._parent)
            self._say({"event": "ready", "pid": os.getpid()})
            self._selector.register(self._control, selectors.EVENT_READ)
            self._selector.register(self._signals, selectors.EVENT_READ)
            while not is_orphan and self._turn():
                is_orphan = os.getppid() != self._parent
        kill_subtree(patience_seconds=KILL_PATIENCE_SECONDS)

    def _turn(self) -> bool:
        """One round of the loop. False: the launcher is gone."""
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._signals in ready:
            for pid, status in self._signals.reaped():
                self._report_end(pid, status)
        if self._control in ready:
            return self._obey()
        return True

    def _obey(self) -> bool:
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
            # No process to be had: the launcher clears the ones before it
            self._say({"event": "fork_failed", "reason": str(exc)})
        finally:
            for log in logs:
                os.close(log)
        self._say({"event": "forked", "pids": pids})

    def _fork(
        self, message: dict[str, Any], place: dict[str, Any], log: int, logs: list[int]
    ) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
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
            self._life_line.close()
            code = _be_rank(message, place)
        except BaseException:  # noqa: BLE001
            # A fork must never return into the server's loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _clear(self) -> None:
        """Kill ranks and whatever they left, and say so.

        A rank whose end was not reported before this was killed by us.
        """
        for pid, status in self._signals.reaped():
            self._report_end(pid, status)
        ranks = set(self._ranks)
        self._ranks.clear()
        killed, stuck = kill_subtree(patience_seconds=KILL_PATIENCE_SECONDS)
        self._say({"event": "clear", "killed": len(killed - ranks), "stuck": sorted(stuck)})

    def _report_end(self, pid: int, status: int) -> None:
        rank = self._ranks.pop(pid, None)
        if rank is not None:
            self._say(
                {
                    "event": "ended",
                    "rank": rank,
                    "code": os.waitstatus_to_exitcode(status),
                    "at": time.time(),
                }
            )

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            # The launcher is gone; the next turn of the loop sees that too
            pass


def _be_rank(message: dict[str, Any], place: dict[str, Any]) -> int:
    """Run the program in this fresh process; return its exit code."""
    # Dumping a hundred gigabytes would delay the death of a rank by minutes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prefer_as_victim()
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
    except BaseException:  # noqa: BLE001
        # Whatever it was ends this rank, with its traceback in the log
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _prefer_as_victim() -> None:
    """Let the kernel's OOM killer take a rank rather than the launcher, the server or Ray."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError:
        pass


def _limit_threads() -> None:
    """Apply OMP_NUM_THREADS to a torch that the server imported: OpenMP read the server's
    environment, not this rank's.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    sys.exit(main())
