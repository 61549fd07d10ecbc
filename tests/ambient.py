"""Hides the settings of whoever runs the tests: variables, home and working folder."""

from __future__ import annotations

import os
import signal
from collections.abc import MutableMapping
from pathlib import Path

# Ours, Ray's, PostgreSQL's, a batch system's, what sets up communication, where configurations lie,
# how terminals are written to, and of trackers.
PREFIXES = (
    "SWEEP_",
    "RAY_",
    "PG",
    "SLURM_",
    "NCCL_",
    "GLOO_",
    "TORCHELASTIC_",
    "XDG_",
    "MLFLOW_",
    "WANDB_",
)
NAMES = frozenset(
    {
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "FORCE_COLOR",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    }
)


def is_ambient(name: str) -> bool:
    """Return whether an environment variable is such a setting."""
    return name in NAMES or name.startswith(PREFIXES)


def leave_behind(environment: MutableMapping[str, str], *, home: Path) -> None:
    """Take them out of an environment, and make an empty folder the home."""
    for name in [name for name in environment if is_ambient(name)]:
        del environment[name]
    environment["HOME"] = str(home)


def hear_signals() -> None:
    """Restore signals that `nohup` or a shell's `&` ignore: commands inherit that from tests."""
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def enter(folder: Path) -> None:
    """Work in a folder of the tests' own, without the `.sweep` of the caller's folder."""
    os.chdir(folder)
