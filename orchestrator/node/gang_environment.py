"""The environment and the cores of a gang's ranks on one node, as torchrun would set them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.protocol import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from orchestrator.node.interfaces import rank_interfaces


def gang_environment(order: LaunchOrder, port: int, run_dir: Path) -> dict[str, str]:
    """The variables that all ranks of this node share."""
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
    return environment | gang_interfaces(order) | dict(order.environment) | dict(order.secrets)


def gang_interfaces(order: LaunchOrder) -> dict[str, str]:
    """The variables that name the network interface of this node's ranks."""
    spans_nodes = order.local_world_size < order.request.layout.world_size
    return rank_interfaces(order.address if spans_nodes else None, os.environ)


def rank_places(order: LaunchOrder) -> list[dict[str, Any]]:
    """For each process: its first rank, its own variables, and its cores."""
    per_process = len(order.cpus) // order.num_processes
    return [
        {
            "rank": order.first_rank + local_rank,
            "environment": {
                "RANK": str(order.first_rank + local_rank),
                "LOCAL_RANK": str(local_rank),
            },
            "cpus": list(
                order.cpus[local_rank * per_process :][:per_process] if per_process else order.cpus
            ),
        }
        for local_rank in range(order.num_processes)
    ]
