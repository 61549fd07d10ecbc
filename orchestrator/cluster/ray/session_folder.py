"""Finds the folder for the sessions of a local Ray: writable, with space, its path short enough.

Ray itself takes RAY_TMPDIR, else TMPDIR, unchecked, and fails after seconds if it cannot use it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.errors import MachineUnready

VARIABLE = "RAY_TMPDIR"
PREFIX = "sweep-"
# The rest of a socket's path, with the longest process id:
# /sweep-4194304-a1/ray/session_2026-11-23_03-36-06_454563_4194304/sockets/plasma_store
SESSION_PATH_BYTES = 85
SOCKET_PATH_BYTES = 107  # sockaddr_un(7) has 108, with a NUL
LONGEST_BYTES = SOCKET_PATH_BYTES - SESSION_PATH_BYTES
NEEDED_BYTES = 32 << 20  # 0.2 MB at first; logs grow
USUAL = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # if TMPDIR cannot be used


def usable_parent(environment: Mapping[str, str]) -> Path:
    """Return RAY_TMPDIR if set, else the first usable one of TMPDIR and the usual folders.

    Raises MachineUnready with the reason.
    """
    if VARIABLE in environment:
        asked = environment[VARIABLE]
        return _checked(Path(asked), f"{VARIABLE}={asked}", create=True)
    reasons = []
    asked_folders = [Path(environment["TMPDIR"])] if environment.get("TMPDIR") else []
    for folder in dict.fromkeys((*asked_folders, *USUAL)):
        try:
            return _checked(folder, str(folder))
        except MachineUnready as exc:
            reasons.append(str(exc))
    raise MachineUnready(reasons[0])


def name(pid: int) -> str:
    """Return a new name for the folder of a Ray of this orchestrator."""
    return f"{PREFIX}{pid}-{os.urandom(1).hex()}"


def _checked(folder: Path, name: str, *, create: bool = False) -> Path:
    def unready(why: str) -> MachineUnready:
        return MachineUnready(
            f"a local Ray cannot keep its session in {name}: {why}."
            f" Set {VARIABLE} to a folder of your own, as short as /tmp"
        )

    if len(os.fsencode(folder.absolute())) > LONGEST_BYTES:
        raise unready(
            f"the paths of its sockets would exceed {SOCKET_PATH_BYTES} bytes;"
            f" at most {LONGEST_BYTES} are left for the folder"
        )
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as exc:
        raise unready(exc.strerror or str(exc)) from None
    if free < NEEDED_BYTES:
        raise unready(f"{free >> 20} MiB are free, of {NEEDED_BYTES >> 20} that it needs")
    return folder.absolute()
