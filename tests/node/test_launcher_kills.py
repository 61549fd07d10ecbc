"""Nothing outlives an attempt, whatever is killed: rank, rank server, warden or launcher."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.node.cgroups import why_no_cgroup
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.processes import descendants, start_time
from tests.faults.evidence import EVIDENCE, alive_within
from tests.faults.stubborn import KINDS
from tests.node.launching import faulty, order, survivors, tree_of, with_start_times

NUM_RANDOM_KILLS = 30  # hundreds in `make chaos`
GANG_PROCESSES = 5  # two wardens, server, two ranks


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_kills_at_random_moments_leave_nobody(tmp_path: Path) -> None:
    """Each attempt leaves children of every kind; then a random process of its tree is killed."""
    chance = random.Random(20)
    launcher = NodeLauncher(tmp_path, node="node-a")
    launcher.run(order(trial_id=1))  # the server is up
    seen: dict[int, int | None] = {}
    num_kills = num_servers_killed = 0
    started = time.monotonic()

    def strike(tag: str, delay_seconds: float) -> None:
        nonlocal num_kills, num_servers_killed
        deadline = time.monotonic() + 5
        while len(below := tree_of(tmp_path)) < GANG_PROCESSES and time.monotonic() < deadline:
            time.sleep(0.001)  # until the server has forked
        time.sleep(delay_seconds)
        seen.update(with_start_times(tree_of(tmp_path)))
        # Two wardens, the server, then ranks and their children.
        below = tree_of(tmp_path)
        if below:
            # The server or a warden in one of ten: a new one costs a quarter of a second.
            choice = (
                chance.choice(below[:3])
                if chance.random() < 1 / 10 or len(below) <= 3
                else chance.choice(below[3:])
            )
            num_servers_killed += choice in below[:3]
            num_kills += 1
            _kill(choice)
        time.sleep(0.01)
        launcher.kill(tag)  # the victim may not have mattered

    options = {
        "faults": [
            *faulty("leak_children", at="init")["faults"],
            *faulty("hang", at="step_3")["faults"],
        ]
    }
    for number in range(NUM_RANDOM_KILLS):
        attempt = order(trial_id=2 + number, options=options)
        striker = threading.Thread(
            target=strike, args=[attempt.request.tag, chance.uniform(0.0, 0.03)]
        )
        striker.start()
        report = launcher.run(attempt)
        striker.join()
        assert report.failure is not None
    launcher.close()
    print(
        f"{num_kills} kills, {num_servers_killed} of servers or wardens, {len(seen)} "
        f"processes, {time.monotonic() - started:.1f} s"
    )
    assert num_kills >= 0.9 * NUM_RANDOM_KILLS
    assert survivors(seen.items(), root=tmp_path) == []


def _host(root: Path) -> subprocess.Popen[str]:
    """A launcher in a process of its own, in the middle of an attempt."""
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.node.launcher_host", str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    host.stdout.readline()  # one attempt is over
    host.stdout.close()
    return host


@pytest.mark.parametrize("also_its_server", [False, True])
def test_nothing_outlives_a_launcher_that_was_killed(tmp_path: Path, also_its_server: bool) -> None:
    chance = random.Random(also_its_server)
    for number in range(3):
        root = tmp_path / str(number)
        host = _host(root)
        time.sleep(chance.uniform(0.0, 0.3))
        # So that it cannot react to the other's death before its own.
        host.send_signal(signal.SIGSTOP)
        below = descendants(host.pid)
        seen = [(pid, start_time(pid)) for pid in below]
        if also_its_server:
            _kill(below[2])
        host.kill()
        host.wait()
        assert len(below) >= 3
        assert survivors(seen, root=root) == []


def test_the_next_launcher_ends_what_was_left_when_launcher_wardens_and_server_were_killed_together(
    tmp_path: Path,
) -> None:
    host = _host(tmp_path)
    while len(descendants(host.pid)) < 10:
        time.sleep(0.001)
    host.send_signal(signal.SIGSTOP)
    below = descendants(host.pid)
    seen = [(pid, start_time(pid)) for pid in below]
    for pid in below[:3]:
        _kill(pid)
    host.kill()
    host.wait()
    NodeLauncher(tmp_path, node="host").close()
    assert survivors(seen, root=tmp_path, patience_seconds=1.0) == []


def test_a_launcher_leaves_the_processes_of_living_launchers_alone(tmp_path: Path) -> None:
    launcher = NodeLauncher(tmp_path, node="node-a")
    hanging = order(options=faulty("hang"))
    thread = threading.Thread(target=launcher.run, args=[hanging])
    thread.start()
    while len(tree_of(tmp_path)) < GANG_PROCESSES:
        time.sleep(0.01)
    before = tree_of(tmp_path)
    NodeLauncher(tmp_path, node="node-b").close()
    assert tree_of(tmp_path) == before
    launcher.close()
    thread.join()
    assert tree_of(tmp_path) == []


VICTIMS = ("launcher", "outer warden", "inner warden", "server", "rank", "program")
AT_ONCE = [
    *((one,) for one in VICTIMS),
    ("outer warden", "inner warden"),
    ("outer warden", "server"),
    ("inner warden", "server"),
    *(
        pytest.param((*several, "launcher"), marks=pytest.mark.long)
        for several in (
            ("outer warden", "inner warden"),
            ("outer warden", "server"),
            ("inner warden", "server"),
            ("server", "rank", "program"),
        )
    ),
]


@pytest.mark.parametrize("victims", AT_ONCE, ids=" + ".join)
def test_nothing_of_a_program_outlives_the_death_of_any_process_above_it(
    tmp_path: Path, victims: tuple[str, ...]
) -> None:
    """The program stops itself, and leaves children in sessions, daemons, workers, deaf ones."""
    evidence = _program(tmp_path, "stop", victims)
    assert alive_within(5.0, [evidence]) == []


def test_nothing_of_a_program_is_left_where_everybody_above_it_was_stopped_before(
    tmp_path: Path,
) -> None:
    evidence = _program(tmp_path, "stop", ("launcher", "outer warden"), stopped=True)
    assert alive_within(5.0, [evidence]) == []


@pytest.mark.skipif(why_no_cgroup() is not None, reason=str(why_no_cgroup()))
def test_with_a_cgroup_nothing_of_a_program_is_left_when_all_three_above_it_are_killed_at_once(
    tmp_path: Path,
) -> None:
    evidence = _program(tmp_path, "go on", ("outer warden", "inner warden", "server"))
    assert alive_within(5.0, [evidence]) == []


def _program(folder: Path, then: str, victims: Sequence[str], *, stopped: bool = False) -> Path:
    """Run a program that leaves all kinds of processes, and kill some. Returns its evidence."""
    host = subprocess.Popen([sys.executable, "-m", "tests.node.launcher_host", str(folder), then])
    evidence = folder / "trial-0" / "attempt-1" / "node-0" / EVIDENCE
    try:
        until = time.monotonic() + 30.0
        while not evidence.exists() or len(
            {line.split()[0] for line in evidence.read_text().splitlines()}
        ) <= len(KINDS):
            assert time.monotonic() < until, "the program does not run"
            time.sleep(0.02)
        outer, inner, server, rank, program = descendants(host.pid)[:5]
        who = dict(zip(VICTIMS, (host.pid, outer, inner, server, rank, program), strict=True))
        host.send_signal(signal.SIGSTOP)  # else it reacts too early
        for pid in (outer, inner, server, rank) if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        for victim in victims:
            _kill(who[victim])
        host.send_signal(signal.SIGCONT)
        if "launcher" in victims:
            assert alive_within(5.0, [evidence]) == []  # before the test itself clears up
        else:
            # The end of its attempt is visible to it.
            time.sleep(0.1)
    finally:
        alive_within(5.0, [evidence])
        host.kill()
        host.wait()
    return evidence
