"""Connects the ranks of a gang: torch's store on rank 0 listens at MASTER_ADDR:MASTER_PORT alone.

With torch's own `env://` that store listens on every interface, without authentication. Ours
listens on loopback for a gang on one node, else at the address by which the other nodes reach rank
0's. Programs of workload command connect as they choose.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from workloads.rank import Rank

_EVERY_INTERFACE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def join_gang(rank: Rank, device: torch.device) -> None:
    """Make this rank a member of its gang's process group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]  # where torch documents it
        host,
        port,
        rank.world_size,
        is_master=rank.rank == 0,
        # The launcher's limit of this phase is shorter.
        timeout=timedelta(seconds=rank.request.limits.total),
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
    """A socket that will listen at one address, or on every interface if none has that address, as
    behind a translation of addresses.

    The launcher's socket reserves the port, and SO_REUSEADDR lets this one in. Raises OSError if
    another program has it.
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
