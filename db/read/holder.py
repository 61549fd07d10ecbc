"""The process that owns a sweep: its identity, and whether it is still alive."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db.read.rows import Holder, SweepRow


def live_holder(row: sa.Row[*tuple[Any, ...]]) -> Holder | None:
    """The holder in a row of `sweep` with the database's `now`; None if the lease has ended."""
    if row.owner_token is None or row.lease_until <= row.now:
        return None
    return Holder(
        host=row.owner_host,
        pid=row.owner_pid,
        namespace=row.owner_namespace,
        since=row.owner_since,
        lease_until=row.lease_until,
    )


def holder_is_gone(holder: Holder) -> bool:
    """Return whether the holder was a process of this machine and namespace that no longer exists.

    False also if that cannot be known here.
    """
    if holder.namespace != process_namespace() or holder.host != socket.gethostname():
        return False
    try:
        state = Path("/proc", str(holder.pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    # Dead, but not yet reaped by its parent.
    return state in "ZX"


def is_worked_on(sweep: SweepRow) -> bool:
    """Return whether an orchestrator that may be alive has the sweep.

    If not, what is under way in the store was interrupted, and the next `sweep run` takes it up.
    """
    return sweep.holder is not None and not holder_is_gone(sweep.holder)


def process_namespace() -> str:
    """The set of processes in which our pid is unique.

    Two containers may share a host name and even a pid.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        # Without /proc no holder is ever called dead: a fresh name equals no other.
        return f"unknown/{os.urandom(8).hex()}"
