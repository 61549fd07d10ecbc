"""Programs of the tests that take too long, or leave processes behind: of each nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import chaos
from orchestrator.node.processes import start_time
from tests.programs import finished

LONG_ENOUGH_SECONDS = 8.0  # three interpreters start, when busy
STAYS = "time.sleep(600)"
GOES = "sys.exit(3)"


def leaving_a_child(folder: Path, then: str) -> list[str]:
    """A command with an orphaned grandchild that writes its id and stays; then it does `then`."""
    child = (
        "import os, pathlib, time; "
        f"pathlib.Path({str(folder / 'pid')!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    orphan = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-IS', '-c', "
        f"{child!r}], start_new_session=True)"
    )
    waited = f"while not pathlib.Path({str(folder / 'pid')!r}).exists(): time.sleep(0.01)"
    return [
        sys.executable,
        "-c",
        "import pathlib, subprocess, sys, time\nsubprocess.run([sys.executable, '-IS', '-c', "
        f"{orphan!r}])\n{waited}\n{then}",
    ]


def await_child(folder: Path) -> None:
    until = time.monotonic() + 60
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


def who_stayed(folder: Path) -> int:
    return int((folder / "pid").read_text())


def test_of_a_program_that_takes_too_long_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        finished(leaving_a_child(tmp_path, STAYS), seconds=LONG_ENOUGH_SECONDS)
    assert start_time(who_stayed(tmp_path)) is None


def test_of_a_program_that_ends_nothing_is_left_either(tmp_path: Path) -> None:
    done = finished(leaving_a_child(tmp_path, GOES), seconds=60)
    assert done.returncode == 3
    assert start_time(who_stayed(tmp_path)) is None


def test_of_a_program_whose_caller_is_killed_nothing_is_left(tmp_path: Path) -> None:
    call = (
        "from tests.programs import finished; "
        f"finished({leaving_a_child(tmp_path, STAYS)!r}, seconds=600)"
    )
    caller = subprocess.Popen([sys.executable, "-c", call])
    await_child(tmp_path)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    until = time.monotonic() + 60
    while start_time(who_stayed(tmp_path)) is not None:
        assert time.monotonic() < until, "it outlived who asked for it"
        time.sleep(0.01)


def test_of_a_program_that_is_asked_to_end_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bounded", "600", *leaving_a_child(tmp_path, STAYS)]
    bounded = subprocess.Popen(command)
    await_child(tmp_path)
    bounded.terminate()
    assert bounded.wait(60) == 128 + signal.SIGTERM
    assert start_time(who_stayed(tmp_path)) is None


def test_a_part_of_the_chaos_that_takes_too_long_is_a_complaint_and_leaves_nobody(
    tmp_path: Path,
) -> None:
    out = chaos.run_program(
        leaving_a_child(tmp_path, STAYS), name="ray", seed=1, patience_seconds=LONG_ENOUGH_SECONDS
    )
    assert out.complaints == ["it had not ended after 8 s"]
    assert start_time(who_stayed(tmp_path)) is None
