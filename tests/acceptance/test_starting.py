"""A sweep that is stopped while it starts: its exit code names the signal, no Ray is left.

Here each moment of the start gets one signal; `make chaos` ends calls at any moment, in every way.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acceptance.command import Command, write_sweep
from tests.faults.starts import (
    END_SECONDS,
    SLOW,
    Seen,
    TerminalCall,
    campaign,
    environment_of,
    of_ray,
)

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

START_SECONDS = 120.0
OF_RAY = {"gcs_server", "raylet", "ray::NodeAgent"}  # the last overwrites its environment

# Moments of the start, told by what there is already; each with seconds to wait beyond it.
MOMENTS: dict[str, tuple[Callable[[list[str]], bool], float]] = {
    "imports": (lambda below: True, 0.8),
    "guard": (lambda below: any("cluster.ray.guard" in command for command in below), 0.0),
    "gcs": (
        lambda below: any("gcs_server" in command.partition(" --")[0] for command in below),
        0.0,
    ),
    "raylet": (
        lambda below: any("/raylet/raylet" in command.partition(" --")[0] for command in below),
        0.0,
    ),
    "joining": (
        lambda below: any("/raylet/raylet" in command.partition(" --")[0] for command in below),
        0.4,
    ),
    "rank server": (lambda below: any("rank_server" in command for command in below), 0.0),
}


def _begin(command: Command, file: Path, moment: str) -> tuple[subprocess.Popen[str], Seen]:
    """A call of the command that has come so far, and all that was seen below it."""
    begun, seconds = MOMENTS[moment]
    call = command.start("run", file).process
    seen = Seen(call.pid)
    until = time.monotonic() + START_SECONDS
    while not begun(seen.commands()):
        assert call.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    time.sleep(seconds)
    seen.commands()
    return call, seen


def _names(pids: set[int]) -> set[str]:
    names = set()
    for pid in pids:
        with suppress(OSError):
            # Fifteen letters: an agent that begins is `ray::NodeAgent.`, of `.__init__`.
            names.add(Path(f"/proc/{pid}/comm").read_text().strip().rstrip("."))
    return names


@pytest.mark.parametrize(
    "moment",
    [
        "imports",
        *(pytest.param(later, marks=pytest.mark.long) for later in ("guard", "gcs", "raylet")),
        "rank server",
    ],
)
def test_a_kill_while_a_sweep_starts_leaves_nothing_of_its_ray(
    command: Command, tmp_path: Path, moment: str
) -> None:
    call, seen = _begin(command, write_sweep(tmp_path, workload=SLOW), moment)
    if moment == "rank server":
        assert _names(of_ray(call.pid)) >= OF_RAY, "else nobody would be found below"
    call.kill()
    call.communicate()
    assert seen.left() == ([], [])


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("imports", signal.SIGHUP, 129),
        ("gcs", signal.SIGTERM, 143),
        pytest.param("joining", signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_a_signal_while_a_sweep_starts_ends_it_with_its_code(
    command: Command, tmp_path: Path, moment: str, number: signal.Signals, code: int
) -> None:
    call, seen = _begin(command, write_sweep(tmp_path, workload=SLOW), moment)
    call.send_signal(number)
    _, said = call.communicate(timeout=END_SECONDS)
    assert call.returncode == code, said
    assert "Traceback" not in said
    assert seen.left() == ([], [])


@pytest.mark.long
def test_a_terminal_that_is_closed_ends_a_sweep_with_129_and_leaves_nobody(
    command: Command, tmp_path: Path
) -> None:
    """The call leads the terminal's session; the kernel sends SIGHUP to all of its group."""
    file, begun = write_sweep(tmp_path, workload=SLOW), MOMENTS["rank server"]
    call = TerminalCall.begin(file, environment_of(command.store_url))
    seen = Seen(call.pid)
    until = time.monotonic() + START_SECONDS
    while not begun[0](seen.commands()):
        assert time.monotonic() < until
        call.read()
        time.sleep(0.02)
    time.sleep(begun[1])
    seen.commands()
    assert call.close() == 129
    assert seen.left() == ([], [])


@pytest.mark.long
def test_a_second_signal_ends_a_start_that_hangs(command: Command, tmp_path: Path) -> None:
    """Even if the start swallows the first signal, three of them end the call at once."""
    call, seen = _begin(command, write_sweep(tmp_path, workload=SLOW), "gcs")
    for _ in range(4):
        call.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    call.communicate(timeout=END_SECONDS)
    assert call.returncode == 143
    assert seen.left() == ([], [])


def test_a_call_that_is_ended_at_random_while_it_starts_leaves_nobody(tmp_path: Path) -> None:
    """`make chaos` ends a hundred."""
    seed = random.SystemRandom().randrange(1 << 30)
    out = campaign(tmp_path, seed=seed, count=1, seconds=120.0)
    assert out.is_clean, (seed, out.complaints)
    assert out.victims == {"start": 1} and out.looks == 1
