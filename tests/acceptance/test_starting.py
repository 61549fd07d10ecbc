"""A sweep that is stopped while it starts: its exit code names the signal, no Ray is left."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.cluster.ray import session_folder
from orchestrator.node.processes import descendants, start_time
from tests.acceptance.command import SWEEP, Command, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 100.0}}  # 1 to 6 s a trial
PROMISED_SECONDS = 5.0
END_SECONDS = 15.0  # promised for SIGTERM
START_SECONDS = 120.0
RAY_PARENT = session_folder.usable_parent(os.environ)
OF_RAY = {"gcs_server", "raylet", "ray::NodeAgent"}  # the last overwrites its environment
# What a process was told when it started.
TOLD = ("environ", "cmdline")

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
    "agent": (
        lambda below: any("ray::" in command and "NodeAgent" in command for command in below),
        0.0,
    ),
    "rank server": (lambda below: any("rank_server" in command for command in below), 0.0),
}


def _begin(
    command: Command, file: Path, moment: str
) -> tuple[subprocess.Popen[str], dict[int, int | None]]:
    """A call of the command that has come so far, and all that was seen below it."""
    begun, seconds = MOMENTS[moment]
    call = command.start("run", file).process
    seen: dict[int, int | None] = {}
    until = time.monotonic() + START_SECONDS
    while not begun(_commands(call.pid, seen)):
        assert call.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    time.sleep(seconds)
    _commands(call.pid, seen)
    return call, seen


def _commands(call: int, seen: dict[int, int | None]) -> list[str]:
    found = []
    for pid in descendants(call):
        seen.setdefault(pid, start_time(pid))
        try:
            found.append(
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except OSError:
            continue
    return found


def _left(seen: dict[int, int | None], call: int) -> tuple[list[int], list[str]]:
    """Who is alive after the promised time, and which folders of that Ray are there."""
    until = time.monotonic() + PROMISED_SECONDS
    while True:
        alive = {
            pid
            for pid, started in seen.items()
            if started is not None and start_time(pid) == started
        } or _of_ray(call)
        folders = [path.name for path in RAY_PARENT.glob(f"{_ray_name(call)}*")]
        if not (alive or folders) or time.monotonic() > until:
            return sorted(alive), folders
        time.sleep(0.05)


def _of_ray(call: int) -> set[int]:
    """All processes of the call's Ray and its guards, wherever they are, by the Ray's folder.

    They name it in their environment or arguments, or have a file there open for writing.
    """
    folder = f"{RAY_PARENT}/{_ray_name(call)}"
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (
                any(folder.encode() in (process / told).read_bytes() for told in TOLD)
                or any(_is_written_below(folder, file) for file in (process / "fd").iterdir())
            ):
                found.add(int(process.name))
    return found


def _names(pids: set[int]) -> set[str]:
    names = set()
    for pid in pids:
        with suppress(OSError):
            names.add(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


def _ray_name(call: int) -> str:
    return f"{session_folder.PREFIX}{call}-"


def _is_written_below(folder: str, file: Path) -> bool:
    try:
        return bool(file.lstat().st_mode & 0o200) and str(file.readlink()).startswith(folder)
    except OSError:
        return False  # closed meanwhile


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_a_sweep_starts_leaves_nothing_of_its_ray(
    command: Command, tmp_path: Path, moment: str
) -> None:
    call, seen = _begin(command, write_sweep(tmp_path, workload=SLOW), moment)
    if moment == "rank server":
        assert _names(_of_ray(call.pid)) >= OF_RAY, "else nobody would be found below"
    call.kill()
    call.communicate()
    assert _left(seen, call.pid) == ([], [])


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("imports", signal.SIGHUP, 129),
        ("gcs", signal.SIGTERM, 143),
        ("joining", signal.SIGINT, 130),
        ("rank server", signal.SIGTERM, 143),
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
    assert _left(seen, call.pid) == ([], [])


@pytest.mark.parametrize("moment", ["joining", "rank server"])
def test_a_terminal_that_is_closed_ends_a_sweep_with_129_and_leaves_nobody(
    command: Command, tmp_path: Path, moment: str
) -> None:
    """The call leads the terminal's session; the kernel sends SIGHUP to all of its group."""
    file, begun = write_sweep(tmp_path, workload=SLOW), MOMENTS[moment]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SWEEP_HOME", "RAY_ADDRESS")
    }
    call, terminal = pty.fork()
    if call == 0:
        os.chdir(tmp_path)
        os.execve(
            SWEEP, [str(SWEEP), "run", str(file)], environment | {"SWEEP_DB": command.store_url}
        )
    seen: dict[int, int | None] = {}
    until = time.monotonic() + START_SECONDS
    os.set_blocking(terminal, False)
    while not begun[0](_commands(call, seen)):
        assert time.monotonic() < until
        _read(terminal)
        time.sleep(0.01)
    time.sleep(begun[1])
    _commands(call, seen)
    os.close(terminal)
    until = time.monotonic() + END_SECONDS
    while (ended := os.waitpid(call, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(call, signal.SIGKILL)
        os.waitpid(call, 0)
    assert ended[0] == call, "it goes on"
    assert os.waitstatus_to_exitcode(ended[1]) == 129
    assert _left(seen, call) == ([], [])


def _read(terminal: int) -> None:
    """A terminal that nobody reads fills up."""
    try:
        os.read(terminal, 65536)
    except BlockingIOError:
        return


def test_a_second_signal_ends_a_start_that_hangs(command: Command, tmp_path: Path) -> None:
    """Even if the start swallows the first signal, three of them end the call at once."""
    call, seen = _begin(command, write_sweep(tmp_path, workload=SLOW), "gcs")
    for _ in range(4):
        call.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    call.communicate(timeout=END_SECONDS)
    assert call.returncode == 143
    assert _left(seen, call.pid) == ([], [])
