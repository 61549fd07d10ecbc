"""Who takes connections where, told of processes by their ids, as the kernel has it in /proc."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orchestrator.node.exposure import listening_sockets, sockets_of


class Place(NamedTuple):
    address: str
    port: int


def listeners(pids: Iterable[int]) -> set[Place]:
    """Where these processes listen now."""
    sockets = dict(listening_sockets())
    return {
        Place(*sockets[inode])
        for pid in pids
        for inode in sockets_of(Path(f"/proc/{pid}")) & sockets.keys()
    }
