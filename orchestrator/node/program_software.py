"""Finds the Python that runs a user's program, and lists its packages without importing torch.

It is found by the command, else among the processes of the program. The interpreter itself is
asked, once; again only if one of the folders that it imports from has changed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.trial.fingerprint import Software, Stack
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.python_command import is_python
from orchestrator.node.gpu_monitor import device_name, driver_version
from orchestrator.node.probe import cpu_name
from orchestrator.node.processes import descendants

logger = logging.getLogger(__name__)

# The workload that runs a user's program.
COMMAND = "workloads.command"

# The packages of an environment on a cold network file system take tens of seconds to list.
ANSWER_SECONDS = 60.0
MAX_PACKAGES = 5000
# Words of a command that are searched for its interpreter: `numactl -N 0 torchrun train.py`.
_MAX_WORDS = 12
# These run the program with another Python than the one on PATH.
_OTHER_ENVIRONMENTS = frozenset({
    "conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "hatch", "docker", "podman",
    "singularity", "apptainer", "enroot", "ssh",
})  # fmt: skip
# As installers write the path of an interpreter that is too long for a first line.
_LONG_FIRST_LINE = re.compile(r"""^'''exec' "?([^"\s]+)"? """)
_SHEBANG_BYTES = 1024
# Between two searches of the processes of a program.
_POLL_SECONDS = 0.5

# For any Python 3.8 or newer. What is in the working folder is not installed.
# It is killed when the thread that waits for the answer ends (prctl's PR_SET_PDEATHSIG, SIGKILL).
_QUESTION = r"""
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except Exception:
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit()
import importlib.util, json, platform, re
from importlib import metadata
if sys.path and sys.path[0] == "":
    del sys.path[0]
packages = {}
for found in metadata.distributions():
    name = re.sub(r"[-_.]+", "-", str(found.metadata["Name"] or "")).lower()
    packages.setdefault(name, str(found.version))
packages.pop("", None)
torch = {}
try:
    spec = importlib.util.find_spec("torch")
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        text = file.read()
    for name in ("__version__", "cuda"):
        line = re.search("^" + name + r"\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        torch[name] = line and line[1]
except Exception:
    pass
folders = [[path, os.stat(path).st_mtime_ns] for path in sys.path if os.path.isdir(path)]
print(json.dumps({"python": platform.python_version(), "torch": torch, "packages": packages,
                  "folders": folders}))
"""


@dataclass(frozen=True, kw_only=True)
class _ReportedSoftware:
    software: Software
    # With the time of their last change.
    folders: Sequence[tuple[str, int]]


class ProgramSoftware:
    """The packages of the Pythons of one node; each is asked once."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], _ReportedSoftware] = {}
        # By command: the Python that its processes showed, and its environment.
        self._seen: dict[tuple[str, ...], tuple[str, Mapping[str, str]]] = {}

    def begin(self, order: LaunchOrder, *, cancelled: Container[str] = ()) -> AttemptSoftware:
        """Ask the Python of the order's command, if it tells which; nothing for our workloads.

        The question ends early once `cancelled` has the attempt's tag.
        """
        options = _command_of(order)
        if options is None:
            return AttemptSoftware(self, None, devices=(), found=Software())
        environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **order.environment,
            **{name: text for name, text in options.env.items() if "{" not in text},
        }
        python = interpreter_of(options.argv, search_path=environment.get("PATH"), cwd=options.cwd)
        if python is None and options.argv in self._seen:
            python, environment = self._seen[options.argv]
        found = None
        if python:
            found = self.of(python, environment, tag=order.request.tag, cancelled=cancelled)
        return AttemptSoftware(self, options.argv, devices=order.devices, found=found)

    def note(self, argv: tuple[str, ...], python: str, environment: Mapping[str, str]) -> Software:
        """Remember the Python of a command that does not name it, and ask it."""
        self._seen[argv] = python, environment
        return self.of(python, environment)

    def of(
        self,
        python: str,
        environment: Mapping[str, str],
        *,
        tag: str = "",
        cancelled: Container[str] = (),
    ) -> Software:
        """Return what a Python has in an environment; all unknown if it does not answer."""
        key = (python, environment.get("PYTHONPATH", ""))
        known = self._answers.get(key)
        if known is not None and all(_changed_at(path) == at for path, at in known.folders):
            return known.software
        answer = _ask(python, environment, tag=tag, cancelled=cancelled)
        if answer is None:
            return known.software if known is not None else Software()
        self._answers[key] = answer
        return answer.software


class AttemptSoftware:
    """The software and device of one attempt's program."""

    def __init__(
        self,
        of_node: ProgramSoftware,
        argv: tuple[str, ...] | None,
        *,
        devices: Sequence[str],
        found: Software | None,
    ) -> None:
        """`argv`: None if it is no user's program. `found`: None if the command does not tell."""
        self._of_node, self._argv, self._devices = of_node, argv, devices
        self._found = found
        self._processes = _PythonFinder() if found is None else None

    def find_python(self, ranks: Sequence[int | None], *, timed_steps_run: bool) -> None:
        """Search for a Python below the ranks' processes, if the command does not tell which."""
        if self._processes is not None:
            self._processes.find_python(ranks, timed_steps_run=timed_steps_run)

    def software(self) -> Software:
        """Return what is known at the end of the attempt."""
        if self._argv is None:
            return Software()
        found, seen = self._found, self._processes
        if seen is not None and seen.python is not None:
            found = self._of_node.note(self._argv, seen.python, seen.environment)
        found = found or Software()
        on_gpu = bool(self._devices)
        stack = found.stack.model_copy(
            update={
                "driver": driver_version() if on_gpu else None,
                "device_name": device_name(self._devices[0]) if on_gpu else cpu_name(),
            }
        )
        return replace(found, stack=stack)


def framework_of(order: LaunchOrder) -> Framework | None:
    """Return the framework in whose settings a program gets its layout; None: in none."""
    options = _command_of(order)
    return options.framework if options is not None else None


def _command_of(order: LaunchOrder) -> CommandOptions | None:
    if order.program != COMMAND:
        return None
    try:
        return CommandOptions.model_validate(dict(order.request.options))
    except ValueError:
        return None  # the ranks say why


class _PythonFinder:
    """Looks for the Python of a program that a shell starts, until its steps are timed.

    The largest Python process counts: launchers and helpers are small.
    """

    def __init__(self) -> None:
        self._next_at = 0.0
        self._is_over = False
        self.python: str | None = None
        self.environment: Mapping[str, str] = {}
        self._largest_bytes = 0

    def find_python(self, ranks: Iterable[int | None], *, timed_steps_run: bool) -> None:
        """Search below these processes, if it is time to: that costs less than a millisecond."""
        now = time.monotonic()
        if self._is_over or now < self._next_at:
            return
        self._next_at = now + _POLL_SECONDS
        self._is_over = timed_steps_run
        for rank in filter(None, ranks):
            for pid in descendants(rank):
                with suppress(OSError, ValueError, IndexError):
                    self._consider(pid, rank)

    def _consider(self, pid: int, rank: int) -> None:
        folder = Path("/proc") / str(pid)
        words = (folder / "cmdline").read_bytes().split(b"\0")
        # A copy of the rank that has not become the program yet is our Python.
        if words == Path(f"/proc/{rank}/cmdline").read_bytes().split(b"\0"):
            return
        if not is_python(str((folder / "exe").readlink())):
            return
        if (folder / "ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink():
            # In a container: its paths are not ours.
            return
        resident_pages = int((folder / "statm").read_text().split()[1])
        if resident_pages <= self._largest_bytes:
            return
        entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        environment = dict(entry.partition("=")[::2] for entry in entries if "=" in entry)
        # The name that it was called by is a link in its environment's folder, unlike its file.
        found = interpreter_of(
            [words[0].decode()],
            search_path=environment.get("PATH"),
            cwd=str((folder / "cwd").readlink()),
        )
        if found is not None:
            self._largest_bytes = resident_pages
            self.python, self.environment = found, environment


def interpreter_of(argv: Sequence[str], *, search_path: str | None, cwd: str | None) -> str | None:
    """Return the path of the Python that a command runs, by its name or a script's first line.

    The path is not resolved: a link in an environment's folder is that environment. None: the
    command runs no Python, or in another environment (conda run, a container), or in a shell.
    """
    for word in argv[:_MAX_WORDS]:
        path = _executable(word, search_path, cwd)
        if path is None:
            continue
        if Path(path).name in _OTHER_ENVIRONMENTS:
            return None
        if is_python(path):
            return path
        if (found := _first_line_python(path, search_path)) is not None:
            return found
    return None


def _executable(word: str, search_path: str | None, cwd: str | None) -> str | None:
    if not word or "\0" in word or "{" in word or word.startswith("-"):
        return None
    if "/" in word:
        path = Path(cwd or "/") / word
        return str(path) if path.is_file() and os.access(path, os.X_OK) else None
    return shutil.which(word, path=search_path)


def _first_line_python(script: str, search_path: str | None) -> str | None:
    """Return the interpreter in the first line of a script, if it is a Python."""
    try:
        with open(script, "rb") as file:  # noqa: PTH123
            lines = file.read(_SHEBANG_BYTES).decode(errors="replace").split("\n", 2)
    except OSError:
        return None
    if not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if len(lines) > 1 and (long := _LONG_FIRST_LINE.match(lines[1])) is not None:
        words = [long[1]]
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or not is_python(words[0]):
        return None
    return words[0] if "/" in words[0] else shutil.which(words[0], path=search_path)


def _ask(
    interpreter: str, environment: Mapping[str, str], *, tag: str, cancelled: Container[str]
) -> _ReportedSoftware | None:
    """Ask an interpreter; None, and a line in the log, if it does not answer."""
    deadline, errors = time.monotonic() + ANSWER_SECONDS, b""
    try:
        with subprocess.Popen(
            [interpreter, "-c", _QUESTION, str(os.getpid())],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        ) as process:
            while True:
                try:
                    text, errors = process.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    is_late = time.monotonic() > deadline
                    if not is_late and tag not in cancelled:
                        continue
                    # It may be a script that started something else.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    if is_late:
                        logger.warning(
                            "%s did not list its packages in %.0f s: the fingerprint lacks them",
                            interpreter,
                            ANSWER_SECONDS,
                        )
                    return None
        return _answer(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        said = errors.decode(errors="replace")[-300:] or str(exc)
        logger.warning(
            "%s did not list its packages, so the fingerprint lacks them: %s", interpreter, said
        )
        return None


def _answer(told: Mapping[str, Any]) -> _ReportedSoftware:
    packages = {str(name)[:100]: str(version)[:100] for name, version in told["packages"].items()}
    nccl = next((v for name, v in packages.items() if name.startswith("nvidia-nccl")), None)
    stack = Stack(
        python=told["python"],
        torch=told["torch"].get("__version__") or packages.get("torch"),
        cuda=told["torch"].get("cuda"),
        nccl=nccl,
    )
    return _ReportedSoftware(
        software=Software(stack=stack, packages=tuple(sorted(packages.items())[:MAX_PACKAGES])),
        folders=[(str(path), int(at)) for path, at in told["folders"]],
    )


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return None
