"""Problems of the process's surroundings: limits, a deleted working folder, names not in UTF-8.

`check` runs before anything heavy is imported. `explain` finds the problem behind an exception.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from orchestrator.core.errors import MachineUnready, SweepError, UsageInvalid

MIB = 1 << 20
# With two cores 244 MiB suffice and 195 MiB do not. OpenBLAS reserves some for each core, and ends
# the process if it gets none.
ADDRESSES_NEEDED_BYTES = 240 * MIB
# Ray's object store takes this share of the memory, in one mapped file (ray_constants.py).
RAY_STORE_FRACTION, RAY_STORE_MOST_BYTES = 0.3, 200 * 10**9
RAY_ADDRESSES_BYTES = 8 << 30
# With 48 it does not start, and with 80 not always.
RAY_FILES = 128

_OF_LIMITS = {
    errno.EMFILE: ("too many open files", resource.RLIMIT_NOFILE, "ulimit -n"),
    errno.EFBIG: ("a file became too large", resource.RLIMIT_FSIZE, "ulimit -f"),
    errno.ENOMEM: ("no memory left", resource.RLIMIT_AS, "ulimit -v"),
    errno.EAGAIN: ("no process or thread could be started", resource.RLIMIT_NPROC, "ulimit -u"),
}


def check() -> None:
    """Raise MachineUnready for a limit under which this program could report no error."""
    addresses = limit(resource.RLIMIT_AS)
    if addresses is not None and addresses < ADDRESSES_NEEDED_BYTES:
        raise MachineUnready(
            f"ulimit -v leaves {addresses // MIB} MiB of addresses, less than the"
            f" {ADDRESSES_NEEDED_BYTES // MIB} MiB that this program needs: ulimit -v unlimited"
        )


def check_for_ray() -> None:
    """Raise MachineUnready for limits under which a local Ray would not start."""
    store = min(int(RAY_STORE_FRACTION * _memory_bytes()), RAY_STORE_MOST_BYTES)
    for kind, needed, command, what in (
        (resource.RLIMIT_AS, store + RAY_ADDRESSES_BYTES, "ulimit -v", "addresses"),
        (resource.RLIMIT_FSIZE, store, "ulimit -f", "a file"),
    ):
        most = limit(kind)
        if most is not None and most < needed:
            raise MachineUnready(
                f"{command} leaves {most / MIB:,.0f} MiB for {what}, and a local Ray on this"
                f" machine needs {needed / MIB:,.0f} MiB, most of them for its object store:"
                f" {command} unlimited"
            )
    files = limit(resource.RLIMIT_NOFILE)
    if files is not None and files < RAY_FILES:
        raise MachineUnready(
            f"ulimit -n leaves {files} open files, and a local Ray needs {RAY_FILES} at least:"
            " ulimit -n 1024"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit(kind: int) -> int | None:
    """The soft limit of a resource in the units of setrlimit(2); None if it has none."""
    soft, _ = resource.getrlimit(kind)
    return soft if soft != resource.RLIM_INFINITY else None


def explain(exc: BaseException) -> SweepError | None:
    """The problem of the surroundings behind an exception; None if it is a bug of this program."""
    if isinstance(exc, FileNotFoundError) and working_folder_is_gone():
        return UsageInvalid(
            "the working folder no longer exists: change to another (cd), and repeat the command"
        )
    if isinstance(exc, UnicodeEncodeError) and (byte := _undecodable_byte(exc)) is not None:
        return UsageInvalid(
            f"a name or argument contains the byte {byte}, which is not UTF-8 text: rename it, or"
            " write it in UTF-8"
        )
    if isinstance(exc, MemoryError):
        return MachineUnready(
            f"no memory left{_limited(resource.RLIMIT_AS, 'ulimit -v')}. Free some, or raise the"
            " limit"
        )
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        where = f" {exc.filename}" if exc.filename else " a file"
        return MachineUnready(
            f"cannot write{where}: {exc.strerror}. Free some space, then repeat the command: no"
            " stored result is lost"
        )
    if isinstance(exc, OSError) and exc.errno in _OF_LIMITS:
        problem, kind, command = _OF_LIMITS[exc.errno]
        return MachineUnready(
            f"{problem}{_limited(kind, command)}. Raise the limit, then repeat the command"
        )
    return None


def working_folder_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _limited(kind: int, command: str) -> str:
    most = limit(kind)
    return f" ({command} is {most})" if most is not None else ""


def _undecodable_byte(exc: UnicodeEncodeError) -> str | None:
    """The byte that is no text: Python represents it by a surrogate, which cannot be encoded."""
    letter = exc.object[exc.start]
    return f"0x{ord(letter) - 0xDC00:02x}" if 0xDC80 <= ord(letter) <= 0xDCFF else None
