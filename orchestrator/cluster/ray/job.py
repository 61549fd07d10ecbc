"""The Ray job whose entrypoint this process may be: its folder, and what Ray set for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for a job's entrypoint
# Ray unpacks here what a job uploads, and deletes it when it needs the space.
UNPACKED = ("runtime_resources", "working_dir_files")
THREADS_VARIABLE = "OMP_NUM_THREADS"


def is_unpacked(path: Path) -> bool:
    """Return whether a path is in what was uploaded with a job (`--working-dir`)."""
    parts = path.absolute().parts
    return any(parts[i : i + len(UNPACKED)] == UNPACKED for i in range(len(parts)))


def threads_asked_for(environment: Mapping[str, str]) -> str | None:
    """Return OMP_NUM_THREADS if the user set it.

    Ray sets it for a job to the cores of the entrypoint, or to 1.
    """
    if JOB_VARIABLE not in environment:
        return environment.get(THREADS_VARIABLE)
    of_job = (json.loads(environment[JOB_VARIABLE]).get("runtime_env") or {}).get("env_vars") or {}
    return environment.get(THREADS_VARIABLE) if THREADS_VARIABLE in of_job else None
