"""The launcher's side of a rank server: starts it, has it fork and kill ranks, and ends it.

Knows nothing of trials: see supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from layout_sweep.start import command
from orchestrator.core.trial.rank_environment import RAY_FOLDER_VARIABLE, needed
from orchestrator.node.cgroups import make_cgroup
from orchestrator.node.processes import LAUNCHER_VARIABLE, kill, kill_found, tagged
from orchestrator.node.rank_server import (
    KILL_PATIENCE_SECONDS,
    MAX_MESSAGE_BYTES,
)

SERVER = "orchestrator.node.rank_server"
# Time for the wardens' cleanup, which takes milliseconds unless a process hangs in the kernel.
WARDEN_SECONDS = 2.0
# Time for one request: a stopped server must not block its launcher.
_SEND_SECONDS = 10.0

_numbers = count(1)  # of this process's servers

# A client of torch's store looks its server's name up in reverse; a resolver that does not answer
# costs 5 s in each process.
_RESOLVER_OPTIONS = "timeout:1 attempts:1"


class ServerLost(Exception):
    """The rank server has ended by itself, or does not answer."""


class ProcessesStuck(Exception):
    """Processes cannot be killed. The node must not be used until they are gone."""

    def __init__(self, pids: Collection[int]) -> None:
        where = "in the kernel (driver, network file system)"
        super().__init__(f"processes {sorted(pids)} do not die: they hang {where}")


class RankServer:
    """A running rank server that has preloaded one program."""

    def __init__(self, *, program: str, identity: str, log_path: Path) -> None:
        self.program = program
        self.pid: int | None = None  # None until it is ready
        self.num_gangs = 0
        self._has_died = False
        self._identity = identity
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._parent_socket, parent_socket = socket.socketpair()
        self._control.settimeout(_SEND_SECONDS)
        self._cgroup = make_cgroup(identity, next(_numbers))
        with control, parent_socket, log_path.open("ab") as log:
            descriptors = control.fileno(), parent_socket.fileno()
            cgroup = str(self._cgroup.path) if self._cgroup else ""
            self._process = subprocess.Popen(
                command(SERVER, *map(str, descriptors), cgroup, program),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A terminal's Ctrl-C and Ray's kill of a process group are for the launcher: the
                # server notices its end by EOF.
                start_new_session=True,
                env=_environment(identity),
            )

    @property
    def warden(self) -> int:
        """The process id of the outer warden: all that the server starts is below it."""
        return self._process.pid

    @property
    def ended_by(self) -> int | None:
        """The signal that ended the server or its warden, if one did."""
        code = self._process.poll()
        if code is None or 0 <= code <= 128:
            return None
        return -code if code < 0 else code - 128

    def fileno(self) -> int:
        return self._control.fileno()

    def fork(
        self,
        *,
        run_dir: Path,
        environment: Mapping[str, str],
        ranks: Sequence[Mapping[str, Any]],
        logs: Sequence[int],
    ) -> None:
        """Request one process per rank, which writes to its descriptor in `logs`.

        Answers: `forked`, then `ended` per rank.
        """
        self.num_gangs += 1
        message = {
            "do": "fork",
            "program": self.program,
            "run_dir": str(run_dir),
            "environment": dict(environment),
            "ranks": list(ranks),
        }
        self._request(message, logs)

    def clear(self) -> None:
        """Request the end of everything below the server. Answer: `clear`."""
        self._request({"do": "clear"})

    def _request(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
        except OSError as exc:
            raise self._lost(f"does not accept requests: {exc}", exc) from exc

    def receive(self) -> dict[str, Any]:
        """Read one answer. Raises ServerLost at its end."""
        try:
            text = self._control.recv(MAX_MESSAGE_BYTES)
        except OSError as exc:
            raise self._lost(f"does not answer: {exc}", exc) from exc
        if not text:
            raise self._lost("died")
        message: dict[str, Any] = json.loads(text)
        if message["event"] == "ready":
            self.pid = message["pid"]
        return message

    def _lost(self, reason: str, exc: OSError | None = None) -> ServerLost:
        self._has_died = not isinstance(exc, TimeoutError)
        return ServerLost(f"the rank server {reason}")

    def stop(self) -> int:
        """End the server and all below it, and wait for that. Raises ProcessesStuck.

        Returns how many processes had to be found by their cgroup or their tag.
        """
        self._control.close()
        self._end_wardens()
        escaped = self._cgroup.end() if self._cgroup is not None else []
        # If both wardens and the server were killed, and there is no cgroup, only the tag still
        # connects us to what descends from ranks.
        killed, stuck = kill_found(
            lambda: tagged(self._identity), patience_seconds=KILL_PATIENCE_SECONDS
        )
        if stuck:
            raise ProcessesStuck(stuck)
        return len(killed.union(escaped))

    def _end_wardens(self) -> None:
        """Have the wardens kill everything, and wait until they and the server have ended.

        If the wardens were killed, do not wait for a server that still imports: it has nothing to
        clean up.
        """
        until = time.monotonic() + KILL_PATIENCE_SECONDS + 5
        kill(self._process.pid, signal.SIGCONT)  # it may be stopped
        if self._has_died:
            # Wait: the wardens clean up by themselves, and then end with the signal that ended the
            # server. If asked to end before, they would not know that signal.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(WARDEN_SECONDS)
        with suppress(OSError):
            self._parent_socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(until - time.monotonic())
            self._parent_socket.settimeout(
                max(0.1, until - time.monotonic()) if self.pid is not None else WARDEN_SECONDS
            )
            # Returns when every process has closed its side, perhaps after the outer warden's end;
            # raises when the time is over.
            with suppress(OSError):
                self._parent_socket.recv(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._parent_socket.close()


def _environment(identity: str) -> dict[str, str]:
    """The server's environment: it keeps off devices, and each rank sets its own variables."""
    environment = {
        "RES_OPTIONS": _RESOLVER_OPTIONS,
        "PYTHONUNBUFFERED": "1",
        **needed(os.environ),
        # Ray sets both for its actors.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # A context does not survive a fork. If something asks whether there is a GPU, torch then
        # asks NVML, which needs no context.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Before 2.13 an import of torch's compiler starts processes.
        "TORCH_WARM_POOL": "0",
        LAUNCHER_VARIABLE: identity,
    }
    # The guard of a local Ray ends every process with this variable.
    if RAY_FOLDER_VARIABLE in os.environ:
        environment[RAY_FOLDER_VARIABLE] = os.environ[RAY_FOLDER_VARIABLE]
    return environment
