"""Ends calls of `sweep run` while they start: by kills, by signals and by a closed terminal.

python -m tests.faults.starts FOLDER SEED COUNT SECONDS

Prints the outcome as JSON. Nothing of a call's Ray may be left after the promised time, and its
exit code names what ended it.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.cluster.ray import session_folder
from orchestrator.node.processes import descendants, start_time
from tests.acceptance.command import SWEEP, write_sweep
from tests.faults.campaign import Outcome

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 100.0}}  # 1 to 6 s a trial
PROMISED_SECONDS = 5.0
END_SECONDS = 15.0  # promised for SIGTERM
RAY_PARENT = session_folder.usable_parent(os.environ)
# What a process was told when it started.
TOLD = ("environ", "cmdline")
# A busy machine starts a sweep within this time.
MOST_DELAY_SECONDS = 4.0
# The interpreter takes so long until it can answer a signal: before, the signal ends it.
INTERPRETER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A way to end a call, and its exit code."""

    number: signal.Signals
    code: int
    closes_terminal: bool = False

    def is_met_by(self, code: int, delay_seconds: float) -> bool:
        """Return whether a call that was ended after this delay may have this code."""
        is_early = delay_seconds < INTERPRETER_SECONDS
        return code == self.code or (is_early and code == -self.number)


ENDINGS: Mapping[str, Ending] = {
    "SIGKILL": Ending(number=signal.SIGKILL, code=-signal.SIGKILL),
    "SIGTERM": Ending(number=signal.SIGTERM, code=143),
    "SIGHUP": Ending(number=signal.SIGHUP, code=129),
    "a closed terminal": Ending(number=signal.SIGHUP, code=129, closes_terminal=True),
}


@dataclass
class Seen:
    """The processes that were ever seen below a call: id -> start time."""

    call: int
    processes: dict[int, int | None] = field(default_factory=dict)

    def commands(self) -> list[str]:
        """Look again. Return the commands of all that are below the call now."""
        found = []
        for pid in descendants(self.call):
            self.processes.setdefault(pid, start_time(pid))
            with suppress(OSError):
                told = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found.append(told.decode(errors="replace"))
        return found

    def left(self) -> tuple[list[int], list[str]]:
        """Return who is alive after the promised time, and which folders of that Ray are there."""
        until = time.monotonic() + PROMISED_SECONDS
        while True:
            alive = {
                pid
                for pid, started in self.processes.items()
                if started is not None and start_time(pid) == started
            } or of_ray(self.call)
            folders = [path.name for path in RAY_PARENT.glob(f"{_ray_name(self.call)}*")]
            if not (alive or folders) or time.monotonic() > until:
                return sorted(alive), folders
            time.sleep(0.05)


def of_ray(call: int) -> set[int]:
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


def _ray_name(call: int) -> str:
    return f"{session_folder.PREFIX}{call}-"


def _is_written_below(folder: str, file: Path) -> bool:
    try:
        return bool(file.lstat().st_mode & 0o200) and str(file.readlink()).startswith(folder)
    except OSError:
        return False  # closed meanwhile


@dataclass
class TerminalCall:
    """A call that leads the session of a terminal; the kernel sends SIGHUP to all of its group."""

    pid: int
    terminal: int

    @classmethod
    def begin(cls, file: Path, environment: Mapping[str, str]) -> TerminalCall:
        """Call `sweep run FILE` in the folder of the file, and return once it is that command.

        The fork could not even take a terminal that is closed before it has run.
        """
        # Both ends are closed by execve.
        reader, writer = os.pipe()
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(file.parent)
            os.execve(SWEEP, [str(SWEEP), "run", str(file)], dict(environment))
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        os.set_blocking(terminal, False)
        return cls(pid, terminal)

    def read(self) -> None:
        """Take what was written: a terminal that nobody reads fills up."""
        with suppress(OSError):
            os.read(self.terminal, 65536)

    def close(self) -> int | None:
        """Close the terminal, and return the exit code. None: it went on, and was killed."""
        os.close(self.terminal)
        until = time.monotonic() + END_SECONDS
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.02)
        if ended[0] == 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return None
        return os.waitstatus_to_exitcode(ended[1])


def environment_of(store_url: str) -> dict[str, str]:
    """The environment of a call on this store."""
    kept = {k: v for k, v in os.environ.items() if k not in ("SWEEP_HOME", "RAY_ADDRESS")}
    return kept | {"SWEEP_DB": store_url, "NO_COLOR": "1"}


def campaign(folder: Path, *, seed: int, count: int, seconds: float) -> Outcome:
    """End so many calls, each in a random way and after a random delay."""
    chance, out = random.Random(seed), Outcome(campaign="starts", seed=seed)
    began = time.monotonic()
    for number in range(count):
        if time.monotonic() - began > seconds:
            out.cut_short = True
            break
        name = chance.choice(list(ENDINGS))
        delay = chance.uniform(0.0, MOST_DELAY_SECONDS)
        place = folder / str(number)
        place.mkdir()
        _end_one(place, ENDINGS[name], f"{name} after {delay:.2f} s", delay, out)
    out.seconds = round(time.monotonic() - began, 1)
    return out


def _end_one(place: Path, ending: Ending, what: str, delay: float, out: Outcome) -> None:
    file = write_sweep(place, workload=SLOW)
    environment = environment_of(f"sqlite:///{place}/s.sqlite")
    until = time.monotonic() + delay
    code: int | None
    if ending.closes_terminal:
        terminal = TerminalCall.begin(file, environment)
        seen = Seen(terminal.pid)
        while time.monotonic() < until:
            seen.commands()
            terminal.read()
            time.sleep(0.02)
        code = terminal.close()
    else:
        call = subprocess.Popen(
            [SWEEP, "run", file],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        seen = Seen(call.pid)
        while time.monotonic() < until:
            seen.commands()
            time.sleep(0.02)
        call.send_signal(ending.number)
        try:
            code = call.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            call.kill()
            call.wait()
            code = None
    out.strike("start")
    if code is None or not ending.is_met_by(code, delay):
        told = "it went on" if code is None else f"exit code {code}"
        out.complaints.append(f"{what}: {told}, not {ending.code}")
    alive, folders = seen.left()
    out.looks += 1
    out.leaked_processes += len(alive)
    if alive or folders:
        out.complaints.append(f"{what}: processes {alive} and folders {folders} are left")


def main() -> int:
    """End calls, and print the outcome."""
    # Under nohup the calls would inherit that it is ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    seed, count, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        out = campaign(Path(folder), seed=seed, count=count, seconds=seconds)
    print("OUT", json.dumps(out.as_json()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
