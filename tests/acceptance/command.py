"""The `sweep` command as a process, and the processes that it leaves, found by recorded ids."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from db.sql import readonly
from db.store import Store
from orchestrator import cli
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.node.processes import descendants, start_time
from tests.kept_loggers import kept_loggers

SWEEP = Path(sys.executable).parent / "sweep"
START_SECONDS = 180.0


@dataclass
class Command:
    """Runs `sweep` in a folder with a store of its own."""

    folder: Path
    store_url: str
    environment: dict[str, str] = field(default_factory=dict)
    program: Path = SWEEP

    def run(
        self, *arguments: str | Path, timeout: float = 220.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *map(str, arguments)],
            cwd=self.folder,
            env=self.given(),
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )

    def ok(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        done = self.run(*arguments, **options)
        assert done.returncode == 0, (
            f"sweep {' '.join(map(str, arguments))} ended with {done.returncode}\n"
            f"{done.stdout}\n{done.stderr}"
        )
        return done

    def json(self, *arguments: str | Path) -> Any:
        return json.loads(self.ok(*arguments, "--json").stdout)

    def sql(self, statement: str) -> list[list[Any]]:
        """What `sweep sql` answers, without a process that has first to import everything."""
        found = readonly.query(self.store_url, statement)
        return [list(row) for row in found.rows]

    def start(self, *arguments: str | Path) -> Running:
        process = subprocess.Popen(
            [self.program, *map(str, arguments)],
            cwd=self.folder,
            env=self.given(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return Running(process)

    @property
    def here(self) -> CommandHere:
        """The same command in this process, on the same store."""
        return CommandHere(self.folder, self.store_url, self.environment)

    def given(self) -> dict[str, str]:
        """The environment of the command."""
        kept = {k: v for k, v in os.environ.items() if k not in ("SWEEP_HOME", "RAY_ADDRESS")}
        return kept | {"SWEEP_DB": self.store_url, "NO_COLOR": "1"} | self.environment


class CommandHere(Command):
    """Runs `sweep` in this process, which costs a tenth, where nothing of a process matters."""

    def run(
        self, *arguments: str | Path, timeout: float = 0.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        # As `cli.streams` makes them.
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "replace") for _ in range(2))
        told = [str(argument) for argument in arguments]
        with (
            patch.dict(os.environ, self.given(), clear=True),
            chdir(self.folder),
            redirect_stdout(out),
            redirect_stderr(err),
            kept_loggers(),
        ):
            code = cli.main(told)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read())
        return subprocess.CompletedProcess(told, code, *said)


@dataclass
class Running:
    """A `sweep` under way."""

    process: subprocess.Popen[str]
    # Every process ever seen below it: id -> start time.
    seen: dict[int, int] = field(default_factory=dict)

    def until(self, condition: Callable[[], bool], *, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.look()
            assert self.process.poll() is None, (
                f"ended early with {self.process.returncode}: {self.process.communicate()}"
            )
            assert time.monotonic() < deadline, f"nothing came of it in {seconds} s"
            time.sleep(0.1)

    def look(self) -> None:
        """Record what runs below it now."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            started = start_time(pid)
            if started is not None:
                self.seen.setdefault(pid, started)

    def kill(self) -> None:
        self.look()
        self.process.kill()
        self.process.communicate()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Signal it alone."""
        self.look()
        self.process.send_signal(number)

    def end(self, *, timeout: float = 180.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def survivors(self, *, seconds: float) -> list[int]:
        """Which of the processes seen below it are alive after so many seconds at most."""
        deadline = time.monotonic() + seconds
        while True:
            alive = [pid for pid, started in self.seen.items() if start_time(pid) == started]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)


def measured(store: Store, sweep: str) -> dict[int, int]:
    """Trials that are measured, with the number of their attempts."""
    rows = store.sweeps()
    if not rows:
        return {}
    return {
        t.id: t.num_attempts
        for t in store.trials(store.sweep_named(sweep).id)
        if t.state is TrialState.MEASURED
    }


def write_sweep(folder: Path, name: str = "t", *, lines: Sequence[str] = (), **values: Any) -> Path:
    """A synthetic sweep of 2-GPU gangs on cores: 16 layouts, or 24 with one more micro-batch."""
    content = {
        "name": name,
        "model": "llama-tiny",
        "gpus": 2,
        "device": "cpu",
        "sequence_length": 64,
        "global_batch_size": 64,
        "precision": "bf16",
        "axes": {
            "micro_batch_size": [1, 2, 4, 8],
            "recompute": ["none", "full"],
            "zero_stage": [0, 1],
        },
        "measurement": {"warmup_steps": 2, "min_steps": 5, "max_steps": 6, "precision": 0.5},
        "workload": {"name": "synthetic", "options": {}},
        "search": {"confirm": {"repeats": 0}},  # of which cli/test_simulating has a test
    } | values
    path = folder / f"{name}.yaml"
    path.write_text("\n".join([json.dumps(content), *lines]))  # JSON is YAML
    return path
