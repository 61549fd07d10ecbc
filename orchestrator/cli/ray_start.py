"""Starts the scheduler on Ray for a command: says which Ray, keeps a local one off the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.terminal.output import note

if TYPE_CHECKING:
    from orchestrator.cluster.ray.scheduler import RayScheduler


def start_ray_scheduler(
    ray_address: str | None,
    *,
    root: Path,
    device: str = "auto",
    gpus_per_node: int | str | None = None,
    rank_environment: Mapping[str, str] | None = None,
    rank_secrets: Mapping[str, str] | None = None,
    say: Callable[[str], None] = note,
) -> RayScheduler:
    """Join the cluster at an address, or start a local Ray.

    `device` and `gpus_per_node` are those of a sweep file; any device but `auto` and `cpu` is a
    GPU. Raises ClusterUnavailable.
    """
    _announce(ray_address, say)
    # Ray takes seconds to import, and reads its environment then.
    from orchestrator.cluster.ray.scheduler import RayScheduler
    from orchestrator.core.trial.protocol import Device

    return RayScheduler(
        address=ray_address,
        device={"auto": None, "cpu": Device.CPU}.get(device, Device.CUDA),
        root=root,
        gpus_per_node=gpus_per_node if isinstance(gpus_per_node, int) else None,
        rank_environment=rank_environment,
        rank_secrets=rank_secrets,
    )


def _announce(ray_address: str | None, say: Callable[[str], None]) -> None:
    if ray_address is not None:
        say(f"Joining the Ray cluster at {ray_address} ...")
        return
    # Ray's own switch for "this machine only", read when Ray is imported: its servers bind
    # loopback instead of every interface.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    say("Starting a local Ray ...")
