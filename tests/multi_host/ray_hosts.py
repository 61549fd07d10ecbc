"""A Ray cluster with token authentication over the hosts of a network, and `sweep` on its head."""

from __future__ import annotations

import json
import secrets
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.multi_host.hosts import Host, Network

BIN = Path(sys.executable).parent
RAY, SWEEP = BIN / "ray", BIN / "sweep"
PORT, DASHBOARD_PORT = 6379, 8265
START_SECONDS = 240.0
# No option changes how long Ray waits for the node that it starts: 30 s.
GIVEN_UP = "The current node timed out during startup"


def runs_one(file: Path) -> bool:
    """Return whether a trial of a SQLite store runs; repeated `sweep status` would take cores."""
    if not file.exists():
        return False
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute(
                "SELECT count(*) FROM trial WHERE state = 'running'"
            ).fetchone() != (0,)
        except sqlite3.OperationalError:  # its tables are still being made
            return False


@dataclass
class RayHosts:
    """The first host is the head."""

    network: Network

    @property
    def head(self) -> Host:
        return self.network.hosts[0]

    @property
    def workers(self) -> list[Host]:
        return self.network.hosts[1:]

    def start(self, *, num_cpus: int, dashboard: bool = False) -> None:
        """Start Ray on every host, under its own address, with one token in private files."""
        token = secrets.token_hex(32)
        for host in self.network.hosts:
            file = host.folder / "token"
            file.touch(mode=0o600)
            file.write_text(token)
            host.environment |= {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(host.base / "token"),
                "RAY_TMPDIR": str(host.base),
                "RAY_USAGE_STATS_ENABLED": "0",
                # As in a shell with the virtual environment activated.
                "PATH": f"{BIN}:{host.environment['PATH']}",
            }
        share = [f"--num-cpus={num_cpus}", "--object-store-memory=80000000"]
        head = self.head
        head.environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{DASHBOARD_PORT}"
        shown = (
            ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
            if dashboard
            else ["--include-dashboard=false"]
        )
        place = [
            f"--port={PORT}",
            f"--node-ip-address={head.address}",
            f"--temp-dir={head.base}/ray",
        ]
        head.ok(RAY, "start", "--head", *place, *shown, *share, timeout=START_SECONDS)
        joining: list[tuple[Host, list[str | Path], subprocess.Popen[str]]] = []
        for host in self.workers:
            own = [f"--address={head.address}:{PORT}", f"--node-ip-address={host.address}"]
            command: list[str | Path] = [RAY, "start", *own, *share]
            joining.append((host, command, host.start(*command)))
        for host, command, process in joining:
            out, err = process.communicate(timeout=START_SECONDS)
            if process.returncode and GIVEN_UP in err:
                # As an administrator would on a busy machine: once more.
                host.ok(RAY, "stop", "--force", timeout=START_SECONDS)
                host.ok(*command, timeout=START_SECONDS)
            else:
                assert process.returncode == 0, (out, err)

    def job(self, *arguments: str, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """`ray job submit` with the files of a folder, and an environment for its entrypoint."""
        told = json.dumps({"env_vars": dict(env)})
        return self.head.start(
            RAY,
            "job",
            "submit",
            "--working-dir",
            ".",
            "--runtime-env-json",
            told,
            *arguments,
            cwd=cwd,
        )

    def sweep(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> str:
        """Run a command on the head, and return its stdout."""
        process = self.head.start(SWEEP, *arguments, env=env)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, (
            f"sweep {' '.join(arguments)} ended with {process.returncode}\n{out}\n{err}"
        )
        return out

    def answer(self, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
        return json.loads(self.sweep(*arguments, "--json", env=env))

    def begin(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return self.head.start(SWEEP, *arguments, env=env)
