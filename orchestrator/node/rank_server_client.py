"""The launcher's end of a rank server: start it, have ranks forked, have everything below it
killed, and know when it is gone.

Knows nothing of trials: what its ranks do and how they are judged is said in supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from orchestrator.core.trial.rank_environment import RAY_FOLDER_VARIABLE, needed
from orchestrator.node.cgroups import make_cgroup
from orchestrator.node.processes import LAUNCHER_VARIABLE, kill, kill_found, tagged
from orchestrator.node.rank_server import (
    KILL_PATIENCE_SECONDS,
    MAX_MESSAGE_BYTES,
    ORIGINAL_PATH_VARIABLE,
)

# For wardens to clear up by themselves: milliseconds, where no process hangs in the kernel
WARDEN_SECONDS = 2.0

_numbers = count(1)  # of the servers of this process

# A client of torch's store looks its server's name up in reverse; a resolver that does not answer
# costs 5 s in each process.
_RESOLVER_OPTIONS = "timeout:1 attempts:1"


class ServerLost(Exception):
    """The rank server has ended by itself, or does not answer."""


class ProcessesStuck(Exception):
    """Processes do not die: they hang in the kernel.

    The node is not to be used until they are gone.
    """

    def __init__(self, pids: Collection[int]) -> None:
        super().__init__(
            f"processes {sorted(pids)} do not die: they hang in the kernel (driver, network file system)"
        )


class RankServer:
    """A running rank server that has preloaded one program."""

    def __init__(self, *, program: str, identity: str, log_path: Path) -> None:
        self.program = program
        self.pid: int | None = None  # None until it is ready
        self.num_gangs = 0
        self._has_died = False
        self._identity = identity
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._life_line, life_line = socket.socketpair()
        # For sending: a stopped server must not stop its launcher
        self._control.settimeout(10.0)
        self._cgroup = make_cgroup(identity, next(_numbers))
        with control, life_line, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "orchestrator.node.rank_server",
                        str(control.fileno()),
                        str(life_line.fileno()),
                    ),
                    *(str(self._cgroup.path) if self._cgroup is not None else "", program),
                ],
                pass_fds=(control.fileno(), life_line.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A terminal's Ctrl-C and Ray's group kill are for the launcher; its end reaches the
                # server by EOF
                start_new_session=True,
                env=_environment(identity),
            )

    @property
    def warden(self) -> int:
        """The process id of the outer warden: all that the server starts is below it."""
        return self._process.pid

    @property
    def ended_by(self) -> int | None:
        """The signal that ended the server or its warden; None: none did, or they live."""
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
        """Ask for one process per rank; `logs` are the descriptors each writes to.

        Answers: `forked`, then `ended` per rank.
        """
        message = {
            "do": "fork",
            "program": self.program,
            "run_dir": str(run_dir),
            "environment": dict(environment),
            "ranks": list(ranks),
        }
        self.num_gangs += 1
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(logs))
        except OSError as exc:
            raise self._lost(f"takes no orders: {exc}", exc) from exc

    def clear(self) -> None:
        """Ask for the end of everything below the server. Answer: `clear`."""
        try:
            self._control.send(b'{"do": "clear"}')
        except OSError as exc:
            raise self._lost(f"takes no orders: {exc}", exc) from exc

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
        """End the server and all below it, and wait for that.

        Returns how many processes had to be found by their tag.

        Raises ProcessesStuck.
        """
        self._control.close()
        self._end_wardens()
        escaped = self._cgroup.end() if self._cgroup is not None else []
        # If both wardens and the server were killed, what descended from ranks is on its own now.
        # Where there is no cgroup, the tag is
        # all that is left of the bond.
        killed, stuck = kill_found(
            lambda: tagged(self._identity), patience_seconds=KILL_PATIENCE_SECONDS
        )
        if stuck:
            raise ProcessesStuck(stuck)
        return len(killed.union(escaped))

    def _end_wardens(self) -> None:
        """Have them kill everything, the server too, and wait until all three have ended: a search
        before that would disturb them.

        A server that still imports has nothing to clear up, and is not waited for where the wardens
        were killed.
        """
        until = time.monotonic() + KILL_PATIENCE_SECONDS + 5
        kill(self._process.pid, signal.SIGCONT)  # somebody may have stopped it
        if self._has_died:
            # They clear up by themselves, and end with the signal that ended the server: asked to
            # end before, they would not know it.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(WARDEN_SECONDS)
        with suppress(OSError):
            self._life_line.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(until - time.monotonic())
            self._life_line.settimeout(
                max(0.1, until - time.monotonic()) if self.pid is not None else WARDEN_SECONDS
            )
            with suppress(OSError):  # the time is over
                # Ends when nobody holds the other end any more: they may outlive the outer warden
                self._life_line.recv(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._life_line.close()


def _environment(identity: str) -> dict[str, str]:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {
        "RES_OPTIONS": _RESOLVER_OPTIONS,
        "PYTHONUNBUFFERED": "1",
        **needed(os.environ),
        # Of the server, which has to keep off devices; each rank sets its own. Ray sets both for
        # its actors.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Of the server, so that it imports what its launcher would; foreign programs get the one of
        # before
        "PYTHONPATH": path,
        ORIGINAL_PATH_VARIABLE: os.environ.get("PYTHONPATH", ""),
        LAUNCHER_VARIABLE: identity,
        # The guard of a local Ray ends what carries its folder.
        **{name: os.environ[name] for name in (RAY_FOLDER_VARIABLE,) if name in os.environ},
    }
