"""Rehearses GPU scripts in one process, which imports torch once for the ranks of all of them.

`python -m tests.benchmarks.gpu_rehearsals`: for each line `NAME OUT_DIR` of stdin it runs that
script, and answers with a line of JSON: what the script said, if it failed.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
import tempfile
import traceback
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.gpu import session
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.node.launcher import NodeLauncher


class SharedLauncher:
    """A session's launcher, which goes on when the session has ended."""

    def __init__(self, launcher: NodeLauncher, root: Path) -> None:
        root.mkdir()
        launcher.root = root
        self._launcher = launcher

    def run(self, order: LaunchOrder) -> NodeReport:
        return self._launcher.run(order)

    def close(self) -> None:
        """Leave the launcher open for the next session."""


def failure_of(name: str, out_dir: str) -> str | None:
    """Run a script as its command does; return what it said if it did not end well."""
    said = io.StringIO()
    sys.argv = [name, out_dir, "--rehearse"]
    with redirect_stdout(said), redirect_stderr(said):
        try:
            runpy.run_module(f"benchmarks.gpu.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as exc:
            return f"{said.getvalue()}\nexit code {exc.code}" if exc.code else None
        except Exception:  # noqa: BLE001
            return said.getvalue() + traceback.format_exc()
    return None


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gpu-rehearsals-") as folder,
        closing(NodeLauncher(Path(folder), node="local")) as launcher,
    ):
        sessions: Any = session
        sessions.NodeLauncher = lambda root, node: SharedLauncher(launcher, root)
        for line in sys.stdin:
            print(json.dumps(failure_of(*line.rstrip("\n").split(" ", 1))), flush=True)


if __name__ == "__main__":
    main()
