"""A hang shows where the processes of each rank are, whatever they run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from layout_sweep.child_processes import children
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.processes import state_of
from orchestrator.node.stacks import MAX_PROCESSES, stacks_of
from tests.node.launching import order

Started = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Starts a Python program, and returns once it has said that it hangs."""
    running = []

    def start(source: str, **environment: str) -> subprocess.Popen[bytes]:
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, file],
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"]} | environment,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"hangs\n"
        return process

    yield start
    for process in running:
        os.killpg(process.pid, 9)
        process.wait()


def test_every_process_of_a_rank_shows_its_stack_or_what_it_waits_for(started: Started) -> None:
    program = started(
        """
        import subprocess, sys, threading

        def wait_for_data(child):
            print("hangs", flush=True)
            child.wait()

        def train_step():
            wait_for_data(subprocess.Popen(["sh", "-c", "exec sleep 600"]))

        train_step()
        """
    )
    (sleeping,) = children(program.pid)
    while Path(f"/proc/{sleeping}/comm").read_text() != "sleep\n":
        time.sleep(0.01)
    while {state_of(pid) for pid in (program.pid, sleeping)} != {"S (sleeping)"}:
        time.sleep(0.01)
    found = stacks_of([program.pid], seconds=5.0, began_unix_seconds=time.time())[program.pid]
    assert "/train.py:6)" in found.text and "train_step (" in found.text
    assert (
        f"Process {sleeping}: sleep 600\n    no stack of Python; state S (sleeping)" in found.text
    )
    assert found.has_answered and found.stale_lock is None
    assert found.place is not None and found.place.startswith("wait_for_data (train.py:6), which")


def test_of_many_processes_only_some_are_shown(started: Started) -> None:
    program = started(
        f"""
        import subprocess, time
        some = [subprocess.Popen(["sleep", "600"]) for _ in range({MAX_PROCESSES + 3})]
        time.sleep(0.2)  # until the last one is what it is to be
        print("hangs", flush=True)
        some[0].wait()
        """
    )
    found = stacks_of([program.pid], seconds=5.0, began_unix_seconds=time.time())[program.pid]
    assert found.text.count("sleep 600") == MAX_PROCESSES - 1
    assert "and 4 more processes" in found.text


def test_without_time_for_stacks_the_processes_are_still_named(started: Started) -> None:
    program = started("import time; print('hangs', flush=True); time.sleep(600)")
    began = time.monotonic()
    found = stacks_of([program.pid], seconds=0.0, began_unix_seconds=time.time())[program.pid]
    assert time.monotonic() - began < 1.0
    assert "train.py\n    no stack of Python; state " in found.text
    assert not found.has_answered and found.place is None


# As torch.utils.file_baton waits, in a file of that name.
BATON = """
    import os, time

    def wait(lock):
        print("hangs", flush=True)
        while os.path.exists(lock):
            time.sleep(0.1)
    """
WAITING = """
    import os, sys
    from file_baton import wait
    wait(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "fused", "lock"))
    """


@pytest.mark.parametrize("is_older", [True, False])
def test_the_lock_of_a_build_that_died_is_named(
    started: Started, tmp_path: Path, is_older: bool
) -> None:
    (tmp_path / "file_baton.py").write_text(textwrap.dedent(BATON))
    lock = tmp_path / "extensions" / "fused" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    program = started(WAITING, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    began = time.time() + (3600.0 if is_older else -3600.0)
    found = stacks_of([program.pid], seconds=5.0, began_unix_seconds=began)[program.pid]
    assert found.stale_lock == (lock if is_older else None)


def test_a_lock_that_nobody_waits_for_is_not_blamed(started: Started, tmp_path: Path) -> None:
    lock = tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "fused" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    source = "import time; print('hangs', flush=True); time.sleep(600)"
    program, began = started(source, HOME=str(tmp_path)), time.time() + 3600.0
    found = stacks_of([program.pid], seconds=5.0, began_unix_seconds=began)[program.pid]
    assert found.stale_lock is None
    unread = stacks_of([program.pid], seconds=0.0, began_unix_seconds=began)[program.pid]
    assert unread.stale_lock == lock, "it may be the reason"


def test_a_program_that_hangs_is_named_with_its_place_and_the_lock(tmp_path: Path) -> None:
    """Through a launcher: the rank only waits for the program."""
    lock = tmp_path / "extensions" / "fused" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    (tmp_path / "file_baton.py").write_text(textwrap.dedent(BATON))
    (tmp_path / "train.py").write_text(textwrap.dedent(WAITING))
    (tmp_path / "other.py").write_text("import time\ndef step(): time.sleep(600)\nstep()\n")
    launcher = NodeLauncher(tmp_path / "runs", node="node-a")
    try:
        for trial_id, (script, said) in enumerate(
            {"train.py": f"rm {lock} unless", "other.py": "in step (other.py:2): first"}.items(), 1
        ):
            options = {
                "argv": [sys.executable, str(tmp_path / script)],
                "env": {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
            }
            report = launcher.run(
                order(
                    "workloads.command",
                    trial_id=trial_id,
                    options=options,
                    world_size=1,
                    limits={"first_step": 1.0},
                )
            )
            assert report.failure is not None and report.failure.kind is FailureKind.HUNG
            assert said in report.failure.message
            assert f"/{script}:" in report.failure.log_tail
    finally:
        launcher.close()
