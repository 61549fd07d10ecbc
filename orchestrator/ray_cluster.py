"""One Ray cluster, seen from its driver: joined or started, and what it has. With scheduler.py the only importer of ray."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.protocol import Device
from orchestrator.gang import Slots

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0


def connect(address: str | None) -> None:
    """Join the cluster at an address, or start a local one. Raises ClusterUnavailable."""
    # Actors that declare no GPU must still see what the launcher gives them; the launcher sets CUDA_VISIBLE_DEVICES itself.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "layout-sweep"}
    if address is None:
        # Ray's memory monitor would kill an agent for what its ranks use; the kernel takes a rank, which offers itself (see rank_server).
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        options |= {"address": "local", "include_dashboard": False}  # "local": never a cluster that happens to run on this machine
    else:
        options["address"] = address
        _knock(address)
    try:
        ray.init(**options)
    except Exception as exc:  # Ray raises all kinds, a bare Exception among them, and each means that there is no cluster
        where = address or "a local Ray"
        hint = (
            "" if address is None else " Is the address right, and does RAY_AUTH_TOKEN_PATH name the cluster's token (RAY_AUTH_MODE=token)?"
        )
        raise ClusterUnavailable(f"no connection to {where}: {first_line(exc)}.{hint}") from exc
    _protect_token()


def discover(device: Device | None, gpus_per_node: int | None) -> tuple[Slots, dict[str, int]]:
    """What the cluster has, and the slots of each node by Ray's id of it."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    chosen = device or (Device.CUDA if any(node["Resources"].get("GPU") for node in nodes) else Device.CPU)
    resource = "GPU" if chosen is Device.CUDA else "CPU"
    counts = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in nodes}
    if gpus_per_node is not None:
        counts = {node_id: min(count, gpus_per_node) for node_id, count in counts.items()}
    slots_of = {node_id: count for node_id, count in counts.items() if count > 0}
    name = next((key.split(":", 1)[1] for node in nodes for key in node["Resources"] if key.startswith("accelerator_type:")), None)
    return Slots(device=chosen, device_name=name, slots_by_node=sorted(slots_of.values(), reverse=True)), slots_of


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Make a call of Ray's that has no time limit and waits for ever where a node is gone. False: it still waits, in a thread left behind."""
    thread = threading.Thread(target=call, name="bounded-ray-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def first_line(exc: BaseException) -> str:
    text = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {text[0] if text else ''}"


def _knock(address: str) -> None:
    """Ray tries an address that nobody answers for minutes; a look at the port says so at once."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as exc:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {address}: {exc.strerror or exc}. Start one with `ray start --head`, or correct --ray-address"
        ) from exc


def _protect_token() -> None:
    """Ray writes its token readable by everyone on the machine."""
    token = Path.home() / ".ray" / "auth_token"
    try:
        if token.stat().st_mode & 0o077 and token.stat().st_uid == os.getuid():
            token.chmod(0o600)
    except OSError as exc:
        logger.debug("No token to protect: %s", exc)
