"""The places of a sweep's files: run folders of trials, the default database, tracebacks."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.core.errors import UsageInvalid


def sweep_home() -> Path:
    """The absolute path of SWEEP_HOME, by default `.sweep` in the current folder."""
    folder = Path(os.environ.get("SWEEP_HOME") or ".sweep")
    try:
        return folder.expanduser().absolute()
    except RuntimeError:
        # ~NAME for a name that no user has.
        raise UsageInvalid(
            f"SWEEP_HOME={folder}: there is no user {folder.parts[0][1:]!r} with a home folder;"
            " write the whole path"
        ) from None


def run_root(run_folder: str) -> Path:
    """The folder of a sweep's run folders (`SweepRow.run_folder`), the same path on each node."""
    return sweep_home() / "runs" / run_folder


def attempt_folders(run_folder: str, trial_id: int, attempt: int) -> list[Path]:
    """The run folders of an attempt on this machine, one per node (`node/run_directory.py`).

    Those of another user, which we may not enter, count as on another machine.
    """
    folder = run_root(run_folder) / f"trial-{trial_id}" / f"attempt-{attempt}"
    try:
        return sorted(folder.glob("node-*"))
    except PermissionError:
        return []
