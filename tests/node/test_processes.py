"""A subtree is killed to the last process, whatever it starts; a cgroup takes one kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.node.cgroups import (
    Cgroup,
    make_cgroup,
    orphaned_cgroups,
    own_cgroup,
    why_no_cgroup,
)
from orchestrator.node.processes import (
    core_wait_seconds,
    is_stopped,
    launcher_identity,
    start_time,
)

HERE = Path(__file__).parent
needs_cgroup = pytest.mark.skipif(why_no_cgroup() is not None, reason=str(why_no_cgroup()))

# Four daemons that start themselves anew every few milliseconds, each in a session of its own, and
# four processes that fork all the time.
_STORM = """
import os, sys, time
from orchestrator.node.processes import adopt_orphans, descendants, kill_subtree

def hop():
    os.setsid()
    while True:
        if os.fork() > 0:
            os._exit(0)
        time.sleep(0.003)

def burst():
    while True:
        pid = os.fork()
        if pid == 0:
            time.sleep(0.05)
            os._exit(0)
        time.sleep(0.005)

adopt_orphans()
for work in [hop, burst] * 4:
    if os.fork() == 0:
        work()
time.sleep(0.3)
assert len(descendants(os.getpid())) >= 8
killed, stuck = kill_subtree(patience_seconds=20.0)
print(len(killed), len(stuck), len(descendants(os.getpid())))
"""


def test_a_subtree_that_starts_processes_faster_than_one_looks_is_killed_to_the_last() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _STORM], capture_output=True, text=True, check=True, timeout=60
    )
    killed, stuck, left = map(int, told.stdout.split())
    assert killed >= 8
    assert (stuck, left) == (0, 0)


# A parent that is killed, and a child that was stopped before, and ends when it is woken.
_WOKEN = """
import os, signal, sys, time
from orchestrator.node.processes import wake_with
parent = os.getpid()
if os.fork() == 0:
    wake_with(parent)
    print(os.getpid(), flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    os._exit(0)
time.sleep(600)
"""


def test_a_stopped_process_wakes_when_its_parent_dies() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _WOKEN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGSTOP)
    _await(lambda: is_stopped(child))
    parent.kill()
    parent.communicate()
    _await(lambda: start_time(child) is None)


@needs_cgroup
def test_processes_that_share_a_core_wait_for_it_and_a_sleeper_does_not() -> None:
    core = min(os.sched_getaffinity(0))
    loop = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2)]
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        until = time.monotonic() + 30
        while sum(core_wait_seconds(one.pid) for one in busy) < 0.5:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert core_wait_seconds(sleeper.pid) < 0.5
        # With those below it: these three are children of this process.
        assert core_wait_seconds(os.getpid()) > 0.5
    finally:
        for one in (*busy, sleeper):
            one.kill()
            one.wait()
    assert core_wait_seconds(sleeper.pid) == 0.0


def test_a_cgroup_ends_all_that_was_started_in_it_and_is_gone() -> None:
    group = make_cgroup(launcher_identity(HERE), 1)
    assert group is not None
    program = (
        "import os, subprocess, sys; from pathlib import Path; from orchestrator.node.cgroups "
        "import Cgroup;"
        " assert Cgroup(Path(sys.argv[1])).join();"
        " print(subprocess.Popen(['sleep', '600'], start_new_session=True, env={}, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(group.path)], capture_output=True, text=True, check=True
    )
    daemon = int(told.stdout)
    assert group.pids() == [daemon]
    assert group.path not in [other.path for other in orphaned_cgroups()], "its launcher lives"
    assert group.end() == [daemon]
    _await(lambda: start_time(daemon) is None)
    assert not group.path.exists()
    assert group.end() == []


@needs_cgroup
def test_the_cgroup_of_a_dead_launcher_is_found() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    _, start, namespace, number, root = launcher_identity(HERE).split(":", 4)
    group = make_cgroup(f"{int(ended.stdout)}:{start}:{namespace}:{number}:{root}", 1)
    elsewhere = make_cgroup(f"{int(ended.stdout)}:{start}:another:{number}:{root}", 2)
    assert group is not None and elsewhere is not None
    try:
        found = [other.path for other in orphaned_cgroups()]
        assert group.path in found
        assert elsewhere.path not in found, (
            "whether a process of another id namespace lives cannot be told here"
        )
    finally:
        group.end()
        elsewhere.end()


def test_a_cgroup_that_is_not_there_is_nobody_s() -> None:
    group = Cgroup(HERE / "nowhere")
    assert not group.join()
    assert group.pids() == []
    assert group.end() == []


def test_where_no_cgroup_can_be_made_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.node.cgroups._parent", lambda: None)
    assert "is not ours to make groups in" in str(why_no_cgroup()) or own_cgroup() is None
    assert make_cgroup(launcher_identity(HERE), 1) is None and orphaned_cgroups() == []
    monkeypatch.setattr("orchestrator.node.cgroups.own_cgroup", lambda: None)
    assert "no cgroup of version 2" in str(why_no_cgroup())


def _await(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
