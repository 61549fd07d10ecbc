"""The launcher's end of a rank server: start it, have ranks forked, have everything below it killed, and know when it is gone.

Knows nothing of trials: what its ranks do and how they are judged is said in launcher_gang.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.processes import LAUNCHER_VARIABLE, kill_found, tagged
from orchestrator.rank_server import KILL_PATIENCE_SECONDS, MAX_MESSAGE_BYTES, ORIGINAL_PATH_VARIABLE

# What ranks have no business to know, and what Ray sets for its actors rather than for programs that train.
_WITHHELD_VARIABLES = frozenset(
    {
        "SWEEP_DB",
        "SWEEP_DB_READER",
        "PGPASSWORD",
        "PGPASSFILE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
    }
)

# A client of torch's store looks its server's name up in reverse; a resolver that does not answer costs 5 s in each process.
_RESOLVER_OPTIONS = "timeout:1 attempts:1"


class ServerLost(Exception):
    """The rank server has ended by itself, or does not answer."""


class ProcessesStuck(Exception):
    """Processes do not die: they hang in the kernel. The node is not to be used until they are gone."""

    def __init__(self, pids: Collection[int]) -> None:
        super().__init__(f"processes {sorted(pids)} do not die: they hang in the kernel (driver, network file system)")


class RankServer:
    """A running rank server that has preloaded one program."""

    def __init__(self, *, program: str, identity: str, log_path: Path) -> None:
        self.program = program
        self.pid: int | None = None  # None until it is ready
        self.num_gangs = 0
        self._identity = identity
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._life_line, life_line = socket.socketpair()
        self._control.settimeout(10.0)  # for sending: a stopped server must not stop its launcher
        with control, life_line, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.rank_server", str(control.fileno()), str(life_line.fileno()), program],
                pass_fds=(control.fileno(), life_line.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C and Ray's group kill are for the launcher; its end reaches the server by EOF
                env=_environment(identity),
            )

    def fileno(self) -> int:
        return self._control.fileno()

    def fork(self, *, run_dir: Path, environment: Mapping[str, str], ranks: Sequence[Mapping[str, Any]], logs: Sequence[int]) -> None:
        """Ask for one process per rank; `logs` are the descriptors each writes to. Answers: `forked`, then `ended` per rank."""
        message = {"do": "fork", "program": self.program, "run_dir": str(run_dir), "environment": dict(environment), "ranks": list(ranks)}
        self.num_gangs += 1
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(logs))
        except OSError as exc:
            raise ServerLost(f"the rank server takes no orders: {exc}") from exc

    def clear(self) -> None:
        """Ask for the end of everything below the server. Answer: `clear`."""
        try:
            self._control.send(b'{"do": "clear"}')
        except OSError as exc:
            raise ServerLost(f"the rank server takes no orders: {exc}") from exc

    def receive(self) -> dict[str, Any]:
        """Read one answer. Raises ServerLost at its end."""
        try:
            text = self._control.recv(MAX_MESSAGE_BYTES)
        except OSError as exc:
            raise ServerLost(f"the rank server does not answer: {exc}") from exc
        if not text:
            raise ServerLost("the rank server died")
        message: dict[str, Any] = json.loads(text)
        if message["event"] == "ready":
            self.pid = message["pid"]
        return message

    def stop(self) -> int:
        """End the server and all below it, and wait for that. Returns how many processes had to be found by their tag.

        Raises ProcessesStuck.
        """
        self._control.close()
        self._life_line.close()  # the warden kills everything, the server too, and ends last
        try:
            self._process.wait(KILL_PATIENCE_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # If the warden itself was killed, what descended from ranks is on its own now; the tag is all that is left of the bond.
        killed, stuck = kill_found(lambda: tagged(self._identity), patience_seconds=KILL_PATIENCE_SECONDS)
        if stuck:
            raise ProcessesStuck(stuck)
        return len(killed)


def _environment(identity: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD_VARIABLES}
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {
        "RES_OPTIONS": _RESOLVER_OPTIONS,
        "PYTHONUNBUFFERED": "1",
        **environment,
        "OMP_NUM_THREADS": "1",  # of the server; each rank sets its own
        "CUDA_VISIBLE_DEVICES": "",  # of the server, which has to keep off them; each rank sets its own
        "PYTHONPATH": path,  # of the server, so that it imports what its launcher would; foreign programs get the one of before
        ORIGINAL_PATH_VARIABLE: os.environ.get("PYTHONPATH", ""),
        LAUNCHER_VARIABLE: identity,
    }
