"""Recognises that a program starts ranks by itself, by the processes below it.

It reads no process: command lines and environments are given. Data loaders, compilers and programs
that replace themselves keep the environment of their rank, so they are no ranks of another gang.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.trial.python_command import python_command

# A launcher gives its ranks other values than the program has; a child of a rank inherits them.
_WORLD_SIZE, _RUN_ID = "WORLD_SIZE", "TORCHELASTIC_RUN_ID"

# Programs and modules that start ranks, whatever their arguments; `accelerate launch` may not.
_LAUNCHERS: Mapping[str, str] = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
}

FIX = "set workload.options.processes: per_node, or start the program without its launcher"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenProcess:
    """A process of the program's tree: how it was started."""

    pid: int
    parent: int
    argv: Sequence[str]
    # At its start; empty if it may not be read.
    environment: Mapping[str, str]


def launcher_in(argv: Sequence[str]) -> str | None:
    """Return the launcher of ranks that this command line starts; None: it starts none we know."""
    return _LAUNCHERS.get(_program_of(argv))


def nested_launch(processes: Iterable[SeenProcess], own: Mapping[str, str]) -> str | None:
    """Return what shows that a rank's program starts ranks of its own; None: nothing does.

    `own` is the environment in which the program was started.
    """
    ranks_of: dict[int, set[str]] = defaultdict(set)
    for process in processes:
        if (launcher := launcher_in(process.argv)) is not None:
            return f"it runs {launcher}"
        has = process.environment
        # Messages without ids are alike in all trials, so that the sweep stops after a few.
        if has.get(_WORLD_SIZE, own.get(_WORLD_SIZE)) != own.get(_WORLD_SIZE):
            found = f"{_WORLD_SIZE}={has[_WORLD_SIZE]}, not {own.get(_WORLD_SIZE)}"
            return f"a process below it has {found}"
        if has.get(_RUN_ID, own.get(_RUN_ID)) != own.get(_RUN_ID):
            return f"a process below it has another {_RUN_ID}"
        if (rank := has.get("RANK")) is not None:
            ranks_of[process.parent].add(rank)
    several = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    if several is None:
        return None
    return f"a process below it started others with RANK {', '.join(sorted(several))}"


def wrong_world_size(processes: Iterable[SeenProcess], world_size: int) -> str | None:
    """Return what shows that a node's launcher started another number of ranks than the layout has.

    None: some process has the right WORLD_SIZE, or none has one.
    """
    found = {process.environment.get(_WORLD_SIZE) for process in processes} - {None}
    if not found or str(world_size) in found:
        return None
    some = ", ".join(sorted(str(value) for value in found))
    return f"its processes have {_WORLD_SIZE}={some}, and the layout has {world_size} ranks"


def _program_of(argv: Sequence[str]) -> str:
    """The program of a command line without its folder; of a Python, its script or module."""
    if (python := python_command(argv)) is not None:
        return python.module or posixpath.basename(python.script or "")
    return posixpath.basename(argv[0]) if argv else ""
