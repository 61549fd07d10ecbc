"""The addresses and ports at which processes accept connections."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil

from orchestrator.node.exposure import listening_at


class Place(NamedTuple):
    address: str
    port: int


def listeners(pids: Iterable[int]) -> set[Place]:
    """Where these processes listen now."""
    found: set[Place] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found |= {Place(*place) for place in listening_at(psutil.Process(pid))}
    return found
