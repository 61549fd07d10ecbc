"""The use of a node's cores during an attempt: by it, by the rest of its sweep, and by others.

Reads Linux's counters of CPU time two to four times per attempt, and not in its first 0.2 s: a
short attempt costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.node.cgroups import cgroup_files
from orchestrator.node.processes import launcher_of, living_pid

# An attempt that ends sooner is not watched.
SOON_SECONDS = 0.2
# Counters have steps of a hundredth of a second. If timed steps took less than this, the whole
# attempt counts.
LONG_ENOUGH_SECONDS = 0.5
FEWEST_SECONDS = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")
_RAYLET = "raylet"


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Counters at one moment, in seconds of CPU time."""

    at: float  # monotonic seconds
    busy: float  # by everybody, on the attempt's cores
    own: float  # by the attempt's processes
    sweep: float  # by its sweep's other processes


class CpuWatch:
    """Watches the CPU time of one attempt: call `tick` regularly, and `load` after its end.

    `root` is the folder of its launcher, which launchers of the same sweep share. `warden` is the
    process above all that its rank server starts, `orchestrator` the identity of the process that
    asked for the attempt.
    """

    def __init__(
        self,
        *,
        root: Path,
        warden: int | None,
        orchestrator: str,
        cpus: Collection[int] = (),
    ) -> None:
        self._root, self._warden, self._orchestrator = root, warden, orchestrator
        self._pinned_to = frozenset(cpus)
        self._began: float | None = None
        self._first: CpuTimes | None = None
        self._timed_first: CpuTimes | None = None
        self._timed_last: CpuTimes | None = None
        self.pids: set[int] = set()  # the attempt's own, as seen

    def tick(self, timed_steps_run: bool) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._began < SOON_SECONDS:
            return
        if self._first is None:
            self._first = self._read()
        if timed_steps_run and self._timed_first is None:
            self._timed_first = self._read()
        if not timed_steps_run and self._timed_first is not None and self._timed_last is None:
            self._timed_last = self._read()

    def load(self) -> MachineLoad:
        """The load while steps were timed; if that was too short, during the whole attempt."""
        if self._first is None:
            return NO_LOAD
        end = self._read()
        first, last = self._timed_first, self._timed_last or end
        if first is None or last is None or last.at - first.at < LONG_ENOUGH_SECONDS:
            first, last = self._first, end
        return load_between(first, last, cores=self._cores)

    @cached_property
    def _cpus(self) -> frozenset[int]:
        return self._pinned_to or frozenset(os.sched_getaffinity(0))

    @cached_property
    def _quota(self) -> float | None:
        return None if self._pinned_to else _cgroup_quota()

    @property
    def _cores(self) -> float:
        return min(float(len(self._cpus)), self._quota or float("inf"))

    def _read(self) -> CpuTimes | None:
        try:
            processes = _processes()
            own, sweep = self._ours(processes)
            self.pids |= own
            return CpuTimes(
                at=time.monotonic(),
                busy=_busy_seconds(self._cpus) if self._quota is None else _cgroup_seconds(),
                own=sum(processes[pid].ticks for pid in own) / _TICKS,
                sweep=0.0
                if self._pinned_to
                else sum(processes[pid].ticks for pid in sweep) / _TICKS,
            )
        except (OSError, ValueError, IndexError):
            return None

    def _ours(self, processes: Mapping[int, _Process]) -> tuple[set[int], set[int]]:
        """The attempt's processes, and the other processes of its sweep."""
        children: dict[int, list[int]] = {}
        for pid, process in processes.items():
            children.setdefault(process.parent, []).append(pid)
        launcher, warden = os.getpid(), self._warden
        own = {launcher}
        if warden is not None:
            own = own.union(_subtree(warden, children)) & processes.keys()
        roots = [
            pid
            for pid in children.get(launcher, ())
            if pid != warden and self._is_of_this_root(pid)
        ]
        raylet = processes[launcher].parent if launcher in processes else 0
        if raylet in processes and processes[raylet].name == _RAYLET:
            # Ray's other workers on this node that have launchers of the same sweep.
            roots += [
                pid
                for pid in children.get(raylet, ())
                if any(map(self._is_of_this_root, children.get(pid, ())))
            ]
        if (orchestrator := living_pid(self._orchestrator)) is not None:
            roots.append(orchestrator)  # and the Ray that it started
        sweep = {pid for root in roots for pid in _subtree(root, children)} & processes.keys()
        return own, sweep - own

    def _is_of_this_root(self, pid: int) -> bool:
        """True if a launcher of this sweep started the process."""
        return (launcher_of(pid) or "").endswith(f":{self._root}")


def load_between(before: CpuTimes, after: CpuTimes | None, *, cores: float) -> MachineLoad:
    """The load between two readings; unknown if they are too close."""
    if after is None or after.at - before.at < FEWEST_SECONDS:
        return NO_LOAD
    seconds = after.at - before.at
    own, sweep = max(0.0, after.own - before.own), max(0.0, after.sweep - before.sweep)
    others = after.busy - before.busy - own - sweep
    return MachineLoad(
        cpu_cores=cores,
        own_cpu_cores=own / seconds,
        sweep_cpu_cores=sweep / seconds,
        others_cpu_cores=min(max(0.0, others / seconds), cores),
    )


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    name: str
    # Its own, and of its ended children.
    ticks: int


def _processes() -> dict[int, _Process]:
    """Every process, in one read each: psutil, or a Path for each, takes over twice as long."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                head, _, rest = file.read().rpartition(b")")
                # From the third field of proc(5) on: state, parent, ...; utime, stime, cutime and
                # cstime are its 14th to 17th.
                fields = rest.split()
                found[int(name)] = _Process(
                    int(fields[1]),
                    head.partition(b"(")[2].decode(errors="replace"),
                    sum(map(int, fields[11:15])),
                )
    return found


def _subtree(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        pending += children.get(pid, ())


def _busy_seconds(cpus: Collection[int]) -> float:
    """Return the CPU time of these cores by all processes; a hypervisor's share is included."""
    ticks = 0
    with Path("/proc/stat").open("rb") as file:
        for line in file:
            name, *fields = line.split()
            if not name.startswith(b"cpu"):
                break
            if name[3:].isdigit() and int(name[3:]) in cpus:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                ticks += user + nice + system + irq + softirq + steal
    return ticks / _TICKS


def _cgroup_quota() -> float | None:
    """Cores that this process's container may use on average.

    None: as many as there are, or the container's CPU time is not reported.
    """
    for path in cgroup_files("cpu.max", "cpu", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError):
            words = path.read_text().split()
            if len(words) == 1:
                words.append((path.parent / "cpu.cfs_period_us").read_text())
            quota = float(words[0]) / float(words[1])
            if 0 < quota < len(os.sched_getaffinity(0)):
                with suppress(OSError, ValueError):
                    _cgroup_seconds()
                    return quota
            return None
    return None


def _cgroup_seconds() -> float:
    """CPU time of this process's container. Raises FileNotFoundError if it is not reported."""
    for path in cgroup_files("cpu.stat", "cpuacct", "cpuacct.usage"):
        with suppress(OSError, ValueError, KeyError):
            text = path.read_text()
            if path.name == "cpuacct.usage":
                return int(text) / 1e9
            return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
    raise FileNotFoundError("no cgroup reports its CPU time")
