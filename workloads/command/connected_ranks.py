"""Finds processes of one program that train together: they have torch, and a connection.

`torch.multiprocessing.spawn` starts ranks without a launcher, and their environment is that of the
program. Once they have met, there are TCP connections between them. Data loaders, compilers and
loggers have none, or no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ESTABLISHED = "01"
_LIBRARY = b"/libtorch"
# The prefix of an IPv4 address in IPv6, as proc(5) shows it.
_MAPPED = "0000000000000000FFFF0000"


def train_together(pids: Sequence[int]) -> bool:
    """Return whether two of these processes have torch and a TCP connection to each other."""
    holders = _holders(pids)
    if len(pids) < 2 or not holders:
        return False
    at = {local: (inode, remote) for inode, local, remote in _connections(pids[0])}
    for inode, remote in at.values():
        other = at.get(remote)
        if other is None:
            continue
        ours, theirs = holders.get(inode, set()), holders.get(other[0], set())
        # A forked worker has all sockets of its parent, both ends of a connection to itself too.
        if ours and theirs and not ours & theirs and _both_have_torch(ours, theirs):
            return True
    return False


def _both_have_torch(ours: set[int], theirs: set[int]) -> bool:
    """Return whether a process at each end has torch."""
    return all(any(map(_has_torch, some)) for some in (ours, theirs))


def _has_torch(pid: int) -> bool:
    with suppress(OSError):
        return _LIBRARY in Path(f"/proc/{pid}/maps").read_bytes()
    return False


def _holders(pids: Sequence[int]) -> dict[str, set[int]]:
    """Return the processes that have each socket, by its inode."""
    found: dict[str, set[int]] = defaultdict(set)
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if (socket := _SOCKET.fullmatch(str(descriptor.readlink()))) is not None:
                        found[socket[1]].add(pid)
    return found


def _connections(pid: int) -> Iterator[tuple[str, str, str]]:
    """Yield inode, local and remote address of each TCP connection that a process can see."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
            for line in lines:
                # proc(5): sl, local, remote, state, queues, timer, retransmits, uid, timeout, inode
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    yield fields[9], _plain(fields[1]), _plain(fields[2])


def _plain(address: str) -> str:
    """Return an address in the form of IPv4, if a socket of IPv6 has one of IPv4."""
    return address.removeprefix(_MAPPED)
