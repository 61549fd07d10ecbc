"""What Linux tells and lets us do about processes: who descends from whom, who carries a tag, who dies with whom.

Standard library only, and light to import: the rank server's warden stands on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LAUNCHER_VARIABLE = "SWEEP_LAUNCHER"  # in the first environment of all that a launcher starts; forks keep it, whatever they set later

_EMPTY_LOOKS = 3  # 10 ms apart, after which a search by tag believes that nothing is left
_PASSES_BEFORE_STOPPING = (
    3  # of killing, after which whatever still starts processes is stopped first
)
_MAX_STOPPING_PASSES = 200

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


def die_with(parent: int) -> None:
    """Have this process killed when its parent dies. Call it in a fresh fork of a single-threaded `parent`.

    The signal follows the thread that forked, so a parent that forks from a pool of threads must not be trusted with this.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def wake_with(parent: int) -> bool:
    """Have this process continued (SIGCONT) when its parent dies, also where somebody has stopped it. False: it is dead already.

    For a process that clears up before it ends. The signal may come early, where the parent's thread that forked ends first.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Make this process the parent of all its orphaned descendants, so that none can leave its subtree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first. A snapshot: what forks meanwhile is in the next one."""
    found: list[int] = []
    pending = [pid]
    while pending:
        children = _children(pending.pop())
        found += children
        pending += children
    return found


def kill_subtree(*, patience_seconds: float) -> tuple[set[int], set[int]]:
    """Kill everything below this process, which has to be the subreaper and single-threaded.

    Returns the processes killed and those that could not be ended in time (stuck in the kernel). With none of the latter, nothing
    is left: a subreaper without children has no descendants.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience_seconds
    for num_passes in itertools.count():
        below = descendants(os.getpid())
        if num_passes >= _PASSES_BEFORE_STOPPING and not killed.issuperset(below):
            below = _stop_subtree()
        for pid in below:
            kill(pid)
        killed.update(below)
        if not _reap():
            return killed, set()
        if time.monotonic() > deadline:
            return killed, set(descendants(os.getpid()))
        time.sleep(0.001)
    raise AssertionError("unreachable")


def _stop_subtree() -> list[int]:
    """Stop everything below this process until nothing new appears: what is stopped cannot fork, what is killed makes room for forks."""
    stopped: set[int] = set()
    for _ in range(_MAX_STOPPING_PASSES):
        below = descendants(os.getpid())
        new = [pid for pid in below if pid not in stopped]
        for pid in new:
            kill(pid, signal.SIGSTOP)
        stopped.update(new)
        if not new:
            break
    return sorted(stopped)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may have ended meanwhile, or belong to somebody else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its id, a name nobody else will have. None: it is gone."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else int(stat[19])


def age_seconds(pid: int) -> float:
    """How long a living process has been there, to one clock tick. Raises ProcessLookupError."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(pid)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Whether a process is halted by SIGSTOP or a debugger."""
    stat = _stat(pid)
    return stat is not None and stat[0] in "Tt"


def launcher_identity(root: Path) -> str:
    """A new name for a launcher in this process: the process's identity, a number of its own, and its root folder."""
    return f"{process_identity(os.getpid())}:{next(_numbers)}:{root}"


def process_identity(pid: int) -> str:
    """ID:START:NAMESPACE, a name that no other process of this machine has or will have."""
    return f"{pid}:{start_time(pid)}:{_pid_namespace()}"


def has_ended(pid: str, start: str, namespace: str) -> bool:
    """Whether a process of this id namespace has ended. The arguments are the parts of its `process_identity`."""
    return pid.isdigit() and namespace == _pid_namespace() and str(start_time(int(pid))) != start


def global_identity() -> str:
    """A name for this process that no other has, on whatever machine: its id, its start, and the machine's boot and id namespace."""
    return f"{os.getpid()}:{start_time(os.getpid())}:{_machine()}"


def is_process(identity: str) -> int | None:
    """The id of the process of this name, where it lives in this machine and id namespace."""
    pid, _, rest = identity.partition(":")
    start, _, machine = rest.partition(":")
    is_here = pid.isdigit() and machine == _machine() and str(start_time(int(pid))) == start
    return int(pid) if is_here else None


def tagged(identity: str) -> list[int]:
    """Living processes that the launcher of this identity started, by their first environment. Others' unreadable ones are skipped."""
    entry = f"{LAUNCHER_VARIABLE}={identity}".encode()
    return [pid for pid, tag in _launcher_tags() if tag == entry]


def carries(pid: int, entry: bytes) -> bool:
    """Whether a process has NAME=VALUE in its first environment."""
    return entry in _environment(pid)


def launcher_tagged(pid: int) -> bool:
    """Whether some launcher has started this process."""
    return any(entry.startswith(f"{LAUNCHER_VARIABLE}=".encode()) for entry in _environment(pid))


def orphaned(root: Path) -> list[int]:
    """Living processes whose launcher, one with this root in this id namespace, is dead."""
    found = []
    for pid, entry in _launcher_tags():
        match entry.decode(errors="replace").partition("=")[2].split(":", 4):
            case [launcher, start, namespace, _, path] if path == str(root) and has_ended(
                launcher, start, namespace
            ):
                found.append(pid)
    return found


def kill_found(
    find: Callable[[], list[int]], *, patience_seconds: float
) -> tuple[set[int], set[int]]:
    """Kill what a search finds until it finds nothing more; the processes need not be our children.

    Returns those killed and those that do not die. One look is not enough: a process in the middle of a fork or an exec shows no
    environment, and is missed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience_seconds
    num_empty_looks = 0
    while num_empty_looks < _EMPTY_LOOKS:
        alive = {pid for pid in find() if start_time(pid) is not None}
        if alive and time.monotonic() > deadline:
            return killed, alive
        num_empty_looks = 0 if alive else num_empty_looks + 1
        for pid in alive:
            kill(pid)
        killed |= alive
        time.sleep(0.01)
    return killed, set()


def num_oom_kills() -> int:
    """How often the kernel's OOM killer has struck in this process's memory cgroup (v2 or v1). 0 where it does not say."""
    for path in cgroup_files("memory.events", "memory", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def cgroup_files(name_v2: str, controller: str, name_v1: str) -> Iterator[Path]:
    """Where this process's cgroup keeps a counter: v2, then v1. In a container the path is often the host's, and the files lie at the mount itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from (
                    Path("/sys/fs/cgroup", path.lstrip("/"), name_v2),
                    Path("/sys/fs/cgroup", name_v2),
                )
            elif controller in controllers.split(","):
                mount = Path("/sys/fs/cgroup", controller)
                yield from (mount / path.lstrip("/") / name_v1, mount / name_v1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}"
        )


def _children(pid: int) -> list[int]:
    """Children of all threads of a process: a child belongs to the thread that forked it."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_bytes().split())
    return children


def _reap() -> bool:
    """Collect ended children. False: there are none left, ended or alive."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
        except ChildProcessError:
            return False


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from its third field (the state) on: the second, the name, may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _launcher_tags() -> list[tuple[int, bytes]]:
    prefix = f"{LAUNCHER_VARIABLE}=".encode()
    pids = [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]
    return [(pid, entry) for pid in pids for entry in _environment(pid) if entry.startswith(prefix)]


def _environment(pid: int) -> list[bytes]:
    """The first environment of a process; nothing where it has ended, or is somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{_pid_namespace()}"
    except OSError:
        return "unknown"


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "unknown"
