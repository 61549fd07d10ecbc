"""The user's program as a child of its rank: its arguments, its environment, its start."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from layout_sweep.regular_file import read_regular
from orchestrator.core.problem.layout import NAMED_AXES, OptionValue
from orchestrator.core.sweepfile.command_options import CommandOptions, Processes
from orchestrator.core.sweepfile.program_files import Files, why_not_startable
from orchestrator.core.sweepfile.template import fill, text_of
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.core.trial.python_command import python_command
from orchestrator.core.trial.rank_environment import RANKS_OWN
from workloads.command.config_files import write_files
from workloads.command.framework import with_framework
from workloads.rank import ConfigRejected, Rank

_MOST_SCRIPT_BYTES = 1 << 20
# If it is set, the program writes Chrome traces into this folder.
PROFILE_VARIABLE = "SWEEP_PROFILE_DIR"
FILES = Files(
    exists=os.path.exists, is_folder=os.path.isdir, may_run=lambda path: os.access(path, os.X_OK)
)


class CannotStart(Exception):
    """The operating system cannot start the program. The message says which, where and why."""


@dataclass(frozen=True, kw_only=True)
class ProgramPlace:
    """The place of a program: its node's part of the gang, and the files that it may write.

    Each rank has files of its own, so that only those of rank 0 are read as the gang's numbers.
    """

    run_dir: Path
    rank: int
    local_rank: int
    gpus_per_node: int
    node_rank: int
    master_addr: str
    master_port: int

    @classmethod
    def of(cls, rank: Rank) -> ProgramPlace:
        return cls(
            run_dir=rank.run_dir,
            rank=rank.rank,
            local_rank=rank.local_rank,
            gpus_per_node=rank.local_world_size,
            node_rank=int(os.environ["GROUP_RANK"]),
            master_addr=os.environ["MASTER_ADDR"],
            master_port=int(os.environ["MASTER_PORT"]),
        )

    @property
    def result_file(self) -> Path:
        return self._own("program-result", ".json")

    @property
    def metrics_file(self) -> Path:
        return self._own("program-metrics", ".jsonl")

    @property
    def stop_file(self) -> Path:
        """One for all ranks of a node."""
        return self.run_dir / "stop"

    @property
    def trace_folder(self) -> Path:
        """The folder for the traces of a program that is profiled."""
        return self._own("traces", "")

    @property
    def of_first_rank(self) -> ProgramPlace:
        """The place of the node's first rank, whose files its other ranks read."""
        return replace(self, rank=self.rank - self.local_rank, local_rank=0)

    def _own(self, stem: str, ending: str) -> Path:
        number = f"-{self.rank}" if self.rank > 0 else ""
        return self.run_dir / f"{stem}{number}{ending}"


def reporting_rank(rank: Rank) -> int:
    """The rank of the gang that hands over the steps."""
    return rank.request.reporting_rank(local_world_size=rank.local_world_size)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that was started, with the environment that it got."""

    process: subprocess.Popen[bytes]
    began: float  # monotonic, just before it was started
    environment: Mapping[str, str]
    place: ProgramPlace
    # True if its command, or a file that this names, uses the number of steps that are asked for.
    # None: that cannot be seen.
    names_num_steps: bool | None


def start(options: CommandOptions, rank: Rank, *, output: int | None = None) -> Program:
    """Start the program of one rank, or of one node. It dies with this process.

    It prints to the descriptor `output`, or to this rank's log.

    Raises ConfigRejected if a secret did not reach this rank or the framework cannot express the
    layout, ValueError for a template that names nothing, CannotStart.
    """
    place = ProgramPlace.of(rank)
    options = with_framework(options, rank.request, gpus_per_node=place.gpus_per_node)
    values = template_values(rank.request, place)
    names = {name: text_of(value) for name, value in values.items()}
    argv = [fill(text, names) for text in options.argv]
    environment = _environment(options, names)
    if rank.request.profile is not None:
        place.trace_folder.mkdir()
        environment |= {PROFILE_VARIABLE: str(place.trace_folder)}
    cwd = fill(options.cwd, names) if options.cwd is not None else str(rank.run_dir)
    if absent := [name for name in options.env_from if name not in os.environ]:
        text = f"workload.options.env_from names {', '.join(absent)}"
        raise ConfigRejected(f"{text}, which did not reach this rank")
    try:
        # The ranks of a node share them.
        shared = template_values(rank.request, place.of_first_rank)
        write_files(options.files, rank.run_dir, shared)
    except OSError as exc:
        raise CannotStart(f"cannot write {exc.filename}: {exc.strerror}") from exc
    missing = why_not_startable(
        argv,
        cwd=cwd if options.cwd is not None else None,
        search_path=environment.get("PATH"),
        files=FILES,
        written=options.files,
    )
    if missing is not None:
        raise CannotStart(f"{missing} (on {socket.gethostname()})")
    # On a busy machine the program may run for seconds before this process goes on.
    began = time.monotonic()
    return Program(
        process=_process(argv, environment, cwd, output),
        began=began,
        environment=environment,
        place=place,
        names_num_steps="num_steps" in options.names_used() or _names_num_steps(argv, cwd),
    )


def _environment(options: CommandOptions, names: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: this rank's, the names of templates, and the file's."""
    is_per_node = options.processes is Processes.PER_NODE
    own = {
        name: value for name, value in os.environ.items() if not (is_per_node and name in RANKS_OWN)
    }
    told = {f"SWEEP_{name.upper()}": value for name, value in names.items()}
    return own | told | {name: fill(text, names) for name, text in options.env.items()}


def _process(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str, output: int | None
) -> subprocess.Popen[bytes]:
    """Start a process that dies with this one. Raises CannotStart."""
    try:
        return subprocess.Popen(
            argv,
            env=environment,
            cwd=cwd,
            stdout=output,
            stderr=output,
            preexec_fn=partial(_die_with, os.getpid()),
        )
    except (OSError, ValueError) as exc:
        # ValueError: no argument can contain a NUL, or letters unknown to the locale.
        reason = exc.strerror if isinstance(exc, OSError) else exc
        if isinstance(exc, FileNotFoundError):
            reason = "its first line (#!) names a program that does not exist"
        raise CannotStart(f"cannot start {argv[0]!r} in {cwd}: {reason}") from exc


_NUM_STEPS = "SWEEP_NUM_STEPS"


def _names_num_steps(argv: Sequence[str], cwd: str) -> bool | None:
    """Return whether a command, or a script that it names, contains SWEEP_NUM_STEPS.

    None: that cannot be seen, since a script may start or import what reads the variable. Only a
    Python script without the name counts as False.
    """
    if any(_NUM_STEPS in word for word in argv):
        return True
    scripts = [_script(Path(cwd) / word) for word in argv]
    if any(script is not None and _NUM_STEPS.encode() in script for script in scripts):
        return True
    python = python_command(argv)
    if python is None or python.script is None:
        return None
    return None if scripts[list(argv).index(python.script)] is None else False


def _script(path: Path) -> bytes | None:
    """Return the beginning of a file; None if it cannot be read."""
    try:
        return read_regular(path, num_bytes=_MOST_SCRIPT_BYTES).content
    except (OSError, ValueError):  # ValueError: a NUL in the word
        return None


def template_values(request: TrialRequest, place: ProgramPlace) -> dict[str, OptionValue]:
    """The names for braces; also in the environment, as SWEEP_MICRO_BATCH_SIZE etc."""
    layout, plan = request.layout, request.measurement
    return {
        **{name: _plain(getattr(layout, name)) for name in NAMED_AXES},
        "world_size": layout.world_size,
        "gpus_per_node": place.gpus_per_node,
        "num_nodes": layout.world_size // place.gpus_per_node,
        "node_rank": place.node_rank,
        "master_addr": place.master_addr,
        "master_port": place.master_port,
        "global_batch_size": layout.global_batch_size,
        "sequence_length": request.sequence_length,
        "num_steps": plan.warmup_steps + plan.max_steps,
        "seed": request.seed,
        "run_dir": str(place.run_dir),
        "result_file": str(place.result_file),
        "metrics_file": str(place.metrics_file),
        "stop_file": str(place.stop_file),
        **dict(layout.options),
    }


def _plain(value: object) -> OptionValue:
    """A size of a layout as a number, a word (`full:8`, `bf16`) as text."""
    return value if isinstance(value, int) else str(value)


_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None)


def _die_with(rank: int) -> None:
    """Have the program killed when this rank dies. For the fork of a process with one thread."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Where the kernel lets only a parent read a process (Yama), so may the launcher: it shows the
    # stack of a program that hangs. Other kernels refuse the call, which does no harm.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    if os.getppid() != rank:  # it died before the call above
        os._exit(1)
