"""The folder in which a Ray of our own keeps its sessions: one that can be written to, has room, and whose paths are short enough for sockets.

Ray itself takes RAY_TMPDIR, else TMPDIR, unchecked, and fails after seconds where it cannot use the folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.errors import MachineUnready

VARIABLE = "RAY_TMPDIR"
PREFIX = "sweep-"
# What comes behind it: /sweep-4194304-a1/ray/session_2026-11-23_03-36-06_454563_4194304/sockets/plasma_store, with the longest process id.
SESSION_PATH_BYTES = 85
SOCKET_PATH_BYTES = 107  # sockaddr_un(7) has 108, with a NUL
LONGEST_BYTES = SOCKET_PATH_BYTES - SESSION_PATH_BYTES
NEEDED_BYTES = 32 << 20  # a session of seconds writes 0.2 MB; logs grow by the hour
USUAL = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # where TMPDIR cannot be used


def chosen(environment: Mapping[str, str]) -> Path:
    """RAY_TMPDIR where it is set, else the first of TMPDIR and the usual folders that can be used. Raises MachineUnready with the reason."""
    if VARIABLE in environment:
        return _usable(
            Path(environment[VARIABLE]), f"{VARIABLE}={environment[VARIABLE]}", make=True
        )
    told = []
    asked = [Path(environment["TMPDIR"])] if environment.get("TMPDIR") else []
    for folder in dict.fromkeys((*asked, *USUAL)):
        try:
            return _usable(folder, str(folder))
        except MachineUnready as exc:
            told.append(str(exc))
    raise MachineUnready(told[0])


def name(pid: int) -> str:
    """A new name for the folder of one Ray of the orchestrator of this process id."""
    return f"{PREFIX}{pid}-{secrets.token_hex(1)}"


def check(environment: Mapping[str, str]) -> None:
    """Raise MachineUnready where a local Ray would find no folder."""
    chosen(environment)


def _usable(folder: Path, name: str, *, make: bool = False) -> Path:
    def unready(why: str) -> MachineUnready:
        return MachineUnready(
            f"a local Ray cannot keep its session in {name}: {why}. Set {VARIABLE} to a folder of your own, as short as /tmp"
        )

    if len(os.fsencode(folder.absolute())) > LONGEST_BYTES:
        raise unready(
            f"the paths of its sockets would exceed {SOCKET_PATH_BYTES} bytes; at most {LONGEST_BYTES} are left for the folder"
        )
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as exc:
        raise unready(exc.strerror or str(exc)) from None
    if free < NEEDED_BYTES:
        raise unready(f"{free >> 20} MiB are free, of {NEEDED_BYTES >> 20} that it needs")
    return folder.absolute()
