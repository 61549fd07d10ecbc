"""The Ray job whose entrypoint this process may be: which folders Ray deletes after it, and what of its environment is Ray's doing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # in the environment of a job's entrypoint
UNPACKED = (
    "runtime_resources",
    "working_dir_files",
)  # where Ray unpacks what a job uploads; it deletes that when it wants the space
THREADS_VARIABLE = "OMP_NUM_THREADS"


def is_unpacked(path: Path) -> bool:
    """Whether a path lies in what was uploaded with a job (`--working-dir`)."""
    parts = path.absolute().parts
    return any(parts[i : i + len(UNPACKED)] == UNPACKED for i in range(len(parts)))


def threads_asked_for(environment: Mapping[str, str]) -> str | None:
    """OMP_NUM_THREADS, if somebody asked for it. In a job Ray sets it to the cores of the entrypoint, 1 for none: that is nobody's wish."""
    if JOB_VARIABLE not in environment:
        return environment.get(THREADS_VARIABLE)
    of_job = (json.loads(environment[JOB_VARIABLE]).get("runtime_env") or {}).get("env_vars") or {}
    return environment.get(THREADS_VARIABLE) if THREADS_VARIABLE in of_job else None
