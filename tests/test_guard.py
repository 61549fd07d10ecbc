"""A test run that is killed leaves no PostgreSQL, program or folder: tried on a pytest inside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.node.processes import start_time
from tests import guard

PROJECT = Path(__file__).parents[1]
# For PostgreSQL to start, or everything to end, on a busy machine.
PATIENCE_SECONDS = 90.0
# A test that has a database and a program in a session of its own, says so, and does not end.
ENDLESS = """
import os, pathlib, subprocess, sys, time
import pytest

@pytest.mark.parametrize("number", range(8))  # xdist gives a worker at least two
def test_endless(postgresql_server, number):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    program = subprocess.Popen(command, start_new_session=True)
    file = pathlib.Path(postgresql_server.partition("host=")[2]) / "postmaster.pid"
    pid = int(file.read_text().split()[0])
    folder = pathlib.Path(os.environ["HOME"]).parent
    said = pathlib.Path(os.environ["SAYS"], f"{os.getpid()}")
    said.with_suffix(".part").write_text(f"{program.pid} {pid} {os.getpid()} {folder}")
    said.with_suffix(".part").rename(said)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGKILL, 0),
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.long),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGINT", "SIGKILL, two workers"],
)
def test_of_a_test_run_that_is_killed_nothing_is_left(
    tmp_path: Path, number: int, workers: int
) -> None:
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    (tmp_path / "says").mkdir()
    options = ["-n", str(workers)] if workers else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "--rootdir",
        str(tmp_path),
        *options,
        "test_endless.py",
    ]
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"SAYS": str(tmp_path / "says")},
        stdout=subprocess.DEVNULL,
    )
    said = _until_said(tmp_path / "says", max(workers, 1))
    pids = [int(pid) for words in said for pid in words[:3]]
    marked = guard.of_run(f"{os.environ[guard.VARIABLE]}/{run.pid}:{start_time(run.pid)}")
    assert {*pids, run.pid} <= {*marked, run.pid}, "what is to be found is found"

    run.send_signal(number)
    run.wait(PATIENCE_SECONDS)
    until = time.monotonic() + PATIENCE_SECONDS
    while left := [pid for pid in {*pids, *marked} if start_time(pid) is not None]:
        assert time.monotonic() < until, left
        time.sleep(0.02)
    while left_folders := [words[3] for words in said if Path(words[3]).exists()]:
        assert time.monotonic() < until, left_folders
        time.sleep(0.02)


def _until_said(folder: Path, many: int) -> Sequence[Sequence[str]]:
    until = time.monotonic() + PATIENCE_SECONDS
    while len(found := [path for path in folder.iterdir() if path.suffix != ".part"]) < many:
        assert time.monotonic() < until, "the tests inside have not begun"
        time.sleep(0.02)
    return [path.read_text().split() for path in found]
