"""Where a sweep's files lie: run folders of the trials, the default database, saved tracebacks."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.core.errors import UsageInvalid

HOME_VARIABLE = "SWEEP_HOME"


def sweep_home() -> Path:
    """SWEEP_HOME, or `.sweep` under the current folder; absolute, and not made here."""
    folder = Path(os.environ.get(HOME_VARIABLE) or ".sweep")
    try:
        return folder.expanduser().absolute()
    except RuntimeError:  # ~NAME of nobody
        raise UsageInvalid(
            f"SWEEP_HOME={folder}: there is no user {folder.parts[0][1:]!r} with a home folder; write the whole path"
        ) from None


def run_root(run_folder: str) -> Path:
    """Where a sweep's run folders lie (`SweepRow.run_folder`): each node's launcher makes its own in it, on that node."""
    return sweep_home() / "runs" / run_folder


def attempt_folders(run_folder: str, trial_id: int, attempt: int) -> list[Path]:
    """The run folders of an attempt that lie on this machine, one per node of its gang (see `launcher.run_directory`)."""
    return sorted(
        (run_root(run_folder) / f"trial-{trial_id}" / f"attempt-{attempt}").glob("node-*")
    )
