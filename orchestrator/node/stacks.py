"""Shows where the processes of hanging ranks are: the rank's own, and all that it has started.

Python processes show their stacks (py-spy), others what they wait for in the kernel. Reads only:
ends nothing, and knows no limits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from layout_sweep.child_processes import children
from orchestrator.core.trial.protocol import STACKS_BEGIN
from orchestrator.node.processes import environment_of, state_of

# Reading a stack takes 50 ms of a core; more at once would each take longer.
_READERS = 8
# A data loader starts tens of processes for each rank. Only the number of the others is shown.
MAX_PROCESSES = 32
_LEAST_SECONDS = 0.1
_COMMAND_CHARACTERS = 200
# py-spy writes the newest call first.
_THREAD = re.compile(r"^Thread (\d+)\b.*$", re.MULTILINE)
_FRAME = re.compile(r"^ {4}(.+?) \(([^()]+):(\d+)\)$")
_INSTALLED = re.compile(r"^<|/(?:site-packages|dist-packages|lib/python[\d.]+)/")
# A file of torch.utils.cpp_extension, which waits until the file `lock` in the folder of a build is
# gone.
_WAITS_FOR_LOCK = "file_baton.py"


@dataclass(frozen=True, kw_only=True)
class RankStacks:
    """The stacks of the processes of one rank."""

    text: str
    # The rank's own process showed its stack.
    has_answered: bool
    place: str | None  # where its program is, in words
    # The program waits for a build that this file blocks.
    stale_lock: Path | None


@dataclass(eq=False, kw_only=True)
class _ProcessStack:
    pid: int
    depth: int  # 0: the rank itself
    command: str
    # Its state, and where it waits in the kernel.
    doing: str
    is_python: bool
    stack: str | None = None


@dataclass(eq=False, kw_only=True)
class _Tree:
    processes: list[_ProcessStack] = field(default_factory=list)
    num_more: int = 0


def stacks_of(
    rank_pids: Sequence[int], *, seconds: float, began_unix_seconds: float
) -> dict[int, RankStacks]:
    """Return the stacks of each rank's processes, read within this many seconds.

    The lock of a build is stale if it is older than the attempt, which began at
    `began_unix_seconds`.
    """
    deadline = time.monotonic() + seconds
    trees = {pid: _tree(pid) for pid in rank_pids}
    every = [process for tree in trees.values() for process in tree.processes]
    # First the programs that ranks have started, then ranks, then what is further below.
    by_interest = sorted(every, key=lambda one: -1 if one.depth == 1 else one.depth)
    _read_stacks([process for process in by_interest if process.is_python], deadline)
    return {pid: _told(tree, began_unix_seconds) for pid, tree in trees.items()}


def _tree(rank_pid: int) -> _Tree:
    """The processes from a rank downwards, parents first."""
    tree, pending = _Tree(), [(rank_pid, 0)]
    for pid, depth in pending:
        pending += [(child, depth + 1) for child in children(pid)]
        if len(tree.processes) == MAX_PROCESSES:
            tree.num_more += 1
            continue
        tree.processes.append(
            _ProcessStack(
                pid=pid,
                depth=depth,
                command=_command(pid),
                doing=_doing(pid),
                is_python=_is_python(pid),
            )
        )
    return tree


def _read_stacks(processes: Iterable[_ProcessStack], deadline: float) -> None:
    search = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    py_spy = shutil.which("py-spy", path=search)
    if py_spy is None:
        return

    def read(process: _ProcessStack) -> None:
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            return
        # A process that is stopped, or hangs in the kernel, would block a debugger.
        command = [py_spy, "dump", "--nonblocking", "--full-filenames"]
        try:
            done = subprocess.run(
                [*command, "--pid", str(process.pid)],
                capture_output=True,
                timeout=left,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError):
            return
        if done.returncode == 0:
            process.stack = done.stdout.decode(errors="replace").rstrip()

    with ThreadPoolExecutor(max_workers=_READERS) as readers:
        list(readers.map(read, processes))


def _told(tree: _Tree, began_unix_seconds: float) -> RankStacks:
    rank, *below = tree.processes
    lines = ["", STACKS_BEGIN]
    for process in tree.processes:
        if process.stack is not None:
            lines.append(process.stack)
        else:
            lines.append(f"Process {process.pid}: {process.command}")
            lines.append(f"    no stack of Python; {process.doing}")
    if tree.num_more:
        lines.append(f"and {tree.num_more} more processes")
    program = next((process for process in below if process.stack is not None), rank)
    return RankStacks(
        text="\n".join([*lines, ""]),
        has_answered=rank.stack is not None,
        place=_place(program),
        stale_lock=_stale_lock(
            [process for process in below if process.is_python] or [rank], began_unix_seconds
        ),
    )


def _place(process: _ProcessStack) -> str | None:
    """The innermost call of the main thread, and the innermost one outside installed packages."""
    stack = process.stack or ""
    # The main thread has the id of its process. It has a name only if the program knows threads.
    threads = list(_THREAD.finditer(stack))
    main = next((one for one in threads if one[1] == str(process.pid)), None)
    if main is None:
        return None
    frames = []
    for line in stack[main.end() :].strip("\n").splitlines():
        match = _FRAME.match(line)
        if match is None:
            break
        frames.append((match[1], match[2], match[3]))
    if not frames:
        return None
    own = next((frame for frame in frames if not _INSTALLED.search(frame[1])), frames[0])
    called = "" if own is frames[0] else f", which called {_named(*frames[0])}"
    return f"{_named(*own)}{called}"


def _named(function: str, file: str, line: str) -> str:
    return f"{function} ({Path(file).name}:{line})"


def _stale_lock(processes: Sequence[_ProcessStack], began_unix_seconds: float) -> Path | None:
    """Return the lock that a process waits for; if none shows its stack, any stale lock."""
    stacks = [process.stack for process in processes if process.stack is not None]
    if stacks and not any(_WAITS_FOR_LOCK in stack for stack in stacks):
        return None
    for folder in dict.fromkeys(_build_folder(process.pid) for process in processes):
        # NAME/lock in a folder that the user chose, else PYTHON_DEVICE/NAME/lock.
        for lock in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
            try:
                if lock.stat().st_mtime < began_unix_seconds:
                    return lock
            except OSError:
                continue  # removed meanwhile
    return None


def _build_folder(pid: int) -> Path:
    """The folder in which torch builds extensions, by the environment of a process."""
    environment = environment_of(pid)
    folder = environment.get("TORCH_EXTENSIONS_DIR")
    if folder:
        return Path(folder)
    cache = environment.get("XDG_CACHE_HOME")
    home = environment.get("HOME") or str(Path.home())
    return Path(cache or f"{home}/.cache") / "torch_extensions"


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        words = b""
    return words.decode(errors="replace").strip()[:_COMMAND_CHARACTERS] or "(ended)"


def _doing(pid: int) -> str:
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        where = ""
    state = f"state {state_of(pid) or 'unknown'}"
    return f"{state}, in {where} of the kernel" if where not in ("", "0") else state


def _is_python(pid: int) -> bool:
    """True if the process runs Python or has loaded its library."""
    try:
        if "python" in Path(f"/proc/{pid}/exe").readlink().name:
            return True
        return "libpython" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
