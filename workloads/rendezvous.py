"""Where the ranks of a gang meet: torch's store on rank 0's MASTER_PORT, which takes connections at
MASTER_ADDR alone.

torch's own `env://` has that store listen on every interface, and it asks nobody who they are: on
one node this is loopback, between nodes the address at which the others reach rank 0's. Programs of
workload command meet as they choose.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from workloads.rank import Rank

_EVERY_INTERFACE = {
    socket.AF_INET: "0.0.0.0",
    socket.AF_INET6: "::",
}  # where there is nothing narrower


def join_gang(rank: Rank, device: torch.device) -> None:
    """Make this rank a member of its gang's process group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]  # where torch documents it
        host,
        port,
        rank.world_size,
        is_master=rank.rank == 0,
        timeout=timedelta(
            seconds=rank.request.limits.total
            # The launcher's limit of this phase comes first
        ),
        master_listen_fd=bound(host, port).detach() if rank.rank == 0 else None,
    )
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        device_id=device if is_cuda else None,
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that will listen at one address, or on every interface where none holds it, as
    behind a translation of addresses.

    The launcher holds the port: SO_REUSEADDR lets this socket in beside its own. Raises OSError
    where another program has it.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(place)
    except OSError as exc:
        if exc.errno != errno.EADDRNOTAVAIL:
            raise
        listening.bind((_EVERY_INTERFACE[family], port))
    return listening
