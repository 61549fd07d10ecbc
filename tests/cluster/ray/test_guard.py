"""The guard of a local Ray, with other processes in place of Ray's: it ends only that Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cluster.ray.guard import RayGuard, _new_folder, belonging
from orchestrator.core.trial.rank_environment import RAY_FOLDER_VARIABLE
from orchestrator.node.processes import start_time

ENOUGH_SECONDS = 5.0

# An orchestrator with a guard that starts one process as Ray and one otherwise, and is killed.
_ORCHESTRATOR = """
import subprocess, sys, time
from orchestrator.cluster.ray.guard import RayGuard
guard = RayGuard()
def start():
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
with guard.starting():
    marked = start()
free = start()
print(guard.folder, marked, free, guard._process.pid, flush=True)
time.sleep(600)
"""


def _within(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + ENOUGH_SECONDS
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _is_gone(pid: int) -> bool:
    return start_time(pid) is None


@pytest.mark.parametrize("guard_is_killed_too", [False, True])
def test_the_end_of_the_orchestrator_is_the_end_of_its_ray_whenever_that_began(
    tmp_path: Path, guard_is_killed_too: bool
) -> None:
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", _ORCHESTRATOR], stdout=subprocess.PIPE, text=True
    )
    assert orchestrator.stdout is not None
    said = orchestrator.stdout.readline().split()
    orchestrator.stdout.close()
    folder, (marked, free, guard) = Path(said[0]), map(int, said[1:])
    try:
        assert _within(folder.is_dir)
        (folder / "logs").mkdir()
        time.sleep(0.2)  # for the second process
        # Like Ray's agents, they start long after the guard, and only their log shows whose.
        with (folder / "logs" / "agent.log").open("w") as log:
            agent = subprocess.Popen(["sleep", "600"], stdout=log, env={}, start_new_session=True)
        with (folder / "logs" / "agent.log").open() as log:
            reader = subprocess.Popen(["sleep", "600"], stdin=log)
        if guard_is_killed_too:
            os.kill(guard, signal.SIGKILL)
        orchestrator.kill()
        orchestrator.wait()
        assert _within(
            lambda: _is_gone(marked) and agent.poll() is not None and not folder.exists()
        )
        assert not _is_gone(free)
        assert reader.poll() is None, "who only reads a log of Ray's is somebody else"
        reader.kill()
        reader.wait()
    finally:
        orchestrator.kill()
        for pid in (marked, free):
            os.kill(pid, signal.SIGKILL) if not _is_gone(pid) else None


def test_a_guard_that_is_killed_is_started_anew_and_the_ray_of_the_living_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = RayGuard()
    first = guard._process
    assert _within(guard.folder.is_dir)
    monkeypatch.setenv(RAY_FOLDER_VARIABLE, "of another Ray")
    with guard.starting():
        ray = subprocess.Popen(["sleep", "600"])
    assert os.environ[RAY_FOLDER_VARIABLE] == "of another Ray"
    time.sleep(0.2)
    first.kill()
    first.wait()
    assert not guard.ray_is_gone()
    assert guard._process is not first and ray.poll() is None
    guard.dismiss()
    assert ray.wait(ENOUGH_SECONDS) == -signal.SIGKILL
    assert _within(lambda: not guard.folder.exists())
    dismissed = guard._process
    assert guard.ray_is_gone() is False and guard._process is dismissed, (
        "no guard comes back after it was dismissed"
    )


def test_the_next_guard_ends_a_ray_whose_orchestrator_and_guards_were_killed_together() -> None:
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", _ORCHESTRATOR],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert orchestrator.stdout is not None
    said = orchestrator.stdout.readline().split()
    orchestrator.stdout.close()
    folder, (marked, free, guard) = Path(said[0]), map(int, said[1:])
    assert _within(lambda: (folder / "owner").exists())
    time.sleep(0.2)
    orchestrator.send_signal(signal.SIGSTOP)
    below = [int(pid) for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
    for pid in (*below, guard, orchestrator.pid):
        os.kill(pid, signal.SIGKILL)
    orchestrator.wait()
    assert folder.is_dir() and not _is_gone(marked)
    successor = RayGuard()
    assert _within(lambda: _is_gone(marked) and not folder.exists())
    successor.dismiss()
    os.kill(free, signal.SIGKILL)


def test_what_is_started_after_ray_carries_no_mark_of_it() -> None:
    guard = RayGuard()
    with guard.starting():
        assert os.environ[RAY_FOLDER_VARIABLE] == str(guard.folder)
    assert RAY_FOLDER_VARIABLE not in os.environ
    assert os.getpid() not in belonging(guard.folder, but=())
    guard.dismiss()


def test_rays_files_lie_where_it_would_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/var/tmp")
    assert _new_folder().parent == Path("/var/tmp")


def test_what_starts_with_ray_knows_its_folder_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/var/tmp")
    monkeypatch.setenv("SWEEP_DB", "postgresql://u:p@h/d")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    guard, before = RayGuard(), dict(os.environ)
    with guard.starting():
        os.environ["RAY_SET_BY_RAY"] = "1"
        told = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    guard.dismiss()
    assert f"RAY_TMPDIR={guard.folder}\n" in told
    assert f"{RAY_FOLDER_VARIABLE}={guard.folder}\n" in told
    assert "SWEEP_DB" not in told
    assert "WANDB" not in told
    assert os.environ.pop("RAY_SET_BY_RAY") == "1"
    assert dict(os.environ) == before


def test_leftovers_of_a_failed_start_are_ended_and_the_folder_and_guard_stay() -> None:
    guard = RayGuard()
    with guard.starting():
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    assert _within(guard.folder.exists)
    guard.end_processes()
    assert left.wait(1) != 0
    assert guard.folder.exists()
    assert not guard.ray_is_gone()
    assert guard._process.poll() is None
    guard.dismiss()
