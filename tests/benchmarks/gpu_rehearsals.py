"""Rehearses GPU scripts in one process, which imports torch once for the ranks of all of them.

`python -m tests.benchmarks.gpu_rehearsals`: for each line `NAME OUT_DIR` of stdin it runs that
script, and answers with a line of JSON: what the script said, if it failed.

Script `others` starts `trainer_arm.py` as it does on a GPU. The arms of the other scripts are forks
of one process that has imported what an arm imports, which is nearly all that a short arm does.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.arm_job import ArmJob, described, run_arm
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


class WarmArms:
    """Runs arms `llama` as forks of one process, which begins with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: ArmJob, *, timeout: float) -> dict[str, Any]:
        """What `run_arm` returns, but without its timeout: the test has one."""
        assert (job.arm, job.num_threads) == ("llama", 1)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            file = Path(folder) / "job.json"
            file.write_text(json.dumps(described(job, Path(folder) / "tokens.npy")))
            process = self._begun()
            assert process.stdin is not None and process.stdout is not None
            print(file, file=process.stdin, flush=True)
            code, said = json.loads(process.stdout.readline())
        if code:
            return {"error": said[-1500:]}
        found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _begun(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.warm_arms"],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process


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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-rehearsals-")))
        launcher = stack.enter_context(closing(NodeLauncher(folder, node="local")))
        arms = stack.enter_context(closing(WarmArms(folder)))
        sessions: Any = session
        sessions.NodeLauncher = lambda root, node: SharedLauncher(launcher, root)
        for line in sys.stdin:
            name, out_dir = line.rstrip("\n").split(" ", 1)
            sessions.run_arm = run_arm if name == "others" else arms.run
            print(json.dumps(failure_of(name, out_dir)), flush=True)


if __name__ == "__main__":
    main()
