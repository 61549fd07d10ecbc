"""The environment and the cores of a gang's ranks on one node, as torchrun would set them.

A rank on a GPU runs on the cores of its GPU's NUMA node, unless the order names others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.protocol import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from orchestrator.core.trial.rank_environment import RANK_SERVERS_OWN
from orchestrator.node.device_environment import (
    allocator_settings,
    compile_caches,
    trace_settings,
)
from orchestrator.node.interfaces import rank_interfaces


def gang_environment(order: LaunchOrder, port: int, run_dir: Path, *, root: Path) -> dict[str, str]:
    """The variables that all ranks of this node share. `root`: the launcher's folder."""
    request = order.request
    if order.cpus:
        threads = len(order.cpus) // order.local_world_size
    else:
        threads = len(os.sched_getaffinity(0)) // max(order.local_world_size, order.node_slots or 0)
    environment = {
        "WORLD_SIZE": str(request.layout.world_size),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(order.node_rank),
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": request.tag,
        "OMP_NUM_THREADS": str(max(1, threads)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order
        "CUDA_VISIBLE_DEVICES": ",".join(order.devices),
        RUN_DIR_VARIABLE: str(run_dir),
        ATTEMPT_VARIABLE: request.tag,
    }
    as_the_user_set = {name: os.environ[name] for name in RANK_SERVERS_OWN if name in os.environ}
    unless_set = {**trace_settings(order, run_dir), **compile_caches(order, root)}
    return (
        {name: value for name, value in unless_set.items() if name not in os.environ}
        | environment
        | as_the_user_set
        | gang_settings(order)
        | dict(order.environment)
        | dict(order.secrets)
    )


def gang_settings(order: LaunchOrder) -> dict[str, str]:
    """The variables by which the launcher changes how ranks communicate and allocate."""
    return {**allocator_settings(order, os.environ), **gang_interfaces(order)}


def gang_interfaces(order: LaunchOrder) -> dict[str, str]:
    """The variables that name the network interface of this node's ranks."""
    spans_nodes = order.local_world_size < order.request.layout.world_size
    return rank_interfaces(order.address if spans_nodes else None, os.environ)


def rank_places(order: LaunchOrder, near: Sequence[Sequence[int]] = ()) -> list[dict[str, Any]]:
    """Return for each process its first rank, its own variables, and its cores.

    `near`: the cores that are near the GPU of each rank, if the order names no cores.
    """
    per_process = len(order.cpus) // order.num_processes
    # One process starts all ranks of the node itself, on whichever cores.
    is_bound = not order.cpus and len(near) == order.num_processes == order.local_world_size
    return [
        {
            "rank": order.first_rank + local_rank,
            "environment": {
                "RANK": str(order.first_rank + local_rank),
                "LOCAL_RANK": str(local_rank),
            },
            "cpus": list(near[local_rank])
            if is_bound
            else list(
                order.cpus[local_rank * per_process :][:per_process] if per_process else order.cpus
            ),
        }
        for local_rank in range(order.num_processes)
    ]
