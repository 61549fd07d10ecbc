"""Whose the cores were: real processes, on a machine that others may use as well."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.node.cpu_watch import CpuTimes, CpuWatch, load_between
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.processes import global_identity, living_pid
from tests.node.launching import order

SPIN_SECONDS = 0.9  # CPU time of each process

# Three processes that compute: the program, a child, and a daemon in a session of its own that
# loses its parent.
PROGRAM = f"""
import json, os, time
def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        spin({SPIN_SECONDS})
        os._exit(0)
    spin({SPIN_SECONDS})
    os._exit(0)
with open(os.environ["SWEEP_METRICS_FILE"], "w", buffering=1) as file:
    for _ in range(6):
        spin({SPIN_SECONDS} / 6)
        print(json.dumps(dict(step_seconds=0.1)), file=file)
os.wait()
"""


@contextmanager
def endless_loops(number: int) -> Iterator[None]:
    """Processes of somebody else: not below this one."""
    program = "import os, time\nos.setsid()\nend = time.time() + 60\nwhile time.time() < end: pass"
    started = []
    for _ in range(number):
        # A shell that ends at once leaves its child to init; one that kept the pipe open would be
        # waited for.
        command = f"{sys.executable} -c '{program}' > /dev/null 2>&1 & echo $!"
        done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=True)
        started.append(int(done.stdout))
    try:
        yield
    finally:
        for pid in started:
            os.kill(pid, 9)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path, node="node-a")
    yield launcher
    launcher.close()


def computing(launcher: NodeLauncher, trial_id: int) -> tuple[MachineLoad, float]:
    argv = [sys.executable, "-c", PROGRAM.replace("{", "{{").replace("}", "}}")]
    report = launcher.run(
        order("workloads.command", trial_id=trial_id, world_size=1, options={"argv": argv})
    )
    assert report.failure is None, report.failure
    return report.load, report.seconds


def test_an_attempt_s_own_use_of_all_cores_is_not_somebody_else_s(launcher: NodeLauncher) -> None:
    load, seconds = computing(launcher, 1)
    assert load.cpu_cores == len(os.sched_getaffinity(0))
    assert (
        load.own_cpu_cores is not None
        and load.others_cpu_cores is not None
        and load.sweep_cpu_cores is not None
    )
    # Timed steps begin after one of six, and children may be further than the program: but most of
    # it was in the steps that count.
    assert load.own_cpu_cores * seconds > 1.2 * SPIN_SECONDS
    assert load.own_cpu_cores + load.others_cpu_cores + load.sweep_cpu_cores < 1.15 * load.cpu_cores


def test_endless_loops_beside_an_attempt_are_somebody_else_s(launcher: NodeLauncher) -> None:
    cores = len(os.sched_getaffinity(0))
    with endless_loops(cores):
        load, _ = computing(launcher, 1)
    # A fair share for as many loops as there are cores, while three other processes compute and
    # whatever else runs.
    assert load.others_cpu_cores is not None and load.others_cpu_cores > 0.2 * cores, load


def test_a_short_attempt_is_not_looked_at(
    launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.node.cpu_watch.SOON_SECONDS", 60.0)
    monkeypatch.setattr("orchestrator.node.cpu_watch._processes", lambda: pytest.fail("it was"))
    assert launcher.run(order()).load == NO_LOAD


def test_another_launcher_s_ranks_are_the_sweep_s_where_they_share_its_folder_only(
    tmp_path: Path,
) -> None:
    mine, other = NodeLauncher(tmp_path / "a", node="n"), NodeLauncher(tmp_path / "a", node="n")
    stranger = NodeLauncher(tmp_path / "b", node="n")
    try:
        for launcher in (mine, other, stranger):
            assert launcher.run(order(trial_id=id(launcher))).failure is None  # starts its server
        watch = CpuWatch(root=mine.root, warden=mine._warden(), orchestrator="")
        from orchestrator.node.cpu_watch import _processes

        own, sweep = watch._ours(_processes())
        wardens = [launcher._warden() for launcher in (mine, other, stranger)]
        assert {pid for pid in wardens if pid in own} == {wardens[0]}
        assert {pid for pid in wardens if pid in sweep} == {wardens[1]}
        # Asked by this very process, all below it are the sweep's.
        asked = CpuWatch(root=mine.root, warden=mine._warden(), orchestrator=global_identity())
        assert wardens[2] in asked._ours(_processes())[1]
    finally:
        for launcher in (mine, other, stranger):
            launcher.close()


def test_what_is_used_between_two_readings_adds_up() -> None:
    before = CpuTimes(at=10.0, busy=100.0, own=20.0, sweep=5.0)
    load = load_between(before, CpuTimes(at=12.0, busy=103.8, own=20.3, sweep=5.1), cores=2.0)
    assert (load.cpu_cores, load.own_cpu_cores, load.sweep_cpu_cores) == (
        2.0,
        pytest.approx(0.15),
        pytest.approx(0.05),
    )
    assert load.others_cpu_cores == pytest.approx(1.7)
    backwards = load_between(before, CpuTimes(at=12.0, busy=100.1, own=20.3, sweep=1.0), cores=2.0)
    assert (backwards.others_cpu_cores, backwards.sweep_cpu_cores) == (0.0, 0.0)
    assert (
        load_between(before, CpuTimes(at=10.1, busy=100.1, own=20.0, sweep=5.0), cores=2.0)
        == NO_LOAD
    )
    assert load_between(before, None, cores=2.0) == NO_LOAD


def test_timed_steps_count_where_they_are_long_enough_and_else_the_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0
    monkeypatch.setattr("orchestrator.node.cpu_watch.time.monotonic", lambda: now)

    def watched(ticks: list[tuple[float, bool]]) -> MachineLoad:
        nonlocal now
        now = 0.0
        watch = CpuWatch(root=tmp_path, warden=None, orchestrator="", cpus=[0])
        # Others use the whole core before the timed steps and after them, and nothing meanwhile.
        monkeypatch.setattr(
            watch,
            "_read",
            lambda: CpuTimes(at=now, busy=min(now, 1.0) + max(0.0, now - 3.0), own=0.0, sweep=0.0),
        )
        for at, timed in ticks:
            now = at
            watch.tick(timed)
        now = 5.0
        return watch.load()

    assert (
        watched(
            [(0.0, False), (0.5, False), (1.0, True), (2.0, True), (3.0, False)]
        ).others_cpu_cores
        == 0.0
    )
    assert watched(
        [(0.0, False), (0.5, False), (1.0, True), (1.1, False)]
    ).others_cpu_cores == pytest.approx(2.5 / 4.5)
    assert watched([(0.0, False), (0.1, True)]) == NO_LOAD


def test_a_process_is_known_again_by_its_name_alone() -> None:
    assert living_pid(global_identity()) == os.getpid()
    assert living_pid("") is None
    child = subprocess.Popen(["sleep", "60"])
    name = global_identity().replace(str(os.getpid()), str(child.pid), 1)
    time.sleep(0.02)
    assert living_pid(name) is None, "another start"
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    ("limit", "usage", "quota"),
    [
        ("50000 100000", "usage_usec 7250000\nuser_usec 1", 0.5),
        ("max 100000", "usage_usec 7250000", None),
        ("50000 100000", "user_usec 1", None),  # not reported: the machine's cores count
        ("100000000 100000", "usage_usec 7250000", None),  # more than there are
    ],
)
def test_the_limit_of_a_container_counts_where_it_has_one_and_tells_its_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: str, quota: float | None
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    (tmp_path / "cpu.stat").write_text(usage)
    monkeypatch.setattr(
        "orchestrator.node.cpu_watch.cgroup_files",
        lambda name_v2, *_: iter([tmp_path / "absent", tmp_path / name_v2]),
    )
    watch = CpuWatch(root=tmp_path, warden=None, orchestrator="")
    assert watch._quota == quota
    assert watch._cores == (quota or len(os.sched_getaffinity(0)))
    read = watch._read()
    assert read is not None
    assert (read.busy == 7.25) is (quota is not None)
