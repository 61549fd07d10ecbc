"""Runs sweeps on the lowest release of each minor version of Ray.

`python -m tests.compat.ray_versions`, or `make compat`, prints one line per version, and ends with
1 if one of them fails. pytest does not collect this file. Each version starts its local Ray lean
and plain (orchestrator/cluster/ray/local.py). Both must measure every trial and leave no process,
also when the orchestrator is killed on the way.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from db.sql import readonly
from orchestrator.node.processes import descendants
from tests.acceptance.command import Running, write_sweep

PROJECT = Path(__file__).resolve().parents[2]
LOWEST = (2, 55)
CLUSTER_SERVICES = ("monitor.py", "log_monitor.py", "dashboard.py")
WARNING = "lean start of Ray failed"
SWEEP_SECONDS = 300.0
LEFT_SECONDS = 15.0  # 5 on an idle machine

# A lean start is made to fail in the way that an unknown Ray would.
ENTRY = {
    "lean": "",
    "plain": "from orchestrator.cluster.ray import local; local._replacements = lambda: 1 / 0; ",
}
SWEEP = "import sys; from orchestrator.cli import main; sys.argv[0] = 'sweep'; main()"
TIMED = """
import psutil, tempfile, time
from pathlib import Path
from orchestrator.cluster.ray.scheduler import RayScheduler
from orchestrator.core.trial.protocol import Device
def processor_seconds():
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)
began, imported = time.monotonic(), processor_seconds()
with tempfile.TemporaryDirectory() as root:
    scheduler = RayScheduler(address=None, device=Device.CPU, root=Path(root))
    seconds = time.monotonic() - began
    print("SECONDS", seconds, processor_seconds() - imported)
    scheduler.close()
"""


class Failed(Exception):
    """What a version of Ray did that it must not."""


@dataclass(frozen=True)
class Version:
    """One release of Ray in a virtual environment that shares all other packages with ours."""

    release: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self) -> None:
        if (self.folder / "installed").exists():
            return
        _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(self.folder))
        _call(
            *(sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"),
            *("--no-deps", f"ray=={self.release}"),
        )
        paths = {"base": str(self.folder), "platbase": str(self.folder)}
        packages = Path(sysconfig.get_path("purelib", vars=paths))
        shared = sysconfig.get_path("purelib")
        # Folders of a .pth file come after the environment's own, where its Ray is.
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        (self.folder / "installed").touch()

    def check(self) -> None:
        """Raise Failed unless Python imports this Ray, and this project."""
        told = "import ray, orchestrator; print(ray.__version__, orchestrator.__path__[0])"
        found = _call(str(self.python), "-c", told).split()
        if found != [self.release, str(PROJECT / "orchestrator")]:
            raise Failed(f"Python imports {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=PROJECT / "build" / "compat")
    parser.add_argument("--releases", nargs="*", help="default: the lowest of each minor version")
    parser.add_argument("--starts", type=int, default=3, help="timed starts of each kind")
    asked = parser.parse_args()
    has_failed = False
    for release in asked.releases or list(_lowest_releases()):
        version = Version(release, asked.environments / release)
        try:
            version.install()
            version.check()
            for start in ENTRY:
                _sweep_measures_all(version, start)
                _kill_leaves_nothing(version, start)
            print(f"ray {release}: passed; {_start_seconds(version, asked.starts)}", flush=True)
        except (Failed, subprocess.SubprocessError, AssertionError) as exc:
            has_failed = True
            print(f"ray {release}: FAILED: {exc}", flush=True)
    return int(has_failed)


def _lowest_releases() -> Iterator[str]:
    """The lowest release of each minor version that pip can install here, in ascending order."""
    told = _call(sys.executable, "-m", "pip", "index", "versions", "ray")
    (line,) = re.findall(r"^Available versions: (.*)$", told, re.MULTILINE)
    releases = sorted(tuple(map(int, text.split("."))) for text in line.split(", "))
    minors = set()
    for release in releases:
        if release[:2] >= LOWEST and release[:2] not in minors:
            minors.add(release[:2])
            yield ".".join(map(str, release))


def _sweep_measures_all(version: Version, start: str) -> None:
    with _sweep(version, start) as (running, folder):
        services: set[str] = set()
        until = time.monotonic() + SWEEP_SECONDS
        while running.process.poll() is None and time.monotonic() < until:
            running.look()
            services |= _services(running.process.pid)
            time.sleep(0.1)
        code, out, err = running.end(timeout=1)
        _require(code == 0, f"{start}: exit code {code}: {out[-500:]} {err[-1500:]}")
        rows = readonly.query(_store(folder), "select distinct state from trial").rows
        states = [str(state) for (state,) in rows]
        _require(states == ["measured"], f"{start}: trials are {states}")
        is_lean = start == "lean"
        _require((WARNING in err) != is_lean, f"{start}: stderr says {err[-1500:]}")
        _require(bool(services) != is_lean, f"{start}: of Ray's services {services} ran")
        _require_end(running, folder, start)


def _kill_leaves_nothing(version: Version, start: str) -> None:
    with _sweep(version, start, sleep=True, time_scale=1000.0) as (running, folder):
        running.until(lambda: any(folder.rglob("heartbeat-*.json")))
        running.kill()
        _require_end(running, folder, f"{start}, killed")


def _start_seconds(version: Version, times: int) -> str:
    """Return the medians of each kind of start; lean and plain take turns."""
    taken: dict[str, list[tuple[float, ...]]] = {start: [] for start in ENTRY}
    for _ in range(times):
        for start, entry in ENTRY.items():
            words = _call(str(version.python), "-c", entry + TIMED).rpartition("SECONDS")[2].split()
            taken[start].append(tuple(map(float, words)))
    told = []
    for start, pairs in taken.items():
        seconds, processor = (statistics.median(column) for column in zip(*pairs, strict=True))
        told.append(f"{start} start {seconds:.1f} s, {processor:.1f} s of processor time")
    return "; ".join(told)


@contextmanager
def _sweep(version: Version, start: str, **options: object) -> Iterator[tuple[Running, Path]]:
    """Start a sweep of 8 layouts, with these options of workload synthetic."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        workload = {"name": "synthetic", "options": options}
        axes = {"micro_batch_size": [1, 2], "recompute": ["none", "full"], "zero_stage": [0, 1]}
        file = write_sweep(folder, axes=axes, workload=workload)
        process = subprocess.Popen(
            [version.python, "-c", ENTRY[start] + SWEEP, "run", file],
            cwd=folder,
            env=_environment() | {"SWEEP_DB": _store(folder), "RAY_TMPDIR": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield Running(process), folder
        finally:
            process.kill()
            process.communicate()


def _store(folder: Path) -> str:
    return f"sqlite:///{folder}/sweep.sqlite"


def _environment() -> dict[str, str]:
    # As `sweep run` sets it before it imports Ray, which ENTRY["plain"] does earlier.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SWEEP_", "RAY_"))}
    return kept | {"NO_COLOR": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _services(pid: int) -> set[str]:
    """Which of Ray's services for clusters run below a process."""
    words = [Path(word).name for below in descendants(pid) for word in _command(below)]
    return {word for word in words if word in CLUSTER_SERVICES}


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _require_end(running: Running, folder: Path, told: str) -> None:
    left = running.survivors(seconds=LEFT_SECONDS)
    _require(not left, f"{told}: left {[_command(pid) for pid in left]}")
    until = time.monotonic() + LEFT_SECONDS
    while (of_ray := list(folder.glob("sweep-*-*"))) and time.monotonic() < until:
        time.sleep(0.1)
    _require(not of_ray, f"{told}: left {of_ray}")


def _require(condition: bool, told: str) -> None:
    if not condition:
        raise Failed(told)


def _call(*command: str) -> str:
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)[:100]}: {done.stderr[-1500:]}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
